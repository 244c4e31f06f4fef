"""Several turns: the student writes, an environment answers, until the answer is given or a limit ends the rollout.

A rollout is a list of token pieces, each sampled or observed. The next request's prompt is the prompt and all pieces, literally:
nothing is decoded and encoded again, and no template is rendered over what was said. All turns of a rollout are of one version of
the weights. No turn waits for another rollout: what becomes ready is fed to the engine while it samples.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np

from deepgrpo.environments.base import (
    ENVIRONMENT,
    STUDENT,
    Environment,
    Episode,
    Reply,
    Trace,
    environment_of,
    replay,
    words_of,
)
from deepgrpo.environments.journal import ReplayMiss
from deepgrpo.environments.writing import writer_of
from deepgrpo.loops import reasoning
from deepgrpo.loops.base import RolloutContext
from deepgrpo.rewards.grade import Answer
from deepgrpo.rollout.engine import Request, sample_seed
from deepgrpo.rollout.stops import StopTexts
from deepgrpo.telemetry import waits
from deepgrpo.types import REPLAY_MISMATCH, Completion, Grade, Group, Ids, Prompt, Rollout, as_ids

log = logging.getLogger(__name__)

ALARMING = 0.05  # share of a call's rollouts that lose their verdict to a tool
NO_VERDICT = ("tool", "seconds", REPLAY_MISMATCH)  # ends that say nothing about the answer


def run(
    environments: Mapping[str, Environment],
    section: ml_collections.ConfigDict,
    context: RolloutContext,
    prompts: Sequence[Prompt],
    step: int,
    purpose: str,
) -> list[Group]:
    """Rolls every prompt out `prompt.n` times, with tools.

    A rollout whose environment failed, or that took too long, has no verdict; one that was aborted is left out of its group.

    Args:
      environments: by name, from `open_environments`. section: `agent` of the configuration.
      step, purpose: name the random streams, together with the prompt's place, the sample's and the turn's.

    Raises:
      TimeoutError: not one answer was graded within `context.grading_deadline` seconds after the last rollout.
    """
    of_prompt = [environments[environment_of(prompt.problem, section.environment)] for prompt in prompts]
    talks: list[Talk] = []
    for texts in sorted({environment.dialect.stop_texts for environment in of_prompt}):  # one call for what ends turns alike
        alike = [(i, p, e) for i, (p, e) in enumerate(zip(prompts, of_prompt, strict=True)) if e.dialect.stop_texts == texts]
        some = Talks(alike, section, context, step, purpose)
        sampling = dataclasses.replace(context.sampling, stops=stop_texts(context.tokenizer, texts) if texts else None)
        try:
            context.engine.generate(some.requests, sampling, on_done=some.on_done, feed=some)
        finally:
            some.close()
        talks += some.talks
        if (failed := sum(talk.end == "tool" for talk in some.talks)) > ALARMING * len(some.talks):
            log.warning("step %d: %d of %d rollouts have no verdict: %s", step, failed, len(some.talks), some.failure)
    reasoning.wait_for_verdicts(context, [talk.verdict for talk in talks if talk.verdict is not None], step)
    rollouts: list[list[Rollout]] = [[] for _ in prompts]
    for talk in talks:
        if talk.completion is not None:
            rollouts[talk.place[0]].append(Rollout(talk.completion, reasoning.verdict_of(talk.verdict), episode=talk.trace()))
    return [Group(prompt, tuple(of)) for prompt, of in zip(prompts, rollouts, strict=True)]


@dataclasses.dataclass(eq=False)
class Talk:
    """One rollout in the making. Everything in it is changed under `Talks.lock`, but for the tool call that is under way."""

    prompt: Prompt
    place: tuple[int, int]  # of the prompt, of the sample
    environment: Environment
    episode: Episode
    begun: str  # words of the locked prefix in which the student was, since it last read something
    pieces: list[tuple[str, Ids]] = dataclasses.field(default_factory=list)
    words: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    logps: list[np.ndarray] = dataclasses.field(default_factory=list)
    counts: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    seconds: list[float] = dataclasses.field(default_factory=list)
    began: float = 0.0
    called: float | None = None  # when the tool call that is under way began
    version: int = 0
    turns: int = 0
    end: str = ""
    completion: Completion | None = None
    verdict: Any = None

    @property
    def ids(self) -> Ids:
        return as_ids(np.concatenate([self.prompt.ids, *(ids for _, ids in self.pieces)]))

    def add(self, who: str, ids: Ids, logps: np.ndarray | None = None) -> None:
        self.pieces.append((who, ids))
        self.logps.append(np.full(len(ids), np.nan, np.float32) if logps is None else logps)

    def joined(self, finish_reason: str) -> Completion:
        """All turns and observations as one response."""
        ids = self.ids[len(self.prompt.ids) :]
        observed = np.concatenate([np.zeros(0, bool), *(np.full(len(ids), who == ENVIRONMENT) for who, ids in self.pieces)])
        logps = np.concatenate([np.zeros(0, np.float32), *self.logps])
        return Completion(as_ids(ids), logps, finish_reason, self.version, observed if observed.any() else None)

    def trace(self) -> Trace:
        return Trace(self.turns, self.end, tuple(self.words), dict(self.counts), tuple(self.seconds))


class Talks:
    """All rollouts of one call; `rollout.engine.Feed`."""

    def __init__(
        self, prompts: Sequence[tuple[int, Prompt, Environment]], section: Any, context: RolloutContext, step: int, purpose: str
    ):
        """prompts: with their places among all of the step. Otherwise see `run`."""
        self.section, self.context, self.step, self.purpose = section, context, step, purpose
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.limit = context.sampling.max_model_len
        self.writer = writer_of(context.tokenizer)
        self.tools = threading.Semaphore(section.tool_workers)
        self.talks: list[Talk] = []
        self.miss: ReplayMiss | None = None
        self.failure = "a tool took longer than agent.tool_seconds"  # the newest reason why one failed
        self.requests: list[Request] = []
        self.owners: list[list[Talk]] = []  # of each request's samples
        self.ready: list[tuple[Request, Talk]] = []
        restored = []
        for i, prompt, environment in prompts:
            seeds = tuple(self._seed(0, i, j) for j in range(prompt.n))
            before = self.writer.parts(prompt.ids[len(prompt.problem.prompt_ids) :], prompt.observed)
            begun = before[-1][1] if before and before[-1][0] == STUDENT else ""
            episodes = [environment.open(prompt.problem, seed) for seed in seeds]
            own = [Talk(prompt, (i, j), environment, episode, begun) for j, episode in enumerate(episodes)]
            self.talks += own
            if environment.replay != "pure" and len(before) > 1:
                restored += [(talk, seed, before) for talk, seed in zip(own, seeds, strict=True)]
                continue
            self.owners.append(own)
            self.requests.append(Request(prompt.ids, seeds, section.turn_tokens or None))
        now = time.monotonic()
        for talk in self.talks:
            talk.began = now
        self.open = len(self.talks)
        for talk, seed, before in restored:
            self._aside(talk, functools.partial(replay, talk.environment, talk.episode, before), self._restored, seed)

    def _seed(self, turn: int, i: int, j: int) -> int:
        purpose = f"{self.purpose}:turn {turn}" if turn else self.purpose  # of one turn: as the loop without tools samples
        return sample_seed(self.context.seed, self.step, purpose, i, j)

    #### From the engine, in the thread that called it

    def on_done(self, r: int, s: int, completion: Completion) -> None:
        """A turn was sampled."""
        talk = self.owners[r][s]
        if completion.finish_reason == "abort":
            self._finish(talk, "abort")
            return
        words = reasoning.text_of(self.context, completion.ids)
        with self.lock:
            talk.turns += 1
            talk.version = completion.version if talk.turns == 1 else min(talk.version, completion.version)
            talk.add(STUDENT, completion.ids, completion.logps)
            talk.words.append((STUDENT, words))
            words, talk.begun = talk.begun + words, ""
        if completion.finish_reason == "length":
            self._finish(talk, "context" if len(talk.ids) >= self.limit else "length")
            return
        by_id = int(completion.ids[-1]) in self.context.sampling.stop_ids
        handed_over = by_id if talk.environment.dialect.chat else not by_id
        if talk.environment.waits:
            self._aside(talk, functools.partial(talk.episode.step, words, handed_over), self._answer)
        else:
            self._answer(talk, talk.episode.step(words, handed_over))

    def take(self, wait: bool) -> list[Request]:
        """See `rollout.engine.Feed`. Rollouts whose tool call has taken too long are ended meanwhile."""
        with self.lock:
            if self.miss:
                raise self.miss
            self._end_late()
            if wait and not self.ready and self.open:
                with waits.on(self.described):
                    while not self.ready and self.open:
                        self.changed.wait(timeout=1.0)
                        self._end_late()
            if self.miss:
                raise self.miss
            ready, self.ready = sorted(self.ready, key=lambda entry: entry[1].place), []
            self.owners += [[talk] for _, talk in ready]
            return [request for request, _ in ready]

    def described(self) -> str:
        return f"{sum(talk.called is not None for talk in self.talks)} tool calls of {self.open} rollouts (agent.tool_seconds)"

    def close(self) -> None:
        """Ends what has not ended: the engine failed, or will sample nothing more."""
        for talk in self.talks:
            self._finish(talk, "abort")

    #### Tools

    def _aside(self, talk: Talk, work: Callable[[], Any], use: Callable[..., None], *more: Any) -> None:
        """Has an environment work for a rollout in a thread, and uses what it says: use(talk, result, *more)."""
        threading.Thread(target=self._call, args=(talk, work, use, *more), name="tool", daemon=True).start()

    def _call(self, talk: Talk, work: Callable[[], Any], use: Callable[..., None], *more: Any) -> None:
        self.tools.acquire()
        with self.lock:
            if talk.end:
                self.tools.release()
                return
            talk.called = begun = time.monotonic()
        try:
            result = work()
        except ReplayMiss as error:  # not this rollout's trouble: the run cannot be repeated
            with self.lock:
                self.miss = error
                self.changed.notify_all()
            result, use, more = Reply(None, failed="replay"), self._answer, ()
        except Exception as error:  # an environment's bug costs its rollout the verdict, and no other's
            log.exception("the environment of %s failed", talk.prompt.problem.data_source)
            result, use, more = Reply(None, failed=type(error).__name__), self._answer, ()
        with self.lock:
            late, talk.called = bool(talk.end), None
            talk.seconds.append(time.monotonic() - begun)
        if late:
            talk.episode.close()  # what ended it gave the next call our place, and left this to us
        else:
            self.tools.release()
            use(talk, result, *more)

    def _restored(self, talk: Talk, failed: str, seed: int) -> None:
        """The state that a rollout begins from is there again, or cannot be had."""
        if failed:
            talk.counts["failed"] += 1
            self.failure = failed
            return self._finish(talk, REPLAY_MISMATCH if failed == REPLAY_MISMATCH else "tool")
        with self.lock:
            if not talk.end:
                self.ready.append((Request(talk.prompt.ids, (seed,), self.section.turn_tokens or None), talk))
                self.changed.notify_all()

    def _end_late(self) -> None:
        now, limit = time.monotonic(), self.section.rollout_seconds
        for talk in self.talks:
            deadline = talk.environment.patience * self.section.tool_seconds
            if talk.called is not None and not talk.end and now - talk.called > deadline:
                self._finish(talk, "tool")
            elif talk.called is not None and not talk.end and limit and now - talk.began > limit:
                self._finish(talk, "seconds")

    def _answer(self, talk: Talk, reply: Reply) -> None:
        """Goes on with what an environment said."""
        talk.counts.update(reply.counts)
        if reply.failed:
            talk.counts["failed"] += 1
            self.failure = reply.failed
            return self._finish(talk, "tool")
        if reply.observation is None:
            return self._finish(talk, "answered")
        ids, cut = self.writer.observation(reply.observation, talk.environment.dialect.chat, self.section.observation_tokens)
        talk.counts["observation_cut"] += cut
        length = len(talk.ids) + len(ids)
        if length > self.limit:
            return self._finish(talk, "observation")
        if talk.turns >= self.section.max_turns:
            return self._finish(talk, "turns")
        with self.lock:
            talk.add(ENVIRONMENT, ids)
            talk.words.append((ENVIRONMENT, reply.observation))
            if length == self.limit:
                return self._finish(talk, "context")
            if 0 < self.section.rollout_seconds < time.monotonic() - talk.began:
                return self._finish(talk, "seconds")
            if not talk.end:
                seed = self._seed(talk.turns, *talk.place)
                self.ready.append((Request(talk.ids, (seed,), self.section.turn_tokens or None), talk))
                self.changed.notify_all()

    #### Ends

    def _finish(self, talk: Talk, end: str) -> None:
        with self.lock:
            if talk.end:
                return
            talk.end = end
            self.open -= 1
            self.changed.notify_all()
            busy = talk.called is not None
            if busy:  # a call that hangs must not keep others from being made
                self.tools.release()
            if end != "abort":
                talk.completion = talk.joined("stop" if end in ("answered", *NO_VERDICT) else "length")
                talk.completion = reasoning.full_is_truncated(self.context, talk.prompt, talk.completion)
                talk.verdict = self._verdict(talk)
        if not busy:
            talk.episode.close()

    def _verdict(self, talk: Talk) -> "concurrent.futures.Future[Grade]":
        own = Grade(None, False, talk.end) if talk.end in NO_VERDICT else talk.episode.grade()
        if own is None:
            return self.context.grading.submit(as_answer(self.context, talk.prompt, talk.completion, talk.trace(), self.purpose))
        known: concurrent.futures.Future[Grade] = concurrent.futures.Future()
        known.set_result(own)
        return known


def as_answer(context: RolloutContext, prompt: Prompt, completion: Completion, trace: Trace, purpose: str) -> Answer:
    """What the grader sees: the student's words alone as the response, and the whole trace beside them."""
    ended = trace.parts and trace.parts[-1][0] == STUDENT
    last = completion.ids[-1:] if ended else as_ids([])  # the ending alone: the words are known
    answer = reasoning.as_answer(context, prompt, dataclasses.replace(completion, ids=last), purpose)
    before = writer_of(context.tokenizer).parts(prompt.ids[len(prompt.problem.prompt_ids) :], prompt.observed)
    texts = {"parts": trace.parts, "prefix_parts": tuple(before)}
    return dataclasses.replace(answer, response=words_of(trace.parts), prefix=words_of(before), **texts)


stop_texts = functools.lru_cache(maxsize=8)(StopTexts)  # it looks at a whole vocabulary
