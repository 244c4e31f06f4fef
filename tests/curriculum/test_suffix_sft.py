"""Schedules of SFT on teacher suffixes: when a phase is due, on what it trains, what it credits."""

import numpy as np
import pytest

from deepgrpo.curriculum import suffix_sft
from deepgrpo.curriculum.forest import Forest
from deepgrpo.curriculum.suffix_sft import SuffixSft, epoch_sft_minibatches
from deepgrpo.learner.objective import TEACHER
from deepgrpo.types import as_ids
from tests.conftest import golden_cases
from tests.curriculum.made import answer, config, describe, forest, problem

STOP = 9


@pytest.mark.parametrize("case", golden_cases("branching_*.json", {"epoch_local_sft_batches"}))
def test_golden_batches(case):
    inputs = case["inputs"]
    snapshot = [tuple(pair) for pair in inputs["snapshot"]]
    batches = epoch_sft_minibatches(snapshot, inputs["teacher_mini_batch_size"], inputs["epoch_passes"])
    assert [{"pass": n, "nodes": nodes} for n, nodes in batches] == case["expected"]["batches"]


class Learner:
    """Records what it is asked to train on; refuses the steps whose number is in `refused`."""

    def __init__(self, batch: int, refused: tuple[int, ...] = ()):
        self.batches: list[list[tuple[list[int], list[int]]]] = []
        self._batch, self._refused = batch, refused

    def __call__(self, rows, step):
        assert all(row.source == TEACHER for row in rows)
        self.batches.append([(row.prompt_ids.tolist(), row.response_ids.tolist()) for row in rows])
        done = [len(self.batches) not in self._refused] * -(-len(rows) // self._batch)
        return {"actor/post_sft_optimizer_steps": float(sum(done)), "actor/teacher_chain/post_sft_loss": len(self.batches)}, done


def fail(pool: Forest, prompt: int, step: int, response: list[int]) -> None:
    pool.observe_root(problem(prompt, [prompt]), 0, 2, step, [as_ids(response)])


def grow(pool: Forest, prompt: int, step: int, prefix: int) -> int:
    """A state of a prompt's tree, made at `step`: prompt and one token; the teacher's suffix is [5, 6]."""
    fail(pool, prompt, step, [prefix, 1])
    (failure,) = pool.dispatch(1, step)
    return answer(pool, failure, [prefix], step, suffix=[5, 6])


def schedule(
    pool: Forest | None, learner: Learner, kind: str, batch=2, allow_partial=False, max_model_len=16, apart=True
) -> SuffixSft:
    made = config(suffix_sft=kind, max_model_len=max_model_len, optim__teacher__mini_batch_rows=batch)
    made.optim.teacher.allow_partial = allow_partial
    made.objective.teacher_update = "post_ppo" if apart else "joint"
    return SuffixSft(made, pool, learner, (STOP,))


@pytest.fixture(autouse=True)
def two_passes(monkeypatch):
    monkeypatch.setattr(suffix_sft, "PASSES", 2)


def test_epoch_local_trains_once_an_epoch_on_what_the_epoch_brought():
    pool, learner = forest(), Learner(2)
    sft = schedule(pool, learner, "epoch_local")
    for prompt in (1, 2, 3):
        grow(pool, prompt, 1, 7)
    late = grow(pool, 1, 2, 8)
    fail(pool, 2, 2, [3, 3])
    assert "epoch_suffix_sft/epoch" not in sft.train([], 1, ended=0, last=False) and not learner.batches

    metrics = sft.train([], 2, ended=1, last=False)
    # Twice over 4 states of 3 trees: (1, 2), then (3, 1); nothing is left of a pass.
    states = [[prompt for prompt, _ in batch] for batch in learner.batches]
    assert states == [[[1, 7], [2, 7]], [[3, 7], [1, 8]]] * 2
    assert {tuple(suffix) for batch in learner.batches for _, suffix in batch} == {(5, 6, STOP)}  # closed by the stop id
    about = {name.partition("/")[2]: value for name, value in metrics.items() if name.startswith("epoch_suffix_sft/")}
    expected = {"epoch": 0, "epoch_start_step": 1, "epoch_end_step": 2, "snapshot_nodes": 4, "snapshot_trees": 3, "passes": 2}
    expected |= {"events_cleared": 1, "events_cleared_pending": 1, "optimizer_steps": 4, "sampled_entries": 8, "stale_entries": 0}
    expected |= {"recorded_entries": 8, "dropped_entries": 0, "sample_batches": 4, "waiting_for_full_batch": 0}
    assert {name: about[name] for name in expected} == expected and sft.steps == 4
    assert metrics["sft/optimizer_steps"] == metrics["actor/post_sft_optimizer_steps"] == 4  # counts add up, the rest is a mean
    assert metrics["actor/teacher_chain/post_sft_loss"] == 2.5
    assert pool.pending() == 0 and pool.metrics()["sft/recorded_node_updates"] == 8
    assert [n["sft_updates"] for t in describe(pool) for n in t["nodes"] if n["node"] == late] == [2]

    sft.train([], 3, ended=1, last=False)  # hard states took places: the pass is still the one whose end was noticed
    assert len(learner.batches) == 4 and sft.steps == 0
    resumed = schedule(pool, learner, "epoch_local")
    resumed.restore(sft.state())
    grow(pool, 4, 3, 7)
    metrics = resumed.train([], 4, ended=1, last=True)  # the run's end: one new state, in a window of its own
    assert metrics["epoch_suffix_sft/epoch_start_step"] == 3 and metrics["epoch_suffix_sft/snapshot_nodes"] == 1
    assert metrics["epoch_suffix_sft/waiting_for_full_batch"] == metrics["epoch_suffix_sft/needed_for_next_batch"] == 1
    assert len(learner.batches) == 4


def test_what_cannot_be_trained_spoils_its_batch_and_a_refused_step_credits_nothing(monkeypatch):
    pool, learner = forest(), Learner(2, refused=(2,))
    monkeypatch.setattr(suffix_sft, "PASSES", 3)
    sft = schedule(pool, learner, "epoch_local")
    for prompt in (1, 2):
        grow(pool, prompt, 1, 7)
    frozen = pool.freeze_sft_epoch

    def freeze_and_retire(low, high):
        entries = frozen(low, high)
        return entries if high < 9 else (entries[0], pool.observe_node(entries[0][0].node, 2, 2, 9, None) and entries[1])

    pool.freeze_sft_epoch = freeze_and_retire
    metrics = sft.train([], 1, ended=1, last=False)
    assert metrics["epoch_suffix_sft/record_skipped_entries"] == 2 and metrics["epoch_suffix_sft/recorded_entries"] == 4
    assert metrics["epoch_suffix_sft/record_skipped_optimizer_steps"] == 1 and sft.steps == 2
    for prompt in (1, 2):
        grow(pool, prompt, 5, 8)
    metrics = sft.train([], 9, ended=2, last=False)  # a state is mastered between the freeze and its batch
    assert metrics["epoch_suffix_sft/stale_entries"] == 6 and sft.steps == 0 and len(learner.batches) == 3


def test_post_step_takes_full_batches_of_the_least_recently_trained(monkeypatch):
    pool, learner = forest(), Learner(2)
    monkeypatch.setattr(suffix_sft, "MAX_BATCHES", 2)
    sft = schedule(pool, learner, "post_step")
    grow(pool, 1, 1, 7)
    metrics = sft.train([], 1, ended=5, last=True)
    assert not learner.batches and metrics["prefix_suffix_sft/needed_for_next_batch"] == 1
    for prompt in (2, 3, 4, 5):
        grow(pool, prompt, 1, 7)
    metrics = sft.train([], 2, ended=5, last=False)
    assert [[prompt[0] for prompt, _ in batch] for batch in learner.batches] == [[1, 2, 3, 4]]
    assert metrics["prefix_suffix_sft/recorded_entries"] == 4 and sft.steps == 2 == metrics["sft/optimizer_steps"]
    sft.train([], 3, ended=5, last=False)
    assert learner.batches[-1][0][0] == [5, 7]  # its turn

    partial = schedule(pool, learner, "post_step", batch=8, allow_partial=True)
    metrics = partial.train([], 4, ended=5, last=False)
    assert metrics["prefix_suffix_sft/partial_batch_entries"] == 5 == len(learner.batches[-1])


def test_a_suffix_that_does_not_fit_is_left_out():
    pool, learner = forest(), Learner(2)
    for prompt in (1, 2):
        grow(pool, prompt, 1, 7)
    tight = schedule(pool, learner, "post_step", max_model_len=4)  # a row needs 5
    assert tight.train([], 1, ended=0, last=False)["prefix_suffix_sft/stale_teacher_filtered"] == 2 and not learner.batches


def test_off_gives_the_steps_own_teacher_rows_their_steps():
    row = type("Row", (), {"source": TEACHER, "prompt_ids": np.array([1]), "response_ids": np.array([2])})
    learner = Learner(1)
    off = schedule(None, learner, "off", batch=1)
    assert off.train([row], 1, ended=1, last=True)["actor/post_sft_optimizer_steps"] == 1 and off.steps == 1
    assert schedule(None, learner, "off", batch=1, apart=False).train([row], 1, 1, True) == {}
