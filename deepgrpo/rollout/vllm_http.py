"""What this process says to a vLLM server over HTTP: requests for samples, the calls that steer it, and the proof of its weights.

Samples: POST /deepgrpo/generate (vllm_plugin/deepgrpo_generate.py), token ids both ways. Every sampling parameter is in the
request, so that neither vLLM's defaults nor the model's generation config have a say. All samples of a prompt travel in one
request, which has one seed: vLLM draws its n samples from the streams seed, seed + 1, ... So a sample's tokens are a function
of (weights, prompt, sampling, all seeds of its request, its place among them).

Control: each call blocks, has a deadline, and raises an error that names it.
"""

import contextlib
import dataclasses
import hashlib
import logging
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
import numpy as np

from deepgrpo.rollout.engine import BadAnswer, Request, Sampling, checked
from deepgrpo.rollout.vllm_server import MODEL_NAME, VllmServer
from deepgrpo.types import Completion, Ids

log = logging.getLogger(__name__)


MASKED = -1e30  # what an id without a token has added to its logit


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
        "detokenize": bool(sampling.stops),
    }
    if sampling.stops:
        parameters |= {"stop": list(sampling.stops.texts), "include_stop_str_in_output": True}
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
    limits = room(request, sampling), sampling, bound, holes
    found = [_completion(choice, version, *limits) for choice in choices]
    return found if asked == len(request.seeds) else found * len(request.seeds)


def _completion(choice: Mapping[str, Any], version: int, *limits: Any) -> Completion:
    found = checked(choice["token_ids"], choice["logprobs"], choice["finish_reason"], version, *limits)
    made_by = {version for version, _, _ in choice["weight_versions"]}
    if made_by != {str(version)}:
        raise BadAnswer("stale", f"a sample was made by weights {sorted(made_by) or 'unknown'}, expected version {version}")
    return found


#### Control: pause, load, version, score

ANY_ID = 2**31  # a vocabulary whose size does not matter: the answer only has to be the same as another
SHOWN = 300  # characters of an answer that an error quotes
# vLLM's counters of tokens; the second counts those of a prompt while it is still being read, in pieces.
_COUNTERS = re.compile(r"^vllm:(?:generation_tokens_total|iteration_tokens_total_sum)(?:\{.*\})? (\S+)$", re.M)


class VllmError(RuntimeError):
    """A server did not do what it was asked; the message names its URL, the call and what came of it."""


class SnapshotRefused(VllmError):
    """The server did not take the snapshot. names: tensors that are missing, unexpected or of another shape."""

    def __init__(self, message: str, names: Sequence[str]):
        super().__init__(message)
        self.names = tuple(names)


