"""Teacher suffixes as a stream of their own: golden entries, queue to pool to rows, resume."""

import dataclasses

import pytest

from deepgrpo.curriculum.base import Correction
from deepgrpo.learner import rows as rows_lib
from deepgrpo.learner import training_rows
from deepgrpo.learner.objective import BRANCH, MAIN, TEACHER
from deepgrpo.types import Prompt, as_ids
from tests.conftest import golden_cases
from tests.curriculum.branch_run import EOS, in_order, problem, roll, scored, setting
from tests.curriculum.made import create

FIELDS = dict(advantage="group_mean", stop_ids=(EOS,), max_model_len=32)


def suffixes(batch_threshold=2, branches_per_entry=3):
    keys = {"branches__batch_threshold": batch_threshold, "branches__branches_per_entry": branches_per_entry}
    pool = create("suffixes", **keys)
    pool.failed.max_age = 2
    return pool


def main_group(rewards, step=1, prompt=(1, 2, 3)):
    row = problem(prompt)
    return scored(rewards, Prompt(row.prompt_ids, row, len(rewards), f"{step}:{prompt[-1]}"), length=6)


def correct(pool, step, prefix=2, suffix=(21, 7, EOS), reward=1.0):
    """Answers all that waits for the teacher; returns the outcomes."""
    failures = pool.dispatch(100, step)
    return [
        pool.resolve(f, Correction(f.response_ids[:prefix], as_ids(suffix), reward, f.response_ids[prefix:]), step)
        for f in failures
    ]


def prompts_of(states, step):
    return [Prompt(s.ids, s.problem, s.n, f"{step}:state:{i}", s.node, s.stream) for i, s in enumerate(states)]


def join(groups, pool, teacher_loss):
    found = training_rows.find_continuations(groups, pool.continuation)
    rows = rows_lib.rows_from_groups(groups, "group_mean")
    return training_rows.add_teacher_to_groups(rows, groups, found, teacher_loss=teacher_loss, **FIELDS)


@pytest.mark.parametrize("case", golden_cases("branching_*.json", {"teacher_entry_group"}))
def test_golden_entry(case):
    inputs, expected = case["inputs"], case["expected"]
    loss, state = inputs["teacher_loss_type"] or "null", inputs["prompt_ids"] + inputs["prefix_ids"]
    pool = suffixes(batch_threshold=1, branches_per_entry=inputs["branches_per_entry"])
    row = problem(inputs["prompt_ids"])
    failed = scored([0.0], Prompt(row.prompt_ids, row, 1, "0:0"))
    ids = as_ids([*inputs["prefix_ids"], 6, EOS])
    rollout = dataclasses.replace(failed.rollouts[0], completion=dataclasses.replace(failed.rollouts[0].completion, ids=ids))
    pool.observe([dataclasses.replace(failed, rollouts=(rollout,))], 0)
    correct(pool, 0, len(inputs["prefix_ids"]), inputs["suffix_ids"], inputs["teacher_reward"])
    parties = setting([{"prompt_ids": state, "completions": inputs["completions"]}])
    groups = roll(parties, prompts_of(pool.sample(pool.num_to_inject(8), 1), 1))
    rows, metrics = join(groups, pool, loss)

    def as_golden(row, advantage):
        ids = {"prompt_ids": row.prompt_ids.tolist(), "response_ids": row.response_ids.tolist()}
        return ids | {"response_mask": [1] * len(row.response_ids), "reward": row.reward, "advantage": pytest.approx(advantage)}

    branch = [as_golden(row, row.advantage) for row in rows if row.source == BRANCH]
    order = lambda row: (row["prompt_ids"], row["response_ids"])  # noqa: E731
    assert sorted(branch, key=order) == sorted(in_order(expected["branch_rows"]), key=order)
    teacher = [as_golden(row, row.teacher_coef) for row in rows if row.source == TEACHER]
    (only,) = expected["teacher_rows"]
    assert teacher == [only] and metrics["teacher/rows_built"] == 1


