"""What a student talks to between its turns: the protocol of every environment, and the one table of those that there are.

To add one, write a class like `lookup.Lookup` and enter it in ENVIRONMENTS, or leave this file alone and name the class in the
configuration: agent.environment="my_package.my_module:MyEnvironment".
"""

import collections
import contextlib
import dataclasses
import importlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import ml_collections
import numpy as np

from deepgrpo.environments.writing import CUT, Boundary
from deepgrpo.types import ENVIRONMENT, REPLAY_MISMATCH, STUDENT, Grade, Group, Problem

ENVIRONMENTS = {  # agent.environment, or a row's agent_name: module and class, imported when it is first needed
    "none": "deepgrpo.environments.base:NoTools",
    "lookup": "deepgrpo.environments.lookup:Lookup",
    "search": "deepgrpo.environments.search:Search",
    "code": "deepgrpo.environments.code:Code",
    "functions": "deepgrpo.environments.functions:Functions",
}
ONE_TURN = ("reasoning_agent_loop", "treerl_agent_loop", "single_turn_agent")  # no environment, by other projects' names
AGENT_NAMES = {  # agent_name of other projects: its name here
    **{"search_agent": "search", "deep_analyze_agent_loop": "code"},
    **dict.fromkeys(ONE_TURN, "none"),
}


@dataclasses.dataclass(frozen=True)
class Reply:
    """What an environment says to a turn.

    observation: what the student reads next; None: the episode is over, and its answer is graded.
    failed: why the infrastructure could not answer: the rollout then has no verdict. A mistake of the student's (a bad query, an
      error in its program) is no failure but an observation.
    counts: added up over a rollout: calls, malformed_calls, retries, ...
    """

    observation: str | None
    failed: str = ""
    counts: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Dialect:
    """How a turn ends and how an observation is written.

    chat: False: all turns stand in one message of the assistant, and one of `stop_texts` hands over; the observation follows as
      it is. True: the end-of-turn token hands over, and the observation is a message of the tool's, by the chat template.
    """

    stop_texts: tuple[str, ...] = ()
    chat: bool = False


class Episode:
    """One rollout's side of the environment. Its methods are called by one thread at a time."""

    def step(self, words: str, handed_over: bool) -> Reply:
        """words: the student's text of this turn. handed_over: it ended at a stop text; in a chat, at the end of its message."""
        raise NotImplementedError

    def grade(self) -> Grade | None:
        """The verdict where only the environment can judge; None: the grader of the data source decides."""
        return None

    def close(self) -> None:
        """Gives back what the episode holds. Called once, whatever happened."""


class Environment:
    """One a run; its methods may be called by any thread.

    replay: how a state inside an answer is restored. pure: an observation depends on its turn alone, so nothing is to restore.
      rerun: the turns before the state are executed again, and must be answered as they were. never: no state begins there.
    waits: a step waits for a service or a process, so that it runs in a thread of its own.
    patience: times agent.tool_seconds that a step may take by the environment's own limits; beyond it, it is given up.
    """

    dialect: ClassVar[Dialect] = Dialect()
    replay: ClassVar[str] = "never"
    waits: ClassVar[bool] = True
    patience: ClassVar[float] = 1.0

    def __init__(self, config: ml_collections.ConfigDict):
        """config: the whole configuration; `agent` is the section of environments."""

    def check(self, problem: Problem) -> str:
        """What is wrong with a row that asks for this environment, "" if nothing is."""
        return ""

    def open(self, problem: Problem, seed: int) -> Episode:
        """A rollout begins."""
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """Cumulative, under `agent/`."""
        return {}

    def state(self) -> Mapping[str, Any]:
        """What a resumed run needs, JSON-serialisable."""
        return {}

    def close(self) -> None:
        """Gives back what the environment holds."""


class NoTools(Environment):
    """For rows of one turn among rows of several."""

    replay, waits = "pure", False

    def open(self, problem: Problem, seed: int) -> Episode:
        return _Alone()


class _Alone(Episode):
    def step(self, words: str, handed_over: bool) -> Reply:
        return Reply(None)


def replay(environment: Environment, episode: Episode, parts: Sequence[tuple[str, str]]) -> str:
    """Brings a new episode to where a recorded trace stopped: "" when it is there, else why not.

    A `pure` environment has nothing to restore. Otherwise the student's turns are executed again, and each must be answered as it
    was. parts: (who, text) of the trace.
    """
    if environment.replay == "pure":
        return ""
    for (who, words), (other, observed) in itertools.pairwise(parts):
        if (who, other) == (STUDENT, ENVIRONMENT):
            reply = episode.step(words, True)
            if reply.failed:
                return reply.failed
            if reply.observation is None or not same_observation(observed, reply.observation, environment.dialect.chat):
                return REPLAY_MISMATCH
    return ""