class Control:
    """Reads the server's URL anew for every call: a restart changes it."""

    def __init__(self, server: VllmServer):
        self.server = server

    def load(self, folder: str, deadline: float) -> None:
        """Replaces the weights of every worker by those in `folder`.

        Raises:
          SnapshotRefused: a worker did not; the tensors that do not fit are in the message.
        """
        body = {"method": "deepgrpo_load", "args": [folder], "timeout": deadline}
        results = self._call("POST", "/collective_rpc", deadline, body).get("results") or [{}]
        for worker, result in enumerate(results):
            if not isinstance(result, dict) or result.get("ok") is not True:
                result = result if isinstance(result, dict) else {"error": str(result)}
                listed = {kind: result.get(kind) or [] for kind in ("missing", "unexpected", "mismatched")}
                problems = "".join(f"\n  {kind}: {', '.join(names)}" for kind, names in listed.items() if names)
                reason = result.get("error") or "no reason given"
                raise SnapshotRefused(
                    f"{self.server.url}: worker {worker} did not load {folder}: {reason}{problems}",
                    [name for names in listed.values() for name in names],
                )

    def weight_version(self, deadline: float) -> str:
        return str(self._call("GET", "/weight_info", deadline).get("weight_version"))

    def set_weight_version(self, version: int, deadline: float) -> None:
        self._call("POST", "/update_weight_version", deadline, {"new_version": str(version)})

    def reset_prefix_cache(self, deadline: float) -> None:
        if self._call("POST", "/reset_prefix_cache", deadline).get("success") is not True:
            raise VllmError(
                f"{self.server.url}: /reset_prefix_cache did not succeed: it would mix old keys and values with new weights"
            )

    @contextlib.contextmanager
    def paused(self, deadline: float) -> Iterator[None]:
        """No request runs inside the block; what comes in meanwhile waits. If the block fails, it is its error that counts."""
        self._call("POST", "/pause?mode=wait", deadline)
        try:
            yield
        except BaseException:
            with contextlib.suppress(VllmError):
                self._call("POST", "/resume", deadline)
            raise
        self._call("POST", "/resume", deadline)

    def progress(self, deadline: float) -> float | None:
        """A number that grows with every token that the server reads or makes; None where its /metrics counts none."""
        found = [float(value) for value in _COUNTERS.findall(self._request("GET", "/metrics", deadline).text)]
        return sum(found) if found else None

    def score(self, ids: Ids, deadline: float) -> np.ndarray:
        """Log-probs at temperature 1 of ids[1:], each given all before it: float32[len - 1]. Reads no prefix cache."""
        body = {"model": MODEL_NAME, "prompt": ids.tolist(), "prompt_logprobs": 0, "max_tokens": 1, "temperature": 0.0}
        answer = self._call("POST", "/v1/completions", deadline, body)
        try:
            entries = answer["choices"][0]["prompt_logprobs"][1:]
            values = [entry[str(token)]["logprob"] for token, entry in zip(ids[1:].tolist(), entries, strict=True)]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise VllmError(
                f"{self.server.url}: /v1/completions did not score a text of {len(ids)} tokens ({error!r})"
            ) from error
        return np.array(values, np.float32)

    def greedy(self, ids: Ids, tokens: int, version: int, salt: str, deadline: float) -> tuple[Completion, int]:
        """The most likely continuation, and how many of the prompt's tokens came from the prefix cache."""
        sampling = Sampling(temperature=0.0, top_p=1.0, top_k=-1, stop_ids=(), max_model_len=len(ids) + tokens)
        request = Request(ids, seeds=(0,))
        answer = self._call("POST", GENERATE, deadline, generate_body(request, sampling, (), salt))
        try:
            (completion,) = completions(answer, request, sampling, version, ANY_ID)
        except (BadAnswer, KeyError, TypeError, ValueError, OverflowError) as error:
            raise VllmError(f"{self.server.url}: a greedy answer is not usable: {error}") from error
        return completion, answer["cached_tokens"]

    def _call(self, method: str, path: str, deadline: float, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        url, response = self.server.url + path, self._request(method, path, deadline, body)
        try:
            answer = response.json() if response.content else {}
        except ValueError as error:
            raise VllmError(f"{url}: answered no JSON: {response.text[:SHOWN]}") from error
        if not isinstance(answer, dict):
            raise VllmError(f"{url}: answered {response.text[:SHOWN]}, expected an object")
        return answer

    def _request(self, method: str, path: str, deadline: float, body: Mapping[str, Any] | None = None) -> httpx.Response:
        url = self.server.url + path
        headers = {"Authorization": f"Bearer {self.server.token}"}
        try:  # a connection of its own for each call: a pooled one may have been closed by the server, which looks like a failure
            with httpx.Client(timeout=deadline, trust_env=False) as client:
                response = client.request(method, url, json=body, headers=headers)
        except httpx.TimeoutException as error:
            raise VllmError(f"{url}: no answer within {deadline:g} s ({type(error).__name__})") from error
        except httpx.TransportError as error:
            raise VllmError(f"{url}: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise VllmError(f"{url}: answered {response.status_code}: {response.text[:SHOWN]}")
        return response


#### Proof by effect that a server generates with the weights it was given

# An answer of 200 proves nothing. Ways of being wrong that have been seen: the weights did not change, or only some of them
# did; the version says one thing and the tensors another; the prefix cache still holds keys and values of older weights. A
# small policy update moves log-probs by less than bfloat16 rounds them, so a tolerance alone cannot tell neighbouring versions
# apart. But evaluations with different weights do not agree to the last bit everywhere: a server whose numbers are exactly
# those of the version before, while the learner's own have moved, has not loaded anything.

GREEDY_TOKENS = 4
MOVED_SHARE = 0.5  # of the probe's tokens must have other log-probs before a server is expected to have moved, too


class ProofError(VllmError):
    """The server answers, but not as the weights would that it was given."""


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """A snapshot, and what proves that an engine has it.

    folder: Hugging Face folder. version: training step.
    probe: int32[P], a text longer than a block of the prefix cache.
    logps: float32[P - 1], the learner's log-probs of probe[1:] at temperature 1, by these weights.
    tolerance: distance (`distance`) of log-probs that two programs may have, by dtype.
    """

    folder: pathlib.Path
    version: int
    probe: Ids
    logps: np.ndarray
    tolerance: float

    def moved_since(self, older: "Weights") -> bool:
        """Whether the learner's numbers differ so widely from the older version's that an engine's must, too."""
        return np.mean(self.logps != older.logps) >= MOVED_SHARE


@dataclasses.dataclass(frozen=True, eq=False)
class Proof:
    """What a server answered for `weights`: to be compared with what it answers for the next ones."""

    weights: Weights
    scores: np.ndarray  # float32[P - 1], of probe[1:]
    greedy_ids: Ids
    greedy_logps: np.ndarray  # float32[GREEDY_TOKENS], as generated, through the prefix cache


def prove(control: Control, weights: Weights, salt: str, before: Proof | None, deadline: float) -> Proof:
    """Asks the server for its version, a greedy continuation of the probe, and the log-probs of both.

    Args:
      before: what it answered for other weights, if it has had any.

    Raises:
      ProofError: it does not have these weights, or mixes them with others'; says what was found and expected.
      VllmError: it did not answer.
    """
    url, version = control.server.url, weights.version
    if (found := control.weight_version(deadline)) != str(version):
        raise ProofError(f"{url}: serves weights of version {found}, expected version {version}")
    greedy, cached = control.greedy(weights.probe, GREEDY_TOKENS, version, salt, deadline)
    if cached:
        raise ProofError(
            f"{url}: {cached} prompt tokens of the first request of version {version} came from the prefix cache, "
            "which was to be empty: they are keys and values of older weights"
        )
    scores = control.score(np.concatenate([weights.probe, greedy.ids]), deadline)
    prompt = len(weights.probe) - 1
    proof = Proof(weights, scores[:prompt], greedy.ids, greedy.logps)
    _require_close(
        url, proof.scores, weights.logps, weights, "of a fixed text, engine against learner", "these are other weights"
    )
    _require_close(
        url, greedy.logps, scores[prompt:], weights, "of its own greedy answer, as generated against as scored afresh",
        "the prefix cache holds keys and values of older weights",
    )  # fmt: skip
    if before is not None and weights.moved_since(before.weights):
        _require_moved(url, proof, before)
    return proof


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """Mean |difference| of log-probs, in nats, of unlikely tokens as a share of their own: rounding grows with the logits."""
    return float(np.mean(np.abs(found - expected) / np.maximum(1.0, np.abs(expected))))


def _require_close(url: str, found: np.ndarray, expected: np.ndarray, weights: Weights, what: str, so: str) -> None:
    gap = distance(found, expected)
    log.debug("%s: log-probs %s: distance %.2g at version %d", url, what, gap, weights.version)
    if not gap <= weights.tolerance:  # a NaN is not close
        raise ProofError(
            f"{url}: log-probs {what}, differ by {gap:.2g} on average at version {weights.version}, "
            f"expected at most {weights.tolerance:g}: {so}"
        )


def _require_moved(url: str, proof: Proof, before: Proof) -> None:
    """Two versions whose learner's numbers differ must not give an engine's that are the same to the last bit."""
    versions = f"those of version {before.weights.version}, though the learner's moved with version {proof.weights.version}"
    if np.array_equal(proof.scores, before.scores):
        raise ProofError(f"{url}: log-probs of a fixed text are to the last bit {versions}: the weights were not loaded")
    same_text = np.array_equal(proof.greedy_ids, before.greedy_ids)
    if same_text and np.array_equal(proof.greedy_logps, before.greedy_logps):
        raise ProofError(f"{url}: a greedy answer is to the last bit {versions}: it came from a cache")
