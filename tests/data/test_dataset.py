"""Loading with its report, and the order of problems: a function of (seed, epoch), exact over a resume."""

import itertools
import json

import numpy as np
import pytest

from deepgrpo.data import dataset as dataset_lib
from deepgrpo.data.dataset import Dataset, contamination, load_problems
from deepgrpo.data.tokenizer import load_tokenizer
from deepgrpo.types import Problem, as_ids
from tests.data import small_tokenizer


def problems(n, key="k"):
    return [Problem(i, "GSM8K", as_ids([i]), f"{key}{i}", f"question {i}") for i in range(n)]


def indices(dataset, batches):
    return [[problem.index for problem in dataset.next()] for _ in range(batches)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(small_tokenizer.write(tmp_path_factory.mktemp("tokenizer")))


def test_overlong_and_keyless_rows_are_left_out_and_counted(tmp_path, tokenizer):
    rows = [("short", "1"), ("x" * 200, "2"), ("keyless", "None"), ("also short", "3"), ("third", "4")]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps({"problem": q, "answer": a}) + "\n" for q, a in rows))
    spec = f"math:{tmp_path / 'm.jsonl'}"
    kept, report = load_problems(spec, tokenizer, "chat", max_prompt_length=100)
    assert [(p.index, p.question, p.ground_truth) for p in kept] == [
        (0, "short", ["1"]),
        (1, "also short", ["3"]),
        (2, "third", ["4"]),
    ]
    assert (report.rows, report.kept, report.bad_keys, report.overlong) == (5, 3, [2], [1])
    assert str(report).endswith("3 of 5 problems (2 left out: 1 without a usable answer (row 2), 1 too long (row 1))")
    assert [p.question for p in load_problems(spec, tokenizer, "chat", 100, limit=2)[0]] == ["short", "also short"]
    with pytest.raises(ValueError, match=r"nothing is left of .*: 0 of 5 .*max_prompt_length \(now 5 tokens\)"):
        load_problems(spec, tokenizer, "chat", 5)
    with pytest.raises(ValueError, match="'chatty' is not one of chat"):
        load_problems(spec, tokenizer, "chatty", 100)


def test_prescribed_messages_are_used_verbatim_and_exclude_other_templates(tmp_path, tokenizer):
    row = {"data_source": "MATH", "prompt": [{"role": "user", "content": "1?"}], "reward_model": {"ground_truth": ["1"]}}
    (tmp_path / "v.jsonl").write_text(json.dumps(row))
    (problem,), _ = load_problems(f"verl:{tmp_path / 'v.jsonl'}", tokenizer, "chat", 100)
    assert tokenizer.decode(problem.prompt_ids) == "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(ValueError, match="prescribes its own chat messages.*set it to chat"):
        load_problems(f"verl:{tmp_path / 'v.jsonl'}", tokenizer, "gsm8k", 100)


def test_order_depends_on_seed_and_epoch_alone():
    first, again, other = (indices(Dataset(problems(10), 3, seed), 6) for seed in (1, 1, 2))
    assert first == again != other
    epochs = [sum(first[:3], []), sum(first[3:], [])]
    assert all(len(set(epoch)) == 9 for epoch in epochs) and epochs[0] != epochs[1]


def test_epochs_are_counted_and_the_partial_batch_dropped():
    dataset = Dataset(problems(10), 3, seed=0)
    assert dataset.batches_per_epoch == 3 and dataset.epoch == 0
    seen = [(dataset.next() and dataset.epoch, dataset.passes()) for _ in range(5)]
    assert seen == [(0, 0), (0, 0), (0, 1), (1, 1), (1, 1)]


@pytest.mark.parametrize(("takes", "least", "steps"), [([4], 4, 6), ([4, 1], 1, 12), ([1], 1, 30), ([4, 4, 2], 4, 8)])
def test_a_run_of_three_passes_sees_the_data_three_times_whatever_a_step_takes(takes, least, steps):
    dataset, seen, taken = Dataset(problems(10), 4, seed=0), [], itertools.cycle(takes)
    while dataset.passes(least) < 3:
        seen.append(len(dataset.next(next(taken))))
    assert len(seen) == steps and dataset.metrics()["training/passes"] >= 3 - (10 - 8) / 8


@pytest.mark.parametrize("taken", range(8))
def test_resume_equals_the_uninterrupted_run(taken):
    whole = Dataset(problems(10), 3, seed=5)
    indices(whole, taken)
    state = json.loads(json.dumps(whole.state()))
    resumed = Dataset(problems(10), 3, seed=5)
    resumed.restore(state)
    assert (resumed.epoch, resumed.passes()) == (whole.epoch, whole.passes())
    assert indices(resumed, 7) == indices(whole, 7)
    assert resumed.state() == whole.state()


def test_fewer_problems_than_a_batch_can_be_drawn():
    dataset = Dataset(problems(6), 4, seed=0)
    drawn = [[p.index for p in dataset.next(count)] for count in (3, 0, 3, 4)]
    assert list(map(len, drawn)) == [3, 0, 3, 4] and sorted(drawn[0] + drawn[2]) == list(range(6))
    with pytest.raises(ValueError, match="0 to 4 problems, 5"):
        dataset.next(5)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (lambda: Dataset(problems(10, key="other"), 3, seed=5), "fingerprint"),
        (lambda: Dataset(problems(11), 3, seed=5), "problems: 10 then, 11 now"),
        (lambda: Dataset(problems(10), 3, seed=6), "seed: 5 then, 6 now"),
    ],
)
def test_a_position_in_other_data_is_refused(other, named):
    with pytest.raises(ValueError, match=named):
        other().restore(Dataset(problems(10), 3, seed=5).state())


def test_a_changed_permutation_is_noticed(monkeypatch):
    state = Dataset(problems(10), 3, seed=5).state()
    monkeypatch.setattr(dataset_lib.np.random, "PCG64", np.random.PCG64DXSM)
    with pytest.raises(ValueError, match="order: .* then, .* now"):
        Dataset(problems(10), 3, seed=5).restore(state)


def test_batch_larger_than_the_set():
    with pytest.raises(ValueError, match="data.batch_size=4 can't be drawn from 3 problems"):
        Dataset(problems(3), 4, seed=0)


def test_contamination_counts_and_names_held_out_questions(caplog):
    texts = (" Question\n $3$. ", "question 33", "question 4 Let's think step by step and box the answer.")
    held_out = [Problem(i, "GSM8K", as_ids([1]), "k", text) for i, text in enumerate(texts)]
    with caplog.at_level("WARNING", logger="deepgrpo"):
        assert contamination(problems(5), held_out) == 2
    assert "held-out GSM8K question ' Question\\n $3$. ' is also training question 'question 3'" in caplog.text
    caplog.clear()
    assert contamination(problems(9), problems(9)) == 9 and "and 4 more held-out questions" in caplog.text
