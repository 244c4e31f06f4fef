"""python -m deepgrpo.prepare, from files to files: what is written, read back, reported and refused."""

import json

import pyarrow.parquet
import pytest

from deepgrpo import prepare
from deepgrpo.data import dataset
from deepgrpo.data.dataset import load_problems
from deepgrpo.data.tables import sha256
from deepgrpo.data.tokenizer import load_tokenizer
from tests.data import small_tokenizer

SENTENCE = " Let's think step by step and output the final answer within \\boxed{}."
GSM8K = {
    "gsm8k_train.jsonl": [("What is 2+3?", "2+3=5\n#### 5"), ("What is 999+1?", "#### 1,000")],
    "gsm8k_test.jsonl": [("1-2?", "#### -1")],
}
MATH = {
    "math_lvl3to5_8k_train.jsonl": [
        ("Find $x$.", "$x=1$"),
        ("Find y.", "None"),
        ("Find  $x$.", "x=1"),
        ("Find z.", ""),
        ("Find w.", " 3 "),
    ],
    "math500.jsonl": [("Find  $x$!", "1"), ("Find the number.", " 25\n")],
}


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    for files, columns in ((GSM8K, ("question", "answer")), (MATH, ("problem", "answer"))):
        for name, rows in files.items():
            lines = (json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows)
            (folder / name).write_text("".join(lines))
    fixes = [{"row": 1, "stored": "None", "correct": "9", "why": "brace-less box"}]
    content = {"file": "math_lvl3to5_8k_train.jsonl", "answer_fixes": fixes, "duplicate_problem_rows": [[0, 2]]}
    (folder / "math_known_issues.json").write_text(json.dumps(content))
    return folder


def run(name, out, *arguments):
    prepare.main([name, f"--out={out}", *map(str, arguments)])
    return json.loads((out / "report.json").read_text())


def rows_of(path):
    return pyarrow.parquet.read_table(path).to_pylist()


