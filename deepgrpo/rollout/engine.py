"""The interface of every rollout engine: token ids in; token ids, log-probs and a finish reason out.

An engine holds one set of weights with a version. `weights.engines.open_engine` returns it with the function that gives others;
`generate` uses none that is not proven to be there. It is synchronous for the caller; how many requests run at once is the
engine's business. The sampled distribution is `softmax(logits / temperature)` restricted to top-k, then to top-p, without phantom
ids (vocabulary rows above the tokenizer), renormalised; returned log-probs are of exactly that distribution. Temperature 0 is
greedy: the argmax, whose log-prob is reported under temperature 1 without top-k and top-p.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from deepgrpo.rollout.stops import StopTexts
from deepgrpo.types import Completion, Ids, as_ids

ABOVE_ONE = 1e-3  # by so much may rounding lift a log-prob above 0


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Parameters of the sampled distribution; every one is explicit, none leaks in from a model's generation config.

    temperature: >= 0; 0 is greedy. top_p: (0, 1]. top_k: -1 for off, else >= 1.
    stop_ids: ids that end a response (union of the tokenizer's and the generation config's).
    max_model_len: tokens of prompt plus response. max_new_tokens: of the response, where that has a limit of its own.
    stops: texts that end a response too; for the thread that calls `generate`. None: there are none.
    """

    temperature: float
    top_p: float
    top_k: int
    stop_ids: tuple[int, ...]
    max_model_len: int
    max_new_tokens: int | None = None
    stops: StopTexts | None = None


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


class Feed(Protocol):
    """Requests that become ready while others are sampled: the next turns of a conversation."""

    def take(self, wait: bool) -> list[Request]:
        """Those that are ready, which are numbered after all before them. wait: until there is one, or none can come any more."""

    def close(self) -> None:
        """Ends every wait: no request will be sampled any more. Any thread."""


class Engine(Protocol):
    version: int  # of the weights that `generate` uses

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_done: OnDone | None = None, feed: Feed | None = None
    ) -> list[list[Completion]]:
        """Returns completions in request order, then seed order. A prompt without room gives empty `length` completions.

        feed: is asked for further requests whenever there is room, until it has none; `on_done` must not block then.
        """

    def metrics(self) -> Mapping[str, float]:
        """Cumulative counters under `engine/`. Reading changes nothing."""

    def close(self) -> None:
        """Releases processes, sockets and buffers; idempotent."""


class BadAnswer(Exception):
    """An answer that must not be trained on: cut off, incomplete, impossible, or made by other weights. Asking again may help."""

    def __init__(self, kind: str, detail: str):
        super().__init__(detail)
        self.kind = kind  # aborted | incomplete | stale


def check_sampling(sampling: Sampling) -> None:
    """Raises ValueError, naming the field, if a parameter is outside its range."""
    if not sampling.temperature >= 0 or sampling.temperature == float("inf"):
        raise ValueError(f"Sampling.temperature must be a finite number >= 0 (0 is greedy), got {sampling.temperature}")
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"Sampling.top_p must be in (0, 1] (1 is off), got {sampling.top_p}")
    if sampling.top_k != -1 and sampling.top_k < 1:
        raise ValueError(f"Sampling.top_k must be -1 (off) or >= 1, got {sampling.top_k}")
    if sampling.max_model_len < 1:
        raise ValueError(f"Sampling.max_model_len must be >= 1, got {sampling.max_model_len}")
    if sampling.max_new_tokens is not None and sampling.max_new_tokens < 1:
        raise ValueError(f"Sampling.max_new_tokens must be None (what the context leaves) or >= 1, got {sampling.max_new_tokens}")


