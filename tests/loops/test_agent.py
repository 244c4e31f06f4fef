"""Several turns: exact tokens, limits, failing tools, what the grader sees, and states inside a conversation."""

import dataclasses
import importlib
import random
import threading
import time

import numpy as np
import pytest

from configs import common
from deepgrpo.curriculum.base import Correction
from deepgrpo.data import carry_chain, lookup_chain
from deepgrpo.data.tokenizer import load_tokenizer
from deepgrpo.environments.base import ENVIRONMENT, STUDENT, Dialect, Environment, Episode, Reply, agent_metrics, replay
from deepgrpo.environments.journal import ReplayMiss
from deepgrpo.environments.lookup import Lookup
from deepgrpo.environments.writing import Boundary, pieces, writer_of
from deepgrpo.loops import agent, reasoning
from deepgrpo.loops.base import RolloutContext
from deepgrpo.rewards import grade as grade_lib
from deepgrpo.rollout.engine import Sampling, checked
from deepgrpo.types import REPLAY_MISMATCH, Completion, Grade, Problem, Prompt, as_ids, marked, marks, plain
from tests.curriculum.made import forest

STOP = carry_chain.VOCABULARY.index(carry_chain.END)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    carry_chain.build_tokenizer(folder)
    return load_tokenizer(str(folder))


class Student:
    """An engine whose student writes `answer(text so far, seed)` as its next turn; asks the feed for more until it has none."""

    version = 7

    def __init__(self, tokenizer, answer, reason="stop"):
        self.tokenizer, self.answer, self.reason, self.requests = tokenizer, answer, reason, []

    def generate(self, requests, sampling, on_done=None, feed=None):
        todo, results = list(requests) or feed.take(True), []
        while todo:
            for request in todo:
                self.requests.append(request)
                results.append([])
                for j, seed in enumerate(request.seeds):
                    results[-1].append(self.complete(request, seed, sampling))
                    on_done(len(results) - 1, j, results[-1][-1])
            todo = feed.take(True) if feed else []
        return results

    def complete(self, request, seed, sampling):
        room = min(sampling.max_model_len - len(request.prompt_ids), request.max_tokens or 1000)
        text = self.answer(self.tokenizer.decode(request.prompt_ids.tolist()), seed)
        ids = self.tokenizer.encode(text, add_special_tokens=False)[:room]
        logps = np.linspace(-1, -0.1, len(ids))
        if self.reason == "abort":
            return Completion(as_ids(ids), logps, "abort", 7)
        ended = ids[-1] == STOP or (sampling.stops and sampling.stops.length(ids))
        return checked(ids, logps, "stop" if ended else "length", 7, room, sampling, 48)


class Grading:
    """The real graders, at once."""

    def __init__(self):
        self.answers = []

    def submit(self, answer):
        self.answers.append(answer)
        future = importlib.import_module("concurrent.futures").Future()
        grade = Grade(0.0, False, "truncated") if answer.finish_reason == "length" else grade_lib.grade(answer)
        future.set_result(grade)
        return future


def section(**changes):
    made = common.get_config().agent
    made.environment = "lookup"
    made.update(changes)
    return made


def prompts(tokenizer, count=2, n=3):
    from deepgrpo.data import templates

    made = []
    for i, row in enumerate(lookup_chain.problems("train", count)):
        ids = templates.chat(row["question"], tokenizer)
        made.append(Prompt(ids, Problem(i, "lookup_chain", ids, row["answer"], row["question"]), n, f"1:{i}"))
    return made


def context(tokenizer, engine, max_model_len=96):
    return RolloutContext(engine, Grading(), tokenizer, Sampling(1.0, 1.0, -1, (STOP,), max_model_len), 5, 10.0)


def right(text, seed):
    """The next turn of a student that asks for every value."""
    question = lookup_chain.QUESTION.search(text)[0]
    whole, written = lookup_chain.solution(question), text.rpartition("assistant\n")[2]
    assert whole.startswith(written)
    rest = whole[len(written) :]
    return rest[: rest.index("?") + 1] if "?" in rest else rest + carry_chain.END


