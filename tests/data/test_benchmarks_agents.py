"""Converters of the data-analysis and code benchmarks."""

import json

import pytest

from tests.data.test_benchmarks import prompt_of, run, write

USER = [{"role": "user", "content": "Look."}]


def test_deep_analyze(tmp_path):
    spec = {"ground_truth": "4", "response": "It is 4."}
    row = {"data_source": "datatask", "prompt": USER, "workspace_id": "w1", "input_seq": "sum?", "reward_spec": spec}
    write(tmp_path / "source" / "RL" / "datatask.parquet", [row, {**row, "reward_spec": {**spec, "ground_truth": " "}}])
    write(tmp_path / "source" / "RL" / "qa.parquet", [{**row, "data_source": "reasoning-table"}])
    write(tmp_path / "source" / "RL" / "reseach.parquet", [{**row, "data_source": "research"}])
    files, report = run("deep_analyze", tmp_path, "--workspace=/data")
    ((task,), (qa,), (research,)) = (files[name] for name in ("data_task", "qa_task", "research_task"))
    assert task["extra_info"]["workspace"] == "/data/files/w1" and task["agent_name"] == "deep_analyze_agent_loop"
    assert task["extra_info"]["instruction"] == "sum?" and task["extra_info"]["answer"] == "It is 4."
    assert (qa["agent_name"], qa["ability"], qa["prompt"]) == ("reasoning_agent_loop", "reasoning-table", USER)
    assert research["extra_info"]["workspace"] == "/data/bird/w1" and prompt_of(research).startswith(
        "Look. Write the final report"
    )
    assert report["splits"]["data_task"]["dropped"] == {"no usable key": 1}


def test_dabench(tmp_path):
    question = {
        "id": 7,
        "question": "mean?",
        "concepts": ["c"],
        "constraints": "none",
        "format": "@mean[x]",
        "file_name": "t.csv",
    }
    write(tmp_path / "source" / "da-dev-questions.jsonl", [{**question, "level": "easy"}])
    write(tmp_path / "source" / "da-dev-labels.jsonl", [{"id": 7, "common_answers": [["mean", 3.5]]}])
    (row,) = run("dabench", tmp_path)[0]["val"]
    assert row["reward_model"]["ground_truth"] == [["mean", "3.5"]] == row["extra_info"]["label"]
    assert (
        row["extra_info"]["index"] == 7 and row["extra_info"]["init_files"] == ["t.csv"] and row["extra_info"]["split"] == "val"
    )
    assert row["extra_info"]["workspace"].endswith("da-dev-tables")
    assert prompt_of(row) == "Question: mean?\nConstraints: none\nAnswer format: @mean[x]\nFile name: t.csv"
    write(tmp_path / "source" / "da-dev-labels.jsonl", [{"id": 8, "common_answers": [["x", 1]]}])
    with pytest.raises(SystemExit, match="the ids of .* are not the same"):
        run("dabench", tmp_path)


def test_dabstep_and_its_research_questions(tmp_path):
    from deepgrpo.data.benchmarks_agents import CONTEXT_FILES

    write(tmp_path / "source" / "tasks.jsonl", [{"task_id": 5, "question": "fee?", "guidelines": "a number", "answer": ""}])
    research = {"id": 3, "question": "Why?", "type": "open", "checklist": "- a reason"}
    write(tmp_path / "source" / "dabstep_research.jsonl", [research])
    with pytest.raises(SystemExit, match="lacks acquirer_countries.csv"):
        run("dabstep", tmp_path)
    context = tmp_path / "files"
    context.mkdir()
    for name in CONTEXT_FILES:
        (context / name).write_text("x" * 2048)
    (row,) = run("dabstep", tmp_path, f"--context-dir={context}")[0]["test"]
    assert row["reward_model"]["ground_truth"] == "" and row["extra_info"]["workspace"] == "/tmp/dabstep/5"
    assert all(str(context / name) in prompt_of(row) for name in CONTEXT_FILES) and "Guidelines: a number" in prompt_of(row)
    (tmp_path / "out" / "report.json").unlink()
    (row,) = run("dabstep_research", tmp_path, f"--context-dir={context}")[0]["test"]
    assert row["reward_model"]["ground_truth"] == "- a reason" and row["extra_info"]["type"] == "open"
    assert prompt_of(row).count('"size": "2.0KB"') == 7


