"""What goes to a vLLM server and comes back: POST /deepgrpo/generate (vllm_plugin/deepgrpo_generate.py), token ids both ways.

Every sampling parameter is in the request, so that neither vLLM's defaults nor the model's generation config have a say. All
samples of a prompt travel in one request, which has one seed: vLLM draws its n samples from the streams seed, seed + 1, ... So a
sample's tokens are a function of (weights, prompt, sampling, all seeds of its request, its place among them).
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deepgrpo.rollout.engine import BadAnswer, Request, Sampling, checked
from deepgrpo.types import Completion

MASKED = -1e30  # what an id without a token has added to its logit
HIGHEST_TEMPERATURE = 2.0  # vLLM refuses more
LOWEST_TEMPERATURE = 0.01  # and takes anything between 0 and this for this


def check_sampling(sampling: Sampling) -> None:
    """Raises ValueError for a distribution that vLLM would refuse or silently replace by another one."""
    if not (sampling.temperature == 0 or LOWEST_TEMPERATURE <= sampling.temperature <= HIGHEST_TEMPERATURE):
        raise ValueError(
            f"temperature is {sampling.temperature}, vLLM takes 0 (greedy) or {LOWEST_TEMPERATURE} to {HIGHEST_TEMPERATURE}"
        )
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"top_p is {sampling.top_p}, expected (0, 1]")
    if sampling.top_k != -1 and sampling.top_k < 1:
        raise ValueError(f"top_k is {sampling.top_k}, expected -1 (off) or at least 1")
    if sampling.max_new_tokens is not None and sampling.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {sampling.max_new_tokens}, expected None (what the context leaves) or at least 1")


def room(request: Request, sampling: Sampling) -> int:
    """Tokens that a response may have; 0 or less without room."""
    limits = [limit for limit in (request.max_tokens, sampling.max_new_tokens) if limit is not None]
    return min([sampling.max_model_len - len(request.prompt_ids), *limits])


def request_seed(seeds: Sequence[int]) -> int:
    """63 bits: wide enough that the streams seed, seed + 1, ... of two requests do not overlap."""
    digest = hashlib.blake2b(np.asarray(seeds, np.uint32).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def samples_asked(request: Request, sampling: Sampling) -> int:
    """Greedy samples of a prompt are one and the same; vLLM takes no n > 1 there."""
    return len(request.seeds) if sampling.temperature > 0 else 1


GENERATE = "/deepgrpo/generate"


def generate_body(request: Request, sampling: Sampling, holes: Sequence[int], salt: str) -> dict[str, Any]:
    """JSON of one request. `salt` parts the prefix cache: blocks made under another one are never reused.

    holes: ids below the vocabulary's bound that have no token.
    """
    parameters = {
        "n": samples_asked(request, sampling),
        "max_tokens": room(request, sampling),
        "min_tokens": 0,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        # The stop ids are the union of all that the model knows; vLLM must not add any of its own.
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,
        "logprobs": 0,  # of the sampled token alone
        "detokenize": False,
    }
    if holes:
        parameters["logit_bias"] = {str(hole): MASKED for hole in holes}
    if sampling.temperature > 0:
        parameters["seed"] = request_seed(request.seeds)
    return {"token_ids": request.prompt_ids.tolist(), "cache_salt": salt, "sampling_params": parameters}


def completions(
    body: Mapping[str, Any], request: Request, sampling: Sampling, version: int, bound: int, holes: Sequence[int] = ()
) -> list[Completion]:
    """The samples of an answer, in seed order. bound, holes: see `engine.check_ids`.

    Raises:
      BadAnswer: it is not the whole, undisturbed answer of the weights of `version`.
    """
    asked = samples_asked(request, sampling)
    choices = sorted(body.get("choices") or (), key=lambda choice: choice["index"])
    if [choice["index"] for choice in choices] != list(range(asked)):
        raise BadAnswer("incomplete", f"{len(choices)} samples came back, expected {asked}")
    limits = room(request, sampling), sampling.stop_ids, bound, holes
    found = [_completion(choice, version, *limits) for choice in choices]
    return found if asked == len(request.seeds) else found * len(request.seeds)


def _completion(choice: Mapping[str, Any], version: int, *limits: Any) -> Completion:
    found = checked(choice["token_ids"], choice["logprobs"], choice["finish_reason"], version, *limits)
    made_by = {version for version, _, _ in choice["weight_versions"]}
    if made_by != {str(version)}:
        raise BadAnswer("stale", f"a sample was made by weights {sorted(made_by) or 'unknown'}, expected version {version}")
    return found