def run(tokenizer, answer, environment=None, prompt_list=None, max_model_len=96, **changes):
    """(groups, the engine, the context) of one call."""
    engine = Student(tokenizer, answer)
    made = context(tokenizer, engine, max_model_len)
    environments = {"lookup": environment or Lookup(common.get_config())}
    groups = agent.run(environments, section(max_turns=12, **changes), made, prompt_list or prompts(tokenizer), 1, "train")
    return groups, engine, made


class Tool(Environment):
    """Answers every handed-over turn by `reply`."""

    dialect = Dialect(stop_texts=("?",))
    replay = "rerun"

    def __init__(self, reply):
        self.reply, self.opened, self.closed = reply, 0, 0

    def open(self, problem, seed):
        self.opened += 1
        return ToolEpisode(self)


class ToolEpisode(Episode):
    def __init__(self, tool):
        self.tool, self.shut = tool, False

    def step(self, words, handed_over):
        assert not self.shut
        return self.tool.reply(words) if handed_over else Reply(None)

    def close(self):
        assert not self.shut, "closed twice"
        self.shut = True
        self.tool.closed += 1


#### Tokens


def test_right_conversations_are_exact_masked_and_graded(tokenizer):
    groups, engine, made = run(tokenizer, right)
    for group in groups:
        assert [rollout.reward for rollout in group.rollouts] == [1.0] * 3
        for rollout in group.rollouts:
            whole = lookup_chain.solution(group.prompt.problem.question)
            completion = rollout.completion
            assert tokenizer.decode(completion.ids.tolist()) == whole + carry_chain.END
            observed = "".join("o" if x else "s" for x in completion.observed)
            assert observed == ("ssss" + "ooo") * 10 + "s" * 4
            assert (
                np.isnan(completion.logps[completion.observed]).all()
                and not np.isnan(completion.logps[~completion.observed]).any()
            )
            assert rollout.turns == 11 and rollout.end == "answered" and rollout.sampled == 44
            assert completion.version == 7 and completion.finish_reason == "stop"
    wholes = [[*group.prompt.ids, *rollout.completion.ids] for group in groups for rollout in group.rollouts]
    for request in engine.requests:  # each prompt is literally the beginning of a whole conversation
        assert request.prompt_ids.tolist() in [whole[: len(request.prompt_ids)] for whole in wholes]
    metrics = agent_metrics(groups)
    assert metrics["agent/calls"] == 10 and metrics["agent/no_call_share"] == 0 and metrics["agent/end/answered"] == 1
    assert metrics["num_turns/main_chain/mean"] == 11 and metrics["agent/observed_token_share"] == pytest.approx(30 / 74)


def test_an_observation_never_holds_a_special_token(tokenizer):
    tool = Tool(lambda words: Reply(f"{carry_chain.END}57\n", counts={"calls": 1}))
    groups, _, _ = run(
        tokenizer, lambda text, seed: "a57?" if "?" not in text.rpartition("assistant")[2] else carry_chain.END, tool
    )
    for group in groups:
        for rollout in group.rollouts:
            ids = rollout.completion.ids
            assert (ids == STOP).sum() == 1 and ids[-1] == STOP and rollout.completion.observed.sum() >= 3


def test_without_a_tool_call_it_is_the_loop_of_one_turn(tokenizer):
    answer = lambda text, seed: f"a{seed % 90 + 10}" + carry_chain.END  # noqa: E731
    groups, engine, _ = run(tokenizer, answer)
    other = Student(tokenizer, answer)
    expected = reasoning.run(context(tokenizer, other), prompts(tokenizer), 1, "train")
    assert [r.seeds for r in engine.requests] == [r.seeds for r in other.requests]
    for group, same in zip(groups, expected, strict=True):
        for a, b in zip(group.rollouts, same.rollouts, strict=True):
            np.testing.assert_array_equal(a.completion.ids, b.completion.ids)
            np.testing.assert_array_equal(a.completion.logps, b.completion.logps)
            assert a.completion.observed is None and a.grade == b.grade and a.turns == 1


