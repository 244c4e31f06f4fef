"""The calls that steer one vLLM server: pause, load, version, score. Each blocks, has a deadline, and an error that names it."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
import numpy as np

from deepgrpo.rollout.engine import BadAnswer, Request, Sampling
from deepgrpo.rollout.vllm_server import MODEL_NAME, VllmServer
from deepgrpo.rollout.vllm_wire import GENERATE, completions, generate_body
from deepgrpo.types import Completion, Ids

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

    #### Weights

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

    #### Life

    def progress(self, deadline: float) -> float | None:
        """A number that grows with every token that the server reads or makes; None where its /metrics counts none."""
        found = [float(value) for value in _COUNTERS.findall(self._request("GET", "/metrics", deadline).text)]
        return sum(found) if found else None

    #### Text

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