def test_gsm8k_columns_and_values(source, tmp_path, capsys):
    report = run("gsm8k", tmp_path / "out", "--source", source)
    train = rows_of(tmp_path / "out" / "train.parquet")
    assert train[1] == {
        "data_source": "GSM8K",
        "prompt": [
            {"role": "user", "content": 'What is 999+1? Let\'s think step by step and output the final answer after "####".'}
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1000"},
        "extra_info": {"split": "train", "index": 1, "answer": "#### 1,000", "question": "What is 999+1?"},
    }  # and no agent_name
    assert rows_of(tmp_path / "out" / "test.parquet")[0]["reward_model"]["ground_truth"] == "-1"
    split = report["splits"]["train"]
    assert split["notes"] == ["WARNING: 2 rows, the official number is 7473 (-7471)"] and split["rows"] == 2
    assert split["sha256"] == sha256(tmp_path / "out" / "train.parquet")
    assert split["source"]["sha256"] == {"gsm8k_train.jsonl": sha256(source / "gsm8k_train.jsonl")}
    assert "official number is 7473 (-7471)" in capsys.readouterr().out


def test_math_is_repaired_and_everything_is_said(source, tmp_path, capsys):
    report = run("math", tmp_path / "out", "--source", source)
    train = rows_of(tmp_path / "out" / "train.parquet")
    assert train[0] == {
        "data_source": "MATH",
        "prompt": [{"role": "user", "content": "Find $x$." + SENTENCE}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ["x=1"]},
        "agent_name": "reasoning_agent_loop",
        "extra_info": {"split": "train", "index": 0, "question": "Find $x$." + SENTENCE, "answer": ["x=1"]},
    }
    assert [row["reward_model"]["ground_truth"] for row in train] == [["x=1"], ["9"], ["x=1"], ["3"]]
    split = report["splits"]["train"]
    assert split["dropped"] == {"no usable key": 1} and split["repaired"] == {
        "answer corrected": 1,
        "key rewritten": 1,
        "key trimmed": 1,
    }
    assert (
        "row 3 dropped: no usable key, found ''" in split["notes"]
        and "row 2 repeats the question of row 0: kept" in split["notes"]
    )
    assert report["splits"]["test"]["repaired"] == {"key trimmed": 1} and report["splits"]["test"]["key_kinds"] == {"number": 2}
    overlap = report["overlap"]["train and test"]
    assert (overlap["exact"], overlap["near"]) == (1, 0) and overlap["examples"]["exact"][0]["train"] == "Find $x$."
    assert "WARNING: questions in both: 1 (1 word for word" in capsys.readouterr().out


def test_options(source, tmp_path):
    against = f"--against=math:{source}/math500.jsonl"
    flags = ("--drop-overlap", "--duplicates=drop", "--fixes=none", "--keys=stored", "--split=train", against)
    report = run("math", tmp_path / "a", "--source", source, *flags)
    assert report["splits"]["train"]["dropped"] == {"no usable key": 2, "repeated question": 1, "also a held-out question": 1}
    assert [row["reward_model"]["ground_truth"] for row in rows_of(tmp_path / "a" / "train.parquet")] == [[" 3 "]]
    assert list(report["splits"]) == ["train"] and not (tmp_path / "a" / "test.parquet").exists()
    (tmp_path / "boxed.jsonl").write_text('{"problem": "$\\\\boxed{x}$?", "answer": "1"}\n{"problem": "x", "answer": "1"}\n')
    file = f"--split=test={tmp_path / 'boxed.jsonl'}"
    assert "1 statements contain a box" in run("math500", tmp_path / "c", file)["splits"]["test"]["notes"][1]
    report = run("math500", tmp_path / "c", file, "--boxed-statements=drop")
    assert report["splits"]["test"]["dropped"] == {"box in the statement": 1}
    report = run("math", tmp_path / "b", "--source", source, "--hold-out=2", "--max-test=1")
    train, selection = (rows_of(tmp_path / "b" / f"{name}.parquet") for name in ("train", "selection"))
    assert len(train) == 2 and len(selection) + report["splits"]["selection"]["dropped"].get("also a training question", 0) == 2
    assert len(rows_of(tmp_path / "b" / "test.parquet")) == 1 and selection[0]["extra_info"]["split"] == "selection"


STYLES = (
    ("suffix", "user", False, True),
    ("system", "system user", True, False),
    ("both", "system user", True, True),
    ("bare", "user", False, False),
)


@pytest.mark.parametrize(("style", "roles", "in_system", "in_user"), STYLES)
def test_prompt_styles(source, tmp_path, style, roles, in_system, in_user):
    run("math", tmp_path / "out", "--source", source, "--prompt-style", style)
    messages = rows_of(tmp_path / "out" / "test.parquet")[0]["prompt"]
    assert " ".join(message["role"] for message in messages) == roles
    assert messages[-1]["content"] == "Find  $x$!" + (SENTENCE if in_user else "")
    assert ("within \\boxed{}" in messages[0]["content"] and len(messages) == 2) == in_system


def test_prepared_files_train_like_the_source(source, tmp_path):
    """The same prompts and keys by either way: prepared parquet with template chat, source with the benchmark's template."""
    tokenizer = load_tokenizer(small_tokenizer.write(tmp_path / "tokenizer"))
    for name, template in (("gsm8k", "gsm8k"), ("math", "math_boxed")):
        run(name, tmp_path / name, "--source", source, "--fixes=none")
        ways = (
            (f"{name}:{source}/{(*(GSM8K if name == 'gsm8k' else MATH),)[0]}", template),
            (f"verl:{tmp_path / name}/train.parquet", "chat"),
        )
        direct, prepared = (load_problems(spec, tokenizer, chosen, 500)[0] for spec, chosen in ways)
        assert [(p.prompt_ids.tolist(), p.ground_truth, p.data_source) for p in direct] == [
            (p.prompt_ids.tolist(), p.ground_truth, p.data_source) for p in prepared
        ]
    assert dataset.read(f"verl:{tmp_path}/math/train.parquet")[0].extra["agent_name"] == "reasoning_agent_loop"


def test_the_same_input_gives_the_same_bytes(source, tmp_path):
    reports = [run("math", tmp_path / name, "--source", source) for name in ("a", "b")]
    assert (
        reports[0] == reports[1]
        and (tmp_path / "a" / "train.parquet").read_bytes() == (tmp_path / "b" / "train.parquet").read_bytes()
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gsm8k", "--split=dev"], "gsm8k has no dev; it has train, test"),
        (["gsm8k", "--split=train={source}/gsm8k_test.jsonl"], "would become training data"),
        (["amc"], "no test split in .*looked for amc.jsonl"),
        (["math", "--bad-keys=refuse"], "row 3: no usable key, found ''. Correct it with a corrections file"),
        (["math", "--fixes={source}/nowhere.json"], "corrections: .*nowhere.json does not exist"),
        (["math", "--fixes={source}/math_known_issues.json", "--split=test"], "fits none of .*math500.jsonl"),
        (["math", "--against=other:x"], "'other:x' is not NAME:PATH"),
        (["math", "--hold-out=5"], "hold-out=5: expected fewer than the rows of train; here are 4"),
        (["math", "--max-train=-1"], "--max-train: expected a number of rows"),
        (["finqa", "--prompt-style=both"], "finqa has a prompt of its own"),
        (["asdiv", "--source="], "asdiv has no repository of its own on the hub"),
        (["gsm8k", "--source={source}/gsm8k_train.jsonl"], "is one file, several splits are wanted"),
    ],
)
def test_what_is_refused_leaves_nothing_behind(source, tmp_path, arguments, message):
    line = [text.format(source=source) for text in arguments]
    with pytest.raises(SystemExit, match=message):
        prepare.main([line[0], f"--source={source}", f"--out={tmp_path / 'out'}", *line[1:]])
    assert not (tmp_path / "out").exists()


def test_a_folder_keeps_one_benchmark(source, tmp_path):
    run("math500", tmp_path / "out", "--source", source)
    run("math500", tmp_path / "out", "--source", source)
    with pytest.raises(SystemExit, match="already holds math500; give math a folder of its own"):
        run("math", tmp_path / "out", "--source", source)
