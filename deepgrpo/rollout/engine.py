"""The interface of every rollout engine: token ids in; token ids, log-probs and a finish reason out.

An engine holds one set of weights with a version. `weights.setup.open_engine` returns it with the function that gives it others;
`generate` uses none that is not proven to be there. It is synchronous for the caller; how many requests run at once is the
engine's business. The sampled distribution is `softmax(logits / temperature)` restricted to top-k, then to top-p, without phantom
ids (vocabulary rows above the tokenizer), renormalised; returned log-probs are of exactly that distribution. Temperature 0 is
greedy: the argmax, whose log-prob is reported under temperature 1 without top-k and top-p.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from deepgrpo.types import Completion, Ids


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Parameters of the sampled distribution; every one is explicit, none leaks in from a model's generation config.

    temperature: >= 0; 0 is greedy. top_p: (0, 1]. top_k: -1 for off, else >= 1.
    stop_ids: ids that end a response (union of the tokenizer's and the generation config's).
    max_model_len: tokens of prompt plus response. max_new_tokens: of the response, where that has a limit of its own.
    """

    temperature: float
    top_p: float
    top_k: int
    stop_ids: tuple[int, ...]
    max_model_len: int
    max_new_tokens: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """`len(seeds)` samples of one prompt. A sample's tokens depend on (weights, prompt, sampling, its seed) alone; with vLLM, on
    all seeds of the request and the sample's place among them.

    prompt_ids: int32[len]. seeds: one uint32 a sample. max_tokens: optional cap below what `max_model_len` leaves.
    """

    prompt_ids: Ids
    seeds: tuple[int, ...]
    max_tokens: int | None = None


OnDone = Callable[[int, int, Completion], None]  # (request index, sample index, completion), as each sample finishes


class Engine(Protocol):
    version: int  # of the weights that `generate` uses

    def generate(self, requests: Sequence[Request], sampling: Sampling, on_done: OnDone | None = None) -> list[list[Completion]]:
        """Returns completions in request order, then seed order. A prompt without room gives empty `length` completions."""

    def metrics(self) -> Mapping[str, float]:
        """Cumulative counters under `engine/`. Reading changes nothing."""

    def close(self) -> None:
        """Releases processes, sockets and buffers; idempotent."""


def sample_seed(seed: int, step: int, purpose: str, prompt: int, sample: int) -> int:
    """uint32 seed of one sample: a pure function of the run's seed and the sample's place, never of a global generator."""
    text = f"{seed}/{step}/{purpose}/{prompt}/{sample}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")
