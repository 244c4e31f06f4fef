"""Where the files of a benchmark are: usual names, saved data sets, Parquet shards, the hub; and test files out of training."""

import json
import sys
import types

import pyarrow
import pyarrow.parquet
import pytest

from deepgrpo.data import tables
from deepgrpo.data.benchmarks import BENCHMARKS
from deepgrpo.data.cells import KEY, TEXT
from tests.data.test_readers import save_to_disk

ROWS = [{"problem": "1+1?", "answer": "2"}, {"problem": "2+2?", "answer": "4"}]
TRAIN, TEST = BENCHMARKS["math"].splits["train"], BENCHMARKS["math"].splits["test"]


def write(path, rows=ROWS):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_folder_with_files_under_usual_names(tmp_path):
    write(tmp_path / "math_lvl3to5_8k_train.jsonl")
    write(tmp_path / "math500.jsonl", ROWS[:1])
    train = tables.load(tmp_path, "train", TRAIN, False, {"problem": TEXT, "answer": KEY})
    test = tables.load(tmp_path, "test", TEST, False, {"problem": TEXT, "answer": KEY})
    assert (train.rows, test.rows) == (ROWS, ROWS[:1])
    assert train.files == {"math_lvl3to5_8k_train.jsonl": tables.sha256(train.path)} and len(train.files[train.path.name]) == 64


def test_saved_sets_of_the_original_recipe(tmp_path):
    """A DatasetDict with one split, and a suite whose splits are the benchmarks."""
    saved = tmp_path / "train" / "math_lvl3to5_8k"
    save_to_disk(saved / "train", ROWS)
    (saved / "dataset_dict.json").write_text('{"splits": ["train"]}')
    for name in ("math", "aime"):
        save_to_disk(tmp_path / "evaluation_suite" / name, ROWS[:1])
    assert tables.load(tmp_path, "train", TRAIN, False, {}).rows == ROWS
    assert tables.load(saved, "train", TRAIN, False, {}).rows == ROWS
    assert tables.load(tmp_path, "test", TEST, False, {}).rows == ROWS[:1]
    (tmp_path / "evaluation_suite" / "dataset_dict.json").write_text('{"splits": ["math", "aime"]}')
    found = tables.load(tmp_path / "evaluation_suite", "test", BENCHMARKS["aime24"].splits["test"], True, {})
    assert found.path.name == "aime" and list(found.files) == ["data-00000-of-00001.arrow"]
    assert tables.load(tmp_path / "evaluation_suite" / "aime", "test", TEST, True, {}).rows == ROWS[:1]


def test_shards_of_a_hub_repository(tmp_path, monkeypatch):
    for number in range(2):
        write(tmp_path / "snapshot" / "main" / f"train-{number:05}-of-00002.parquet", ROWS[number : number + 1])
    asked = {}
    hub = types.SimpleNamespace(
        snapshot_download=lambda name, **more: asked.update(more, name=name) or str(tmp_path / "snapshot")
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    place = tables.open_source("openai/gsm8k", "v1")
    assert (asked["name"], asked["repo_type"], asked["revision"]) == ("openai/gsm8k", "dataset", "v1")
    found = tables.load(place, "train", BENCHMARKS["gsm8k"].splits["train"], False, {})
    assert found.rows == ROWS and len(found.files) == 2


def test_an_unreachable_hub_says_what_to_do(monkeypatch):
    def refuse(*_, **__):
        raise OSError("no route\nto host")

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=refuse))
    with pytest.raises(ConnectionError, match=r"owner/name is no local path.*OSError: no route\).*hf download owner/name"):
        tables.open_source("owner/name")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConnectionError, match="pip install huggingface_hub"):
        tables.open_source("owner/name")
    for path in ("data/gsm8k.jsonl", "./nowhere", "/a/b/c"):
        with pytest.raises(FileNotFoundError, match="does not exist"):
            tables.open_source(path)


@pytest.mark.parametrize(
    "name",
    ["gsm8k_test.jsonl", "dev.json", "MATH-500.jsonl", "olympiad_bench.json", "processed_test-dev_out_3_8.json", "validation"],
)
def test_test_files_do_not_become_training_data(tmp_path, name):
    path = tmp_path / name
    save_to_disk(path, ROWS) if name == "validation" else write(path)
    with pytest.raises(ValueError, match="is a test or validation file.*--allow-test-as-train"):
        tables.load(path, "train", TRAIN, True, {})
    assert tables.load(path, "train", TRAIN, True, {}, allow_test=True).rows == ROWS
    assert tables.load(path, "test", TEST, True, {}).rows == ROWS


@pytest.mark.parametrize("name", ["latest.jsonl", "contest_train.jsonl", "devices.jsonl", "amc_aime_train.jsonl"])
def test_names_that_only_look_like_tests(tmp_path, name):
    assert not tables.held_out(tmp_path / name)


def test_what_is_missing_or_ambiguous_is_named(tmp_path):
    write(tmp_path / "train_a.json")
    write(tmp_path / "train_b.json")
    split = tables.Split(("train*.json",), train=True)
    with pytest.raises(
        ValueError, match=r"several files could be train: .*train_a.json, .*train_b.json. Choose: --split train=PATH"
    ):
        tables.load(tmp_path, "train", split, False, {})
    with pytest.raises(FileNotFoundError, match=r"no test split in .*looked for math500.jsonl.*found train_a.json, train_b.json"):
        tables.load(tmp_path, "test", TEST, False, {})
    with pytest.raises(ValueError, match="is one file, several splits are wanted"):
        tables.load(tmp_path / "train_a.json", "test", TEST, False, {})
    save_to_disk(tmp_path / "saved", ROWS)
    with pytest.raises(ValueError, match="is one saved split, several are wanted"):
        tables.load(tmp_path / "saved", "test", TEST, False, {})