def test_ds1000(tmp_path):
    row = {"prompt": "Do it.\n<code>\nimport x\n</code>", "metadata": {"library": "Numpy", "problem_id": 4}}
    row |= {"reference_code": "y = 1", "code_context": "def test_execution(s): pass"}
    write(
        tmp_path / "source" / "ds1000.jsonl",
        [*({**row, "prompt": f"{i} {row['prompt']}"} for i in range(19)), {**row, "reference_code": " "}],
    )
    files, report = run("ds1000", tmp_path)
    assert len(files["full"]) == 19 and report["splits"]["full"]["dropped"] == {"no reference code": 1}
    first = files["full"][0]
    assert prompt_of(first).startswith("0 Do it.\n```python\nimport x\n```") and "<code>" not in prompt_of(first)
    assert first["extra_info"]["code_context"] == row["code_context"] and first["extra_info"]["library"] == "Numpy"
    assert (first["ability"], first["agent_name"]) == ("code", "reasoning_agent_loop")
    files, _ = run("ds1000", tmp_path, "--allow-test-as-train")
    assert [len(files[name]) for name in ("full", "train", "test")] == [19, 17, 2]


def test_dsbench_modeling_reads_literals_and_never_runs_them(tmp_path):
    source = tmp_path / "source"
    for path, text in {
        "data.json": "{'name': 'titanic', 'url': \"it's\"}\n",
        "data/task/titanic.txt": "Who survived?",
        "save_performance/baseline/titanic/result.txt": "0.5\n",
        "save_performance/GT/titanic/result.txt": "0.9",
    }.items():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_text(text)
    (row,) = run("dsbench_data_modeling", tmp_path)[0]["data_modeling"]
    reward = row["reward_model"]
    assert (reward["baseline_result"], reward["gold_result"], reward["expected_file"]) == (0.5, 0.9, "submission.csv")
    assert reward["ground_truth"].endswith("data/answers/titanic/test_answer.csv")
    assert row["extra_info"]["evaluation_script"].endswith("evaluation/titanic_eval.py") and "submission.csv" in prompt_of(row)
    (source / "data.json").write_text("__import__('os').system('touch ran')\n")
    with pytest.raises(SystemExit, match="line 1 is neither JSON nor a Python literal"):
        run("dsbench_data_modeling", tmp_path)


def test_dsbench_analysis_says_what_to_install(tmp_path, monkeypatch):
    folder = tmp_path / "source" / "data" / "1"
    folder.mkdir(parents=True)
    (tmp_path / "source" / "data.json").write_text(json.dumps({"id": 1, "questions": ["question1"], "answers": [["A", 2]]}))
    for name in ("introduction", "question1"):
        (folder / f"{name}.txt").write_text(name)
    monkeypatch.setitem(__import__("sys").modules, "openpyxl", None)
    with pytest.raises(SystemExit, match="pip install openpyxl tiktoken"):
        run("dsbench_data_analysis", tmp_path)
    monkeypatch.setattr("deepgrpo.data.benchmarks_agents.workbook_text", lambda folder: "cells")
    (row,) = run("dsbench_data_analysis", tmp_path)[0]["data_analysis"]
    assert row["reward_model"]["ground_truth"] == '["A", 2]' and row["ability"] == row["data_source"] == "DSBench_data_analysis"
    assert prompt_of(row) == "The workbook of this task contains:\ncells\n\nIntroduction:\nintroduction\n\nQuestion:\nquestion1"