def test_failures_go_to_the_teacher_and_come_back_once():
    pool = suffixes()
    metrics = pool.observe([main_group([0.0, 1.0, None, 0.0])], 1)
    assert metrics == {"teacher/entries_sampled": 0, "teacher/failed_collected": 2} and pool.pending() == 2
    assert correct(pool, 1) == ["added", "added"] and pool.pending() == 0 and pool.num_to_inject(1) == 2
    pool.observe([main_group([0.0], 2)], 2)
    assert correct(pool, 2) == ["added"] and pool.metrics()["teacher_pool/size"] == 3
    states = pool.sample(pool.num_to_inject(1), 3)
    assert [(s.n, s.stream, s.ids[:3].tolist(), len(s.ids)) for s in states] == [(3, "branch", [1, 2, 3], 5)] * 2
    assert pool.num_to_inject(1) == 0 and pool.metrics()["teacher_pool/size"] == 1  # one is left, which is no batch
    groups = [main_group([0.0], 3), *(scored([0.0] * 3, p) for p in prompts_of(states, 3))]
    assert pool.continuation(states[0].node)[1] == 1.0
    metrics = pool.observe(groups, 3)
    assert metrics == {"teacher/entries_sampled": 2, "teacher/failed_collected": 1}  # continuations are nobody's failures
    assert pool.continuation(states[0].node) is None


def test_results_that_bring_nothing_or_come_twice():
    pool = suffixes()
    pool.observe([main_group([0.0, 0.0])], 1)
    first, second = pool.dispatch(2, 1)
    assert pool.resolve(first, None, 1) == "failed" and pool.resolve(first, None, 1) == "stale"
    pool.requeue(second)
    assert pool.pending() == 1 and pool.dispatch(5, 1)[0].failure_id == second.failure_id


def entry_groups(rewards, n=3):
    """Two entries, the first with the given rewards; main rows beside them."""
    pool = suffixes(branches_per_entry=n)
    pool.observe([main_group([0.0, 0.0])], 1)
    correct(pool, 1)
    first, second = prompts_of(pool.sample(2, 2), 2)
    return [main_group([0.0, 1.0], 2), scored(rewards, first), scored([1.0, 0.0, 0.0][:n], second)], pool


@pytest.mark.parametrize(("loss", "shared"), [("luffy", True), ("null", True), ("sft", False)])
def test_the_teacher_shares_the_mean_but_for_sft(loss, shared):
    rows, metrics = join(*entry_groups([0.0, 0.0, 0.0]), loss)
    advantages = [row.advantage for row in rows if row.source == BRANCH]
    joint, alone = [-0.25] * 3 + [0.5, -0.5, -0.5], [0.0] * 3 + [2 / 3, -1 / 3, -1 / 3]
    assert advantages == pytest.approx(joint if shared else alone)
    assert [row.advantage for row in rows if row.source == MAIN] == [-0.5, 0.5]
    coefs = [row.teacher_coef for row in rows if row.source == TEACHER]
    assert coefs == pytest.approx([0.75, 0.5] if shared else [1.0, 2 / 3])  # null: the learner leaves these rows out
    assert metrics == {"teacher/rows_built": 2, "teacher/suffix_too_long": 0, "teacher/no_student_verdict": 0}


def test_entries_without_a_verdict_or_without_room():
    for loss, built in (("luffy", 1), ("sft", 2)):  # a suffix can be trained on alone, but not weighed alone
        rows, metrics = join(*entry_groups([None] * 3), loss)
        assert metrics["teacher/rows_built"] == built and metrics["teacher/no_student_verdict"] == 2 - built
    groups, pool = entry_groups([0.0] * 3)
    found = {key: (as_ids(range(28)), 1.0) for key in training_rows.find_continuations(groups, pool.continuation)}
    rows = rows_lib.rows_from_groups(groups, "group_mean")
    rows, metrics = training_rows.add_teacher_to_groups(rows, groups, found, teacher_loss="sft", **FIELDS)
    assert not [row for row in rows if row.source == TEACHER] and metrics["teacher/suffix_too_long"] == 2
    assert training_rows.add_teacher_to_groups([], [], {}, teacher_loss="luffy", **FIELDS)[0] == []