def same_observation(recorded: str, said: str, chat: bool) -> bool:
    """Whether a recorded observation, whose middle may be left out, is what is said now. In a chat a message is around it."""
    head, cut, tail = recorded.partition(CUT)
    if chat:
        return said in recorded or bool(cut)
    return said.startswith(head) and said.endswith(tail) if cut else said == recorded


def words_of(parts: Sequence[tuple[str, str]]) -> str:
    """The student's words."""
    return "".join(text for who, text in parts if who == STUDENT)


def environment_of(problem: Problem, default: str) -> str:
    """The name of the environment that a row asks for, else `default`."""
    name = problem.extra.get("agent_name") or default
    return AGENT_NAMES.get(name, name)


def open_environments(
    config: ml_collections.ConfigDict, problems: Iterable[Problem], tokenizer: Any, stack: contextlib.ExitStack
) -> dict[str, Environment]:
    """The environments that the problems need, by name; `stack` closes them. Without loop=agent there are none.

    Raises:
      ValueError: a name stands for none, the class cannot be imported, a row lacks what its environment needs, or the chat
        template cannot be used for several turns.
    """
    found: dict[str, Environment] = {}
    for problem in problems if config.loop == "agent" else ():
        name = environment_of(problem, config.agent.environment)
        if name not in found:
            found[name] = environment_class(name)(config)
            stack.callback(found[name].close)
            if found[name].dialect.chat:
                Boundary.of(tokenizer)
        if wrong := found[name].check(problem):
            raise ValueError(f"row {problem.index} of {problem.data_source}, for the environment {name}: {wrong}")
    return dict(sorted(found.items()))


def environment_class(name: str) -> type[Environment]:
    """The class behind a name of ENVIRONMENTS, or behind "package.module:Class".

    Raises:
      ValueError: there is none.
    """
    module, _, attribute = ENVIRONMENTS.get(name, name).partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute, None) if attribute else None
    except ImportError as error:
        raise ValueError(f"agent.environment={name}: {module} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Environment)):
        known = ", ".join(ENVIRONMENTS)
        raise ValueError(f"agent.environment={name!r} is no environment; known: {known}, or package.module:Class")
    return found


######################################################################################################################
#  What became of a rollout
######################################################################################################################


@dataclasses.dataclass(frozen=True)
class Trace:
    """A rollout's episode.

    turns: how often the student wrote. end: answered (graded), length, turns, context, observation (limits: the answer is cut),
      seconds, tool (no verdict).
    parts: (who, text) of the response, without the marks of a chat. counts: of its replies, added up. seconds: of each tool call.
    """

    turns: int
    end: str
    parts: tuple[tuple[str, str], ...] = ()
    counts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    seconds: Sequence[float] = ()


def agent_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """`agent/*` of a step's rollouts; nothing where no environment took part."""
    rollouts = [rollout for group in groups for rollout in group.rollouts if rollout.episode is not None]
    if not rollouts:
        return {}
    traces = [rollout.episode for rollout in rollouts]
    counts: collections.Counter[str] = collections.Counter()
    for trace in traces:
        counts.update(trace.counts)
    ends = collections.Counter(trace.end for trace in traces)
    seconds = [value for trace in traces for value in trace.seconds]
    tokens = sum(len(rollout.completion.ids) for rollout in rollouts)
    observed = tokens - sum(rollout.completion.sampled for rollout in rollouts)
    metrics = {f"agent/{name}": counts[name] / len(traces) for name in sorted({"calls", "malformed_calls", *counts})}
    metrics |= {f"agent/end/{end}": ends[end] / len(traces) for end in sorted({"answered", *ends})}
    metrics |= {
        "agent/turns": float(np.mean([trace.turns for trace in traces])),
        "agent/no_call_share": sum(not trace.counts.get("calls") for trace in traces) / len(traces),
        "agent/observed_token_share": observed / max(1, tokens),
    }
    for name, injected in (("main_chain", (False, True)), ("main_chain_original", (False,)), ("main_chain_synthetic", (True,))):
        if turns := [rollout.turns for group in groups if group.prompt.injected in injected for rollout in group.rollouts]:
            metrics |= {f"num_turns/{name}/{x.__name__}": float(x(turns)) for x in (min, max, np.mean)}
    if seconds:
        metrics |= {
            "agent/tool_seconds/mean": float(np.mean(seconds)),
            "agent/tool_seconds/p99": float(np.quantile(seconds, 0.99)),
        }
    return metrics