def test_arrival_decides_nothing(tokenizer):
    def late(words):
        time.sleep(random.random() * 0.02)
        return Reply(words[-3:-1] + "\n")

    def answer(text, seed):
        return f"a{seed % 90 + 10}?" if text.count("?") < 4 else carry_chain.END

    runs = [run(tokenizer, answer, Tool(late)) for _ in range(2)]
    first, second = ([r.completion.ids.tolist() for g in groups for r in g.rollouts] for groups, _, _ in runs)
    assert first == second and len(first) == 6


#### Limits and failures


@pytest.mark.parametrize(
    "changes, max_model_len, end, reward",
    [
        ({"max_turns": 3}, 96, "turns", 0.0),
        ({"turn_tokens": 2}, 96, "length", 0.0),
        ({}, 17 + 3, "context", 0.0),  # the first turn fills it
        ({}, 17 + 7, "context", 0.0),  # the first observation fills it exactly, and is kept
        ({}, 17 + 6, "observation", 0.0),  # one token too long
        ({}, 17 + 8, "context", 0.0),
        ({"rollout_seconds": 1e-9}, 96, "seconds", None),
    ],
)
def test_each_limit_ends_one_rollout_with_its_reason(tokenizer, changes, max_model_len, end, reward):
    assert len(prompts(tokenizer)[0].ids) == 17
    changes = {"max_turns": 12} | changes
    engine = Student(tokenizer, right)
    made = context(tokenizer, engine, max_model_len)
    groups = agent.run({"lookup": Lookup(common.get_config())}, section(**changes), made, prompts(tokenizer), 1, "train")
    for group in groups:
        for rollout in group.rollouts:
            assert (rollout.end, rollout.reward) == (end, reward)
            assert len(group.prompt.ids) + len(rollout.completion.ids) <= max_model_len
            assert rollout.completion.finish_reason == ("stop" if reward is None else "length")
    assert all(len(request.prompt_ids) < max_model_len for request in engine.requests), "what has no room is not sent"


def test_a_long_observation_loses_its_middle(tokenizer):
    ids, cut = writer_of(tokenizer).observation("0123456789" * 20, False, 30)
    assert cut and len(ids) == 30 and tokenizer.decode(ids.tolist()).startswith("012345") and ids[-1] == tokenizer.encode("9")[0]
    ids, cut = writer_of(tokenizer).observation("7\0\ud83d" * 5_000_000, False, 30)  # megabytes, with what no token has
    assert cut and len(ids) == 30
    ids, cut = writer_of(tokenizer).observation("0123456789", False, 10)
    assert not cut and tokenizer.decode(ids.tolist()) == "0123456789"


def test_a_tool_that_fails_hangs_or_raises_is_no_verdict_and_every_episode_is_closed_once(tokenizer, caplog):
    hang = threading.Event()

    def reply(words):
        kind = threading.get_ident() % 1 + next(kinds) % 4
        if kind == 0:
            raise ZeroDivisionError
        if kind == 1:
            return Reply(None, failed="refused")
        if kind == 2:
            hang.wait(30)
        return Reply("12\n")

    kinds = iter(range(10**6))
    tool = Tool(reply)
    answer = lambda text, seed: "a57?" if text.count("?\n") + text.count("12\n") < 2 else "a" + carry_chain.END  # noqa: E731
    groups, _, _ = run(tokenizer, answer, tool, prompts(tokenizer, 4, 5), tool_seconds=0.5)
    assert "of 20 rollouts have no verdict" in caplog.text
    ends = [rollout.end for group in groups for rollout in group.rollouts]
    assert len(ends) == 20 and ends.count("tool") >= 15 - 5
    for group in groups:
        for rollout in group.rollouts:
            assert (rollout.reward is None) == (rollout.end == "tool")
    hang.set()
    for _ in range(200):
        if tool.closed == tool.opened == 20:
            break
        time.sleep(0.02)
    assert tool.closed == tool.opened == 20


