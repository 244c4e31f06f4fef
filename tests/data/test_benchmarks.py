"""Converters of search, table, agent and code sets: schema, keys, and what stands in the prompts."""

import json

import pyarrow.parquet
import pytest

from deepgrpo import prepare
from deepgrpo.data import dataset


def run(name, tmp_path, *arguments):
    """Rows by split of what was prepared, and the report."""
    prepare.main([name, f"--source={tmp_path / 'source'}", f"--out={tmp_path / 'out'}", *arguments])
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    files = {split: pyarrow.parquet.read_table(tmp_path / "out" / f"{split}.parquet").to_pylist() for split in report["splits"]}
    return files, report


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows) if path.suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows))


def prompt_of(row):
    (message,) = row["prompt"]
    return message["content"]


def test_search_qa(tmp_path):
    row = {"id": "train_0", "question": " who wrote it", "golden_answers": ["Ann", "Ann B."], "metadata": {"type": "bridge"}}
    write(tmp_path / "source" / "hotpotqa" / "train.jsonl", [row])
    write(tmp_path / "source" / "hotpotqa" / "dev.jsonl", [{**row, "question": "When?"}, {**row, "golden_answers": []}])
    other = {"id": "test_0", "question": "Which?", "golden_answers": ["x"], "metadata": {"type": ["a list"]}}
    write(tmp_path / "source" / "musique" / "train.jsonl", [{**other, "question": "Where?"}])
    write(tmp_path / "source" / "musique" / "test.jsonl", [other])
    files, report = run("search_qa", tmp_path, "--data-sources=hotpotqa,musique")
    first, second = files["train"]
    assert (first["data_source"], first["agent_name"], first["ability"]) == ("hotpotqa", "search_agent", "fact-reasoning")
    assert first["reward_model"] == {"style": "rule", "ground_truth": ["Ann", "Ann B."]}
    assert first["extra_info"] == {"split": "train", "index": 0} and first["id"] == "train_0" and first["golden_answers"]
    assert json.loads(first["metadata"]) == {"type": "bridge"} and second["data_source"] == "musique"  # two shapes: JSON text
    assert prompt_of(first).endswith("Question: who wrote it?\n") and prompt_of(first).count("<answer>") == 2
    assert [row["data_source"] for row in files["test"]] == ["hotpotqa", "musique"]
    assert report["splits"]["test"]["dropped"] == {"no usable key": 1}
    assert set(report["splits"]["test"]["source"]["sha256"]) == {"hotpotqa/dev.jsonl", "musique/test.jsonl"}
    with pytest.raises(SystemExit, match="nq has no train split"):
        run("search_qa", tmp_path, "--data-sources=nq")


FINQA = {
    "id": "a-1",
    "pre_text": ["before ."],
    "table": [["", "2019"], ["sales", "5"]],
    "post_text": ["after ."],
    "qa": {"question": "sales?", "answer": "", "exe_ans": 5.0},
}
LINKED = {
    "question_id": "q1",
    "question": "who?",
    "answer": "Ann",
    "table": {
        "header": [["Name", []], ["Club", []]],
        "data": [[["Ann", ["/wiki/Ann_B"]], ["FC", []]]],
        "intro": "A list.",
        "section_text": "Of players.",
    },
    "links": {"/wiki/Ann_B": "Ann B is a player."},
}
HIERTT = {
    "uid": "u1",
    "tables": ["<table>1</table>", [["a", "b"]]],
    "table_description": {"0-1-1": "a is b"},
    "paragraphs": [],
    "qa": {"question": "sum?", "answer": "3", "question_type": "arithmetic"},
}
WIKI = {"question": "which?", "answer": ["b", "d"], "table": {"header": ["x", "y"], "rows": [["a", "b"], ["c", "d"]]}}
TABLE_SETS = {
    "finqa": ("train.json", FINQA, "5.0", ["sales | 5", "before .", "after .", "sales?"]),
    "hybridqa": (
        "train_top_1.json",
        LINKED,
        "Ann",
        ["A list.", "Of players.", "Name | Club\nAnn | FC", "Ann_B: Ann B is a player."],
    ),
    "ottqa": ("train_top_1.json", {**LINKED, "table": [["Name"], ["Ann"]]}, "Ann", ["Name\nAnn", "who?"]),
    "multihiertt": (
        "processed_train.json",
        HIERTT,
        "3",
        ["Table 2:\na | b", "0-1-1: a is b", "There are no paragraphs.", "sum?"],
    ),
    "wikitq": ("train.jsonl", WIKI, "b|d", ["| x | y |\n| --- | --- |\n| a | b |", "which?"]),
}