def check_ids(requests: Sequence[Request], sampling: Sampling, bound: int, holes: Sequence[int] = ()) -> None:
    """Names in a ValueError a parameter out of range, an empty prompt, a seed outside uint32, or an id without a token.

    bound, holes: see `data.tokenizer.Vocabulary`.
    """
    check_sampling(sampling)
    if len(outside := without_token(as_ids(sampling.stop_ids), bound, holes)):
        raise ValueError(f"stop id {outside[0]} has no token, expected one below {bound}: no response could ever end with it")
    for i, request in enumerate(requests):
        if len(request.prompt_ids) == 0:
            raise ValueError(f"request {i}: the prompt is empty; the first token is sampled after at least one prompt id")
        if len(outside := without_token(request.prompt_ids, bound, holes)):
            raise ValueError(f"request {i}: prompt id {outside[0]} is not in the vocabulary, expected 0 <= id < {bound}")
        for seed in request.seeds:
            if not 0 <= seed < 2**32:
                raise ValueError(f"request {i}: seed {seed} is not a uint32; derive seeds with engine.sample_seed")


def without_token(ids: np.ndarray, bound: int, holes: Sequence[int]) -> np.ndarray:
    """Those of `ids` that no token has."""
    return ids[(ids < 0) | (ids >= bound) | (np.isin(ids, holes) if len(holes) else False)]


def checked(
    ids: Any, logps: Any, reason: Any, version: int, room: int, sampling: Sampling, bound: int, holes: Sequence[int] = ()
) -> Completion:
    """The door through which everything passes that an engine has sampled. What came after a stop text is left out.

    Args:
      ids, logps: lists of a response's token ids and their log-probs, as they came. reason: finish reason.
      room: tokens that the response may have. bound, holes: see `check_ids`.

    Raises:
      BadAnswer: it cannot be a whole response of this vocabulary.
    """
    if reason not in ("stop", "length"):
        raise BadAnswer("aborted", f"a sample ended with finish_reason {reason!r} after {len(ids)} tokens")
    ids, logps = np.asarray(ids), np.asarray(logps)
    if ids.ndim != 1 or not len(ids) or logps.shape != ids.shape:
        raise BadAnswer("incomplete", f"tokens of shape {ids.shape} came with log-probs of shape {logps.shape}")
    if ids.dtype.kind not in "iu" or logps.dtype.kind not in "fiu":
        raise BadAnswer("incomplete", f"tokens of type {ids.dtype} came with log-probs of type {logps.dtype}, expected numbers")
    if len(outside := without_token(ids, bound, holes)):
        raise BadAnswer("incomplete", f"token id {outside[0]} has no token in a vocabulary of ids below {bound}")
    if not (logps <= ABOVE_ONE).all() or np.isneginf(logps).any():
        wrong = logps[~((logps <= ABOVE_ONE) & np.isfinite(logps))][0]
        raise BadAnswer("incomplete", f"a sampled token has log-prob {wrong}, expected a finite number <= 0")
    handed_over = sampling.stops.length(ids) if sampling.stops else 0
    if handed_over:
        ids, logps, reason = ids[:handed_over], logps[:handed_over], "stop"
    ends = np.isin(ids, list(sampling.stop_ids))
    if ends[:-1].any() or (reason == "stop" and not (ends[-1] or handed_over)):  # `length` is also said of a stop at the limit
        where = np.flatnonzero(ends).tolist()
        raise BadAnswer("incomplete", f"finish_reason {reason} after {len(ids)} tokens with stop ids at {where}")
    if len(ids) > room or (reason == "length" and len(ids) != room):
        raise BadAnswer("incomplete", f"finish_reason {reason} after {len(ids)} tokens, room was for {room}")
    logps = np.array(logps, np.float32)
    logps.flags.writeable = False
    return Completion(as_ids(ids), logps, reason, version)


def sample_seed(seed: int, step: int, purpose: str, prompt: int, sample: int) -> int:
    """uint32 seed of one sample: a pure function of the run's seed and the sample's place, never of a global generator."""
    text = f"{seed}/{step}/{purpose}/{prompt}/{sample}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")