def test_calls_that_hang_do_not_keep_others_from_being_made(tokenizer):
    hang, asked = threading.Event(), iter(range(10**6))
    tool = Tool(lambda words: hang.wait(30) or Reply("12\n") if next(asked) < 2 else Reply("12\n"))
    answer = lambda text, seed: "a57?" if "12" not in text else "a57" + carry_chain.END  # noqa: E731
    groups, _, _ = run(tokenizer, answer, tool, prompts(tokenizer, 2, 4), tool_seconds=0.3, tool_workers=2)
    ends = [rollout.end for group in groups for rollout in group.rollouts]
    assert sorted(ends) == ["answered"] * 6 + ["tool"] * 2
    hang.set()


def test_a_replay_that_misses_ends_the_run(tokenizer):
    def reply(words):
        raise ReplayMiss("never asked")

    with pytest.raises(ReplayMiss):
        run(tokenizer, lambda text, seed: "a57?", Tool(reply))


def test_an_engine_that_dies_leaves_no_episode_open(tokenizer):
    tool = Tool(lambda words: Reply("12\n"))
    engine = Student(tokenizer, lambda text, seed: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        agent.run({"lookup": tool}, section(), context(tokenizer, engine), prompts(tokenizer), 1, "train")
    assert tool.closed == tool.opened == 6


def test_aborted_turns_leave_their_group(tokenizer):
    engine = Student(tokenizer, right, reason="abort")
    groups = agent.run({"lookup": Lookup(None)}, section(), context(tokenizer, engine), prompts(tokenizer), 1, "train")
    assert [len(group.rollouts) for group in groups] == [0, 0]


#### Grading


def test_the_grader_sees_the_students_words_alone(tokenizer):
    tool = Tool(lambda words: Reply("####" + "99"))  # an answer in an observation
    answer = lambda text, seed: "a57?" if "?" not in text.rpartition("assistant")[2] else carry_chain.END  # noqa: E731
    _, _, made = run(tokenizer, answer, tool)
    for seen in made.grading.answers:
        assert seen.response == "a57?" and "####" not in seen.response
        assert seen.parts == ((STUDENT, "a57?"), (ENVIRONMENT, "####99"), (STUDENT, ""))


def invented(text, seed):
    """Writes everything at once, what the environment would say included."""
    return lookup_chain.solution(lookup_chain.QUESTION.search(text)[0]).replace("?", ":") + carry_chain.END


def test_a_student_that_invents_is_wrong_unless_it_is_right(tokenizer):
    groups, _, _ = run(tokenizer, invented)
    assert all(rollout.reward == 1.0 for group in groups for rollout in group.rollouts)  # it guessed all ten
    groups, _, _ = run(tokenizer, lambda text, seed: "a57:11\n####11" + carry_chain.END)
    assert all(rollout.reward == 0.0 for group in groups for rollout in group.rollouts)


#### States inside a conversation


def state(tokenizer, lines=4):
    """A prompt that goes on in line `lines`, before its choice."""
    (prompt,) = prompts(tokenizer, 1, 2)
    text = lookup_chain.solution(prompt.problem.question)[: lines * lookup_chain.LINE + lookup_chain.CHOICE]
    locked = as_ids(tokenizer.encode(text, add_special_tokens=False))
    observed = lookup_chain.observed(np.concatenate([locked, np.full(80, 40)]))[: len(locked)]
    return dataclasses.replace(prompt, ids=as_ids([*prompt.ids, *locked]), node=3, observed=observed)


def test_a_state_inside_a_turn_goes_on_with_the_words_that_it_holds(tokenizer):
    groups, _, made = run(tokenizer, right, prompt_list=[state(tokenizer)])
    assert [rollout.reward for rollout in groups[0].rollouts] == [1.0, 1.0] and groups[0].rollouts[0].turns == 7
    (answer, _) = made.grading.answers
    assert answer.prefix.count("?") == 4 and "".join(text for _, text in answer.prefix_parts).count("\n") == 4
    assert agent_metrics(groups)["num_turns/main_chain_synthetic/max"] == 7


def test_a_state_is_restored_by_its_turns_or_retired(tokenizer):
    table = {}

    def reply(words):
        return Reply(table[words[-3:-1]] + "\n")

    prompt = state(tokenizer, 2)
    values = importlib.import_module("deepgrpo.rewards.steps").looked_up(prompt.problem.question)
    table.update(zip(values, values[1:], strict=False))
    groups, engine, _ = run(tokenizer, right, Tool(reply), [prompt])
    assert [rollout.reward for rollout in groups[0].rollouts] == [1.0, 1.0]
    table[values[0]] = "00" if values[1] != "00" else "01"
    tool = Tool(reply)
    groups, engine, _ = run(tokenizer, right, tool, [prompt])
    assert [rollout.grade.reason for rollout in groups[0].rollouts] == [REPLAY_MISMATCH] * 2 and not engine.requests
    assert tool.closed == 2
    broken = Tool(lambda words: Reply(None, failed="refused"))
    assert replay(broken, broken.open(None, 0), [(STUDENT, "a57?"), (ENVIRONMENT, "12\n")]) == "refused"


def test_a_state_that_is_lost_retires_and_its_group_counts_as_nothing(tokenizer):
    pool, made = forest(), state(tokenizer, 2)
    root = made.problem
    locked = made.marked_ids[len(root.prompt_ids) :]
    pool.observe_root(root, 0, 1, 1, [np.concatenate([locked, as_ids([9])])])
    (failure,) = pool.dispatch(1, 1)
    pool.resolve(failure, Correction(locked, as_ids([8, STOP]), 1.0, as_ids([9])), 1)
    (child,) = pool.sample(1, 2)
    tool = Tool(lambda words: Reply("never what it said\n"))
    groups, _, _ = run(tokenizer, right, tool, [dataclasses.replace(made, node=child.node)])
    pool.observe(groups, 2)
    assert pool.ready() == 0 and not pool.index.nodes[child.node].active and pool.index.nodes[child.node].observations == 0


def test_a_service_that_is_down_costs_verdicts_and_nothing_else(tokenizer):
    """A thousand rollouts: none is a label, each episode is closed once, and the next call works again."""
    down = [True]
    tool = Tool(lambda words: Reply(None, failed="refused") if down[0] else Reply("12\n", counts={"calls": 1}))
    answer = lambda text, seed: "a57?" if "12" not in text else "a57" + carry_chain.END  # noqa: E731
    many = [dataclasses.replace(p, n=50) for p in prompts(tokenizer, 10)]
    for _ in range(2):
        groups, _, _ = run(tokenizer, answer, tool, many)
        verdicts = [rollout.reward for group in groups for rollout in group.rollouts]
        assert len(verdicts) == 500 and all((reward is None) == down[0] for reward in verdicts)
        down[0] = False
    assert tool.opened == tool.closed == 1000


def test_marks_stay_with_the_ids():
    ids, observed = as_ids([5, 0, 7, 9]), np.array([False, True, True, False])
    kept = marked(ids, observed)
    assert kept.tolist() == [5, -1, -8, 9] and plain(kept).tolist() == ids.tolist() and marks(kept).tolist() == observed.tolist()
    assert marked(ids, None) is ids and plain(ids) is ids and marks(ids) is None
    assert [(who, piece.tolist()) for who, piece in pieces(ids, observed)] == [
        (STUDENT, [5]),
        (ENVIRONMENT, [0, 7]),
        (STUDENT, [9]),
    ]


#### Chats

QWEN3_LIKE = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_chat_boundary_is_what_the_template_writes_between_two_turns(tokenizer):
    tokenizer = importlib.import_module("copy").deepcopy(tokenizer)
    tokenizer.chat_template = QWEN3_LIKE
    boundary = Boundary.of(tokenizer)
    end = carry_chain.VOCABULARY.index
    assert boundary.before.tolist()[:3] == [end("\n"), end("<|im_start|>"), end("user")]
    assert boundary.after.tolist()[-4:] == [end("\n"), end("<|im_start|>"), end("assistant"), end("\n")]
    tokenizer.chat_template = QWEN3_LIKE.replace("{{ m.content }}<|im_end|>", "{{ m.content.split('</think>')[-1] }}<|im_end|>")
    with pytest.raises(ValueError, match=r"not append-only \(with thoughts\)|append-only"):
        Boundary.of(tokenizer)