@pytest.mark.parametrize("name", TABLE_SETS)
def test_table_sets(tmp_path, name):
    file, row, key, parts = TABLE_SETS[name]
    write(tmp_path / "source" / file, [row])
    files, _ = run(name, tmp_path, "--split=train")
    (made,) = files["train"]
    assert (made["data_source"], made["agent_name"]) == (name, "reasoning_agent_loop")
    assert made["ability"] == ("table-qa" if name == "wikitq" else "tableqa")
    assert made["reward_model"]["ground_truth"] == key and made["extra_info"]["split"] == "train"
    assert all(part in prompt_of(made) for part in parts), prompt_of(made)
    assert "`Answer:`" in prompt_of(made).rsplit("\n\n", 1)[1]
    write(tmp_path / "source" / file, [{**row, "table": 3, "tables": 3}])
    with pytest.raises(SystemExit, match="row 0: tables? must be a (table|list of tables).*, got the number 3"):
        run(name, tmp_path, "--split=train")


def test_the_test_file_is_cut_up_only_on_demand(tmp_path):
    rows = [{**WIKI, "question": f"question {i}?"} for i in range(1150)]
    write(tmp_path / "source" / "test.jsonl", rows)
    with pytest.raises(SystemExit, match="no train split"):
        run("wikitq", tmp_path)
    assert len(run("wikitq", tmp_path, "--split=test")[0]["test"]) == 1150
    files, report = run("wikitq", tmp_path, "--allow-test-as-train")
    assert [len(files[name]) for name in ("train", "test")] == [1000, 100]
    assert {prompt_of(row) for row in files["train"]}.isdisjoint(prompt_of(row) for row in files["test"])
    assert any("WARNING: cut out of the benchmark's own test file" in note for note in report["splits"]["train"]["notes"])


@pytest.mark.parametrize(("flag", "part"), [("--table-format=csv", "x,y\na,b"), ("--table-format=dataframe", "   x  y\n0  a  b")])
def test_table_formats_and_thinking(tmp_path, flag, part):
    write(tmp_path / "source" / "train.jsonl", [WIKI])
    prompt = prompt_of(run("wikitq", tmp_path, "--split=train", flag, "--think")[0]["train"][0])
    assert part in prompt and "<think>" in prompt and "<answer>" in prompt


def test_perturbed_tables_depend_on_the_seed_alone(tmp_path):
    table = {"header": list("abcdef"), "rows": [[f"{column}{row}" for column in "abcdef"] for row in range(8)]}
    write(tmp_path / "source" / "train.jsonl", [{**WIKI, "table": table}])
    shuffle = ("--split=train", "--perturbation=both_shuffle")
    one, again, other = (prompt_of(run("wikitq", tmp_path, *shuffle, f"--seed={seed}")[0]["train"][0]) for seed in (1, 1, 2))
    assert one == again != other and "may have been changed" in one
    assert sorted(cell for cell in one.replace("|", " ").split() if cell[0] in "abcdef" and cell[1:].isdigit()) == sorted(
        cell for cells in table["rows"] for cell in cells
    )


def test_prepared_agent_rows_keep_what_graders_need(tmp_path):
    row = {"data_source": "x", "prompt": [{"role": "user", "content": "?"}], "agent_name": "deep_analyze_agent_loop"}
    row["reward_model"] = {"style": "rule", "ground_truth": "a.csv", "gold_result": 1.0}
    write(tmp_path / "x.parquet", [row, {**row, "data_source": "dabstep", "reward_model": {"style": "rule", "ground_truth": ""}}])
    first, keyless = dataset.read(f"verl:{tmp_path / 'x.parquet'}")
    assert (
        first.extra["gold_result"] == 1.0
        and first.extra["agent_name"] == "deep_analyze_agent_loop"
        and "style" not in first.extra
    )
    assert keyless.ground_truth == ""


@pytest.mark.parametrize("name", TABLE_SETS)
@pytest.mark.parametrize("cell", [float("nan"), {"a": 1}, [["x"]], "cut \ud83d", True])
def test_no_cell_of_another_kind_reaches_a_prompt(tmp_path, name, cell):
    file, row, _, _ = TABLE_SETS[name]
    table = [["x", cell]]
    for column, value in {"question": cell, "answer": cell, "table": table, "tables": [table], "paragraphs": [cell]}.items():
        inner = "qa" in row and column in row["qa"]
        if inner or column in row:
            changed = {**row, "qa": {**row["qa"], column: value}} if inner else {**row, column: value}
            write(tmp_path / "source" / file, [row, changed])
            with pytest.raises(SystemExit, match=rf"row 1: (qa\.)?{column}(\[\d\])? must be .*, got"):
                run(name, tmp_path, "--split=train")
