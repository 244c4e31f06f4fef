"""One failed rollout in; a verified correction, or the reason why there is none, out.

Ask the teacher, cut where student and teacher part, refuse prefixes that hold the answer already, let the grader verify the whole
corrected answer; where that fails, ask again at the next temperature (teacher.attempts). A reason that says nothing about the
rollout (endpoint down, grader without a verdict) *defers* it: the failure stays in the pool.
"""

import asyncio
import collections
import concurrent.futures
import dataclasses
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import ml_collections
import numpy as np

from deepgrpo.curriculum import pool_class
from deepgrpo.curriculum.base import Correction, Failure
from deepgrpo.endpoint.client import Client
from deepgrpo.endpoint.errors import Refused, TryAgain, Unavailable
from deepgrpo.environments.base import Environment, environment_of, words_of
from deepgrpo.environments.writing import Writer
from deepgrpo.rewards.answer import Answer
from deepgrpo.rewards.grade import leaks_answer
from deepgrpo.teacher import prompts
from deepgrpo.teacher.splice import Codec, Limits, Splice, move, splice_text, splice_tokens, without_repetition
from deepgrpo.teacher.turns import Played, play
from deepgrpo.types import Grade, Ids, marks

log = logging.getLogger(__name__)

ACCEPTED = "accepted"
REJECTIONS = (
    *("no_parsed_reply", "request_refused", "empty_teacher_tokens", "prefix_too_short", "prefix_ratio_too_low", "empty_suffix"),
    *("invented_observation", "goes_on_after_its_end", "no_replay", "suffix_too_short", "too_long", "no_room_for_rollouts"),
    *("special_in_suffix", "roundtrip_failed", "answer_leak", "reward_too_low", "error"),
)
NO_VERDICT = "no_verdict"
MOST_CONTINUED = 4  # times that a teacher goes on from what an environment has answered to its call
WINDOW = 256  # newest outcomes that the means are over
_OPENED = re.compile(r"<think>\s*\Z")  # an assistant's turn that a template has opened
_TAIL = 16  # ids of a prompt that such an opening is looked for in


class Grader(Protocol):
    def submit(self, answer: Answer) -> "concurrent.futures.Future[Grade]": ...


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """What became of one failure.

    reason: ACCEPTED; else why there is no correction (one of REJECTIONS, or what it was deferred for).
    deferred: nothing was learned about the failure; it belongs back into the pool.
    splice: the cut, if it came that far. queue_age: steps that the failure waited. replies: that it took.
    so_far: of a correction that invents what an environment says, its text up to there and what the environment says.
    """

    reason: str
    correction: Correction | None = None
    deferred: bool = False
    splice: Splice | None = None
    queue_age: int = 0
    replies: int = 1
    so_far: str = ""


