"""Readers: every container, every set's columns, and errors that say what to do."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from deepgrpo.data import dataset
from deepgrpo.rewards.answer import ALIASES, canonical
from deepgrpo.rewards.grade import GRADERS, Answer, check_sources, grade

ROWS = [{"question": "2+3?", "answer": "It is 5.\n#### 5"}, {"question": "900+100?", "answer": "#### 1,000"}]


def save_to_disk(folder, rows):
    """What Hugging Face's `save_to_disk` leaves: a stream of record batches and a state file that names it."""
    folder.mkdir(parents=True)
    table = pyarrow.Table.from_pylist(rows)
    with (
        pyarrow.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as sink,
        pyarrow.ipc.new_stream(sink, table.schema) as out,
    ):
        out.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))


def test_one_set_in_every_container(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    save_to_disk(tmp_path / "saved", ROWS)
    (tmp_path / "shards").mkdir()
    for i, row in enumerate(ROWS):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "shards" / f"train-0000{i}-of-00002.parquet")
    for name in ("a.jsonl", "a.json", "a.parquet", "saved", "shards"):
        rows = dataset.read(f"gsm8k:{tmp_path / name}")
        assert [(row.question, row.ground_truth, row.data_source) for row in rows] == [
            ("2+3?", "5", "GSM8K"),
            ("900+100?", "1000", "GSM8K"),
        ]


def test_keys_of_boxed_sets(tmp_path):
    answers = ["\\frac12", 142.0, ["0.01\n", "0.02\n"], "None", "", ["a", ""]]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps({"problem": "?", "answer": a, "level": 3}) + "\n" for a in answers))
    rows = dataset.read(f"math:{tmp_path / 'm.jsonl'}")
    assert [row.ground_truth for row in rows] == [["\\frac12"], ["142.0"], ["0.01", "0.02"], None, None, None]
    assert rows[0].extra == {"level": 3} and rows[0].data_source == "MATH"


def test_verl_files_as_they_are(tmp_path):
    rows = [
        {
            "data_source": "MATH",
            "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": "1+1? Box it."}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": ["2"]},
            "extra_info": {"split": "train", "index": 0},
        }
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    (row,) = dataset.read(f"verl:{tmp_path / 'train.parquet'}")
    assert row.question == "1+1? Box it." and row.ground_truth == ["2"] and row.data_source == "MATH"
    assert row.messages == rows[0]["prompt"] and row.extra == {"split": "train", "index": 0}


def test_generated_sets():
    train, held_out = dataset.read("arithmetic:train:500"), dataset.read("arithmetic:heldout:300")
    assert len({row.question for row in (*train, *held_out)}) == 800
    for row in train[:50]:
        a, b, c = (int(n) for n in row.question.removesuffix(" = ?").split(" + "))
        assert 10 <= min(a, b, c) and str(a + b + c) == row.ground_truth
    assert dataset.read("arithmetic:train:100:1")[:20] == dataset.read("arithmetic:train:20:1")
    assert {row.data_source for row in dataset.read("carry_chain:heldout:3")} == {"carry_chain"}
    with pytest.raises(ValueError, match="1-digit sums has only"):
        dataset.read("arithmetic:heldout:700:1")


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("gsm9k:x.jsonl", ValueError, "NAME one of gsm8k, math"),
        ("gsm8k", ValueError, "is not NAME:PATH"),
        ("gsm8k:{}/none.jsonl", FileNotFoundError, "none.jsonl does not exist"),
        ("gsm8k:{}/other.jsonl", ValueError, "row 0 lacks question; it has problem, answer.*rename the columns"),
        ("gsm8k:{}/empty.jsonl", ValueError, "has no rows"),
        ("gsm8k:{}/broken.jsonl", ValueError, "line 1 is not JSON"),
        ("gsm8k:{}/a.csv", ValueError, "unknown type '.csv'"),
        ("gsm8k:{}/dict", ValueError, "several splits; name one: .*train or .*test"),
        ("gsm8k:{}", ValueError, "no data set in .*expected state.json"),
        ("math:{}/other.jsonl", None, ""),
        ("arithmetic:train:lots", ValueError, "SPLIT:COUNT"),
        ("arithmetic:test:3", ValueError, "split must be one of"),
    ],
)
def test_errors_name_file_and_remedy(tmp_path, spec, error, message):
    (tmp_path / "other.jsonl").write_text('{"problem": "?", "answer": "1"}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "broken.jsonl").write_text("{'question': 1}\n")
    (tmp_path / "a.csv").write_text("question,answer\n")
    (tmp_path / "dict").mkdir()
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    if error is None:
        assert dataset.read(spec.format(tmp_path))
        return
    with pytest.raises(error, match=message):
        dataset.read(spec.format(tmp_path))


@pytest.mark.parametrize(
    ("spec", "rows", "bad_keys"),
    [
        ("gsm8k:gsm8k_train.jsonl", 7473, 0),
        ("gsm8k:gsm8k_test.jsonl", 1319, 0),
        ("math:math_lvl3to5_8k_train.jsonl", 8523, 4),
        ("math:math500.jsonl", 500, 0),
        ("aime24:aime24.jsonl", 30, 0),
        ("amc:amc.jsonl", 83, 0),
        ("minerva:minerva.jsonl", 272, 0),
        ("olympiad_bench:olympiad_bench.jsonl", 675, 0),
    ],
)
def test_real_sets(data_folder, spec, rows, bad_keys):
    name, file = spec.split(":")
    read = dataset.read(f"{name}:{data_folder / file}")
    assert len(read) == rows and sum(row.ground_truth is None for row in read) == bad_keys
    check_sources({row.data_source for row in read})


def test_names_of_others_have_the_grader_that_their_answers_need():
    assert {canonical(name) for name in ALIASES} <= GRADERS.keys() and all(
        canonical(name) == name for name in GRADERS if "/" not in name
    )
    cases = {
        "openai/gsm8k": "#### 34",
        "HuggingFaceH4/MATH-500": r"\boxed{34}",
        "math_dapo": "Answer: 34",
        "aime2024": r"\boxed{34}",
    }
    for source, response in cases.items():
        assert grade(Answer(source, "?", "", response, "stop", "34", {})).reward == 1.0, source


@pytest.mark.parametrize(
    ("row", "needs"),
    [
        ({}, ""),
        ({"agent_name": "treerl_agent_loop"}, ""),
        ({"agent_name": "tool_agent"}, "agent_name 'tool_agent'"),
        ({"extra_info": {"tools_kwargs": {"a": None}}}, ""),  # filled in by Parquet
        ({"extra_info": {"interaction_kwargs": {"name": "gsm8k"}}}, "extra_info.interaction_kwargs"),
        ({"prompt": [{"role": "user"}, {"role": "assistant"}]}, "a last message of role 'assistant'"),
        ({"prompt": [{"role": "user", "tool_calls": [{"id": 1}]}]}, "a message with tool_calls"),
        ({"prompt": [{"role": "user"}, {"role": "tool"}]}, "a message of role 'tool'"),
    ],
)
def test_rows_of_loops_that_do_not_exist_are_recognised(row, needs):
    assert dataset.several_turns({"prompt": [{"role": "user"}]} | row) == needs