class Annotator:
    """Makes corrections. `annotate` runs in the worker's event loop; tokenizer work in a thread of its own, off that loop."""

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        client: Client,
        grader: Grader,
        codec: Codec,
        stop_ids: Sequence[int],
        leaks: Callable[[str, str], bool] = leaks_answer,
        form: Callable[[str, str], str] = lambda told, source: "",
        environments: Mapping[str, Environment] | None = None,
    ):
        """
        Args:
          config: the whole configuration. Its strict_reference brings back the reference's parser, cut on tokens and EOS rule, no
            leak guard, cut numbers and marks, a missing reward that is a low one, and the first reply that can be parsed decides.
          codec: over a tokenizer instance that nothing else uses.
          stop_ids: the student's, the generation config's first one leading; it closes a suffix.
          leaks: (data_source, text): whether the text holds a final answer already.
          form: (what the student is told, data_source): how a final answer is written, where that is not said.
          environments: by name, where students have them; a correction is then played in the failure's.
        """
        self._client, self._grader, self._codec, self._leaks, self._form = client, grader, codec, leaks, form
        self._limits, self._threshold, self._stop_ids = Limits.from_config(config), config.rewards.threshold, tuple(stop_ids)
        self._place, self._seed, self._strict = config.curriculum.cut, config.seed, config.strict_reference
        self._prefix_aware = not pool_class(config.curriculum.pool).branches  # else all failures start from plain problems
        self._environments, self._default_environment = environments or {}, config.agent.environment
        self._writer = Writer(codec.tokenizer) if environments else None
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._counts: collections.Counter[str] = collections.Counter()
        self._recent = {name: collections.deque(maxlen=WINDOW) for name in MEANS}

    #### One failure

    async def annotate(self, failure: Failure, step: int) -> Outcome:
        """Returns the outcome; `step` is the current one. Counts nothing: `record` does, once the outcome is used.

        Raises:
          ReplayMiss: replaying a run that never asked this.
        """
        outcome = await self._annotate(failure)
        return dataclasses.replace(outcome, queue_age=step - failure.step)

    async def _annotate(self, failure: Failure) -> Outcome:
        outcome, replies, so_far = Outcome("no_parsed_reply"), 0, ""

        async def use(reply: str) -> Outcome:
            nonlocal outcome, replies
            replies += 1
            solution = prompts.parse_solution_strict(reply) if self._strict else prompts.parse_solution(reply, student)
            if so_far:  # the teacher goes on from what the environment has said
                solution = so_far + without_repetition(solution, given + so_far, "")
            try:
                outcome = await self._judged(failure, solution)
            except ValueError as error:  # an error of ours is no word about the reply
                raise RuntimeError(f"a correction could not be judged: {error}") from error
            goes_on = len(outcome.so_far) > len(so_far)
            if outcome.correction is None and not (outcome.deferred or self._strict or goes_on):
                raise TryAgain(outcome.reason)
            return outcome

        for _ in range(1 + MOST_CONTINUED):
            prompt, student, given = await self._aside(self._prompt, failure, so_far)
            try:
                await self._client.ask(prompt, use)
            except Unavailable as error:
                outcome = Outcome(error.kind, deferred=True)
            except Refused:
                outcome = Outcome("request_refused")
            if len(outcome.so_far) <= len(so_far):
                break
            so_far = outcome.so_far
        return dataclasses.replace(outcome, replies=replies)

    async def _judged(self, failure: Failure, solution: str) -> Outcome:
        """What becomes of the failure if the teacher's solution is this one."""
        cut = await self._aside(self._cut, failure, solution)
        if cut.reason == "invented_observation":  # beside the student's own call, whose answer is known
            return Outcome(cut.reason, splice=cut, so_far=await self._aside(self._codec.decode, answered(failure, cut)))
        if cut.reason:
            return Outcome(cut.reason, splice=cut)
        parts: Sequence[tuple[str, str]] = ()
        if self._environments:
            played = await asyncio.to_thread(self._played, failure, cut)
            if played.refused:
                kept = await self._aside(self._codec.decode, cut.prefix_ids) if played.so_far else ""
                return Outcome(played.refused, deferred=played.deferred, splice=cut, so_far=kept + played.so_far)
            suffix = np.concatenate([played.suffix_ids, cut.suffix_ids[cut.body_len :]])
            cut, parts = dataclasses.replace(cut, suffix_ids=suffix, body_len=len(played.suffix_ids)), played.parts
        whole = await self._aside(self._text, failure, cut.body())
        cut = await self._aside(self._moved, failure, cut)
        if cut.reason:
            return Outcome(cut.reason, splice=cut)
        kept = await self._aside(self._text, failure, cut.prefix_ids)
        if not self._strict and await self._aside(self._leaks, failure.problem.data_source, kept):
            return Outcome("answer_leak", splice=cut)
        return await self._verified(failure, cut, words_of(parts) if parts else whole, tuple(parts))

    async def _verified(self, failure: Failure, cut: Splice, whole: str, parts: tuple[tuple[str, str], ...]) -> Outcome:
        """Grades the whole corrected answer, as if the student had written it in one go. parts: who wrote what of it."""
        problem = failure.problem
        answer = Answer(
            problem.data_source, problem.question, "", whole, "stop", problem.ground_truth, problem.extra, parts=parts
        )
        try:
            grade = await asyncio.wait_for(asyncio.wrap_future(self._grader.submit(answer)), self._client.deadline)
        except TimeoutError:
            log.error("the grader gave no verdict on a correction within %.0f s", self._client.deadline)
            grade = Grade(None, False, "timeout")
        except RuntimeError:
            log.exception("the grader cannot work; a correction has no verdict")
            grade = Grade(None, False, "error")
        if grade.reward is None and not self._strict:
            return Outcome(NO_VERDICT, deferred=True, splice=cut)
        if not grade.succeeds(self._threshold):
            return Outcome("reward_too_low", splice=cut)
        correction = Correction(cut.prefix_ids, cut.suffix_ids, grade.reward, cut.failed_suffix_ids)
        return Outcome(ACCEPTED, correction, splice=cut)

    #### Tokenizer work (in the one thread that may touch the codec)

    def _aside(self, function: Callable, *args: Any) -> asyncio.Future:
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="teacher-tokenizer")
        return asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _prompt(self, failure: Failure, so_far: str = "") -> tuple[str, str, str]:
        """The teacher's prompt, the student's text in it, and the text of the locked prefix. so_far: verified after that."""
        student, problem = self._codec.text(failure.response_ids), failure.problem
        told = problem.told or problem.question
        form = self._form(told, problem.data_source)
        if not self._prefix_aware:
            return prompts.plain_prompt(told, student, form), student, ""
        given = self._codec.text(_locked(failure))
        return prompts.prefix_aware_prompt(told, given + so_far, student, form), student, given

    def _cut(self, failure: Failure, solution: str) -> Splice:
        student, state_len = failure.response_ids, len(failure.state_ids)
        if self._strict:
            return splice_tokens(student, self._codec.encode(solution), state_len, self._codec.eos_token_id, self._limits)
        opened = _OPENED.search(self._codec.decode(failure.problem.prompt_ids[-_TAIL:]))
        given = (opened.group() if opened else "") + self._codec.text(_locked(failure))
        solution = without_repetition(solution, given, self._codec.text(student))
        return splice_text(self._codec, student, solution, state_len, self._stop_ids, self._limits)

    def _moved(self, failure: Failure, cut: Splice) -> Splice:
        how = {"codec": self._codec, "limits": self._limits, "seed": self._seed}
        return move(cut, failure.response_ids, failure.state_ids, self._place, **how)

    def _played(self, failure: Failure, cut: Splice) -> Played:
        """The teacher's text in the failure's environment."""
        environment = self._environments[environment_of(failure.problem, self._default_environment)]
        before = np.concatenate([_locked(failure), cut.prefix_ids])
        if environment.replay == "never" and marks(before) is not None:
            return Played("no_replay")
        text = self._writer.decode(cut.suffix_ids[: cut.body_len])
        return play(environment, self._writer, failure.problem, before, text)

    def _text(self, failure: Failure, ids: Ids) -> str:
        """Text of the assistant's turn: the locked prefix and `ids` after it."""
        return self._codec.text(np.concatenate([_locked(failure), ids]))

    #### Health, metrics, state

    def capacity(self) -> int:
        return self._client.capacity()

    def retry_in(self) -> float:
        return self._client.retry_in()

    def record(self, outcome: Outcome) -> None:
        """Counts an outcome. Called in an order that does not depend on timing, if the caller needs the means to be exact."""
        kind = "" if outcome.reason == ACCEPTED else "deferred_" if outcome.deferred else "reject_"
        self._counts[kind + outcome.reason] += 1
        self._counts["tried_again"] += max(outcome.replies - 1, 0)
        if not outcome.deferred:
            self._recent["queue_age"].append(outcome.queue_age)
        if outcome.splice is not None:
            self._recent["match_tokens"].append(outcome.splice.match_tokens)
            if not self._strict:
                self._recent["match_text_tokens"].append(outcome.splice.match_text_tokens)
        if outcome.correction is not None:
            prefix, failed = len(outcome.correction.prefix_ids), len(outcome.correction.failed_suffix_ids)
            self._recent["match_ratio"].append(prefix / max(prefix + failed, 1))
            self._recent["suffix_len"].append(len(outcome.correction.suffix_ids))

    def metrics(self) -> dict[str, float]:
        """Cumulative `teacher_suffix/accepted`, `reject_<reason>` and `deferred_<reason>`, means over the newest outcomes, and
        the client's metrics. Reading changes nothing."""
        names = [ACCEPTED, "tried_again", f"deferred_{NO_VERDICT}", *(f"reject_{reason}" for reason in REJECTIONS)]
        counts = dict.fromkeys(names, 0)
        counts |= dict(self._counts)
        means = {name: sum(values) / len(values) for name, window in self._recent.items() if (values := list(window))}
        return {f"teacher_suffix/{name}": float(value) for name, value in (counts | means).items()} | self._client.metrics()

    def state(self) -> dict[str, Any]:
        recent = {name: list(values) for name, values in self._recent.items()}
        return {"counts": dict(self._counts), "recent": recent, "client": self._client.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._counts = collections.Counter(state["counts"])
        self._recent = {name: collections.deque(state["recent"][name], maxlen=WINDOW) for name in MEANS}
        self._client.restore(state["client"])

    async def aclose(self) -> None:
        """Gives back sockets and the thread. The annotator can be used again, also from another event loop."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=False, cancel_futures=True)
        await self._client.aclose()


MEANS = ("queue_age", "match_tokens", "match_text_tokens", "match_ratio", "suffix_len")


def answered(failure: Failure, cut: Splice) -> Ids:
    """The student's response up to the end of the observation in which, or before which, a correction leaves it."""
    end = cut.match_text_tokens
    while end < len(failure.response_ids) and failure.response_ids[end] < 0:
        end += 1
    return failure.response_ids[:end]


def _locked(failure: Failure) -> Ids:
    """int32[len]: what the state has beyond the problem's prompt."""
    return failure.state_ids[len(failure.problem.prompt_ids) :]
