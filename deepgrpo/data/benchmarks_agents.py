"""Data-analysis agents and code: DeepAnalyze's own data, DABench, DABstep (and its research questions), DS-1000, DSBench.

All but DeepAnalyze's are benchmarks without a training part: what is made here is for evaluation.
"""

import ast
import json
import math
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from deepgrpo.data import tables
from deepgrpo.data.benchmarks import DEEP_ANALYZE, REASONING, Benchmark, Context, Converted, Options, drop, example
from deepgrpo.data.cells import LINE, PLAIN, SCALAR, TEXT, Maybe, Schema
from deepgrpo.data.tables import Found, Row, Split

CONTEXT_TYPES = (".csv", ".xlsx", ".sqlite", ".md", ".json")
CONTEXT_FILES = (  # of DABstep
    "acquirer_countries.csv",
    "fees.json",
    "manual.md",
    "merchant_category_codes.csv",
    "merchant_data.json",
    "payments-readme.md",
    "payments.csv",
)
DABENCH = {"id": SCALAR, "question": TEXT, "constraints": LINE, "format": LINE, "file_name": TEXT}
SPEC = Maybe({"ground_truth": Maybe(PLAIN), "response": Maybe(LINE)})
WORKBOOK_TOKENS = 28_768  # of the GPT-4 tokenizer: the end of a workbook's text that is kept


#### DeepAnalyze's training data

REPORT = " Write the final report between the answer tags, and make it as detailed as possible."
WORKSPACES = {"datatask": "files", "research": "bird"}


def deep_analyze(rows: Sequence[Row], context: Context) -> Converted:
    """prompt (messages), data_source, workspace_id, input_seq, reward_spec{ground_truth, response}."""
    done = Converted()
    for index, row in enumerate(rows):
        source, spec = row["data_source"], row.get("reward_spec") or {}
        key = spec.get("ground_truth")
        if key is None or not str(key).strip():
            drop(done, context, "no usable key", index, key)
            continue
        messages = [{"role": message["role"], "content": message["content"]} for message in row["prompt"]]
        if source == "research":
            messages[0]["content"] += REPORT
        extra = {
            "split": context.split,
            "index": index,
            "instruction": row["input_seq"],
            "answer": spec.get("response"),
            "workspace": _workspace(context, WORKSPACES.get(source, ""), row.get("workspace_id")),
        }
        agent = DEEP_ANALYZE if source in WORKSPACES else REASONING
        done.add(str(row["input_seq"]), example(source, messages, source, key, extra, agent))
    return done


def _workspace(context: Context, folder: str, name: Any) -> str:
    root = context.options.workspace or str(context.path.parent.resolve())
    return "/".join(part for part in (root, folder, str(name or "")) if part) if folder else ""


#### DABench


def read_dabench(place: pathlib.Path, split: str, options: Options) -> Found:
    """Questions and labels, whose ids must be the same in the same order."""
    paths = [place / "da-dev-questions.jsonl", place / "da-dev-labels.jsonl"]
    questions = tables.read(str(paths[0]), DABENCH)
    labels = tables.read(str(paths[1]), {"id": SCALAR, "common_answers": [[SCALAR]]})
    if [row["id"] for row in questions] != [row["id"] for row in labels]:
        raise ValueError(f"source: the ids of {paths[0]} and {paths[1]} are not the same; take both from one version")
    rows = [{**question, "label": label["common_answers"]} for question, label in zip(questions, labels, strict=True)]
    return Found(rows, place, {path.name: tables.sha256(path) for path in paths})


def dabench(rows: Sequence[Row], context: Context) -> Converted:
    done = Converted()
    workspace = context.options.workspace or str((context.path / "da-dev-tables").resolve())
    for row in rows:
        prompt = (
            f"Question: {row['question']}\nConstraints: {row['constraints']}\nAnswer format: {row['format']}\n"
            f"File name: {row['file_name']}"
        )
        key = [[str(name), str(value)] for name, value in row["label"]]
        extra = {
            "split": "val",
            "index": row["id"],
            "question": row["question"],
            "concepts": row.get("concepts"),
            "constraints": row["constraints"],
            "format": row["format"],
            "init_files": [row["file_name"]],
            "level": row.get("level"),
            "label": key,
            "workspace": workspace,
        }
        done.add(row["question"], example("DABench", prompt, "data_analysis", key, extra, DEEP_ANALYZE))
    return done


#### DABstep


def _context_files(context: Context, names: Sequence[str] = ()) -> list[pathlib.Path]:
    folder = pathlib.Path(context.options.context_dir or context.path.parent / "context")
    there = sorted(path for path in folder.iterdir() if path.suffix in CONTEXT_TYPES) if folder.is_dir() else []
    if absent := [name for name in names if name not in {path.name for path in there}] or (
        ["any data file"] if not there else []
    ):
        raise FileNotFoundError(
            f"--context-dir: {folder} lacks {', '.join(absent)}; they are in data/context of adyen/DABstep on the hub"
        )
    return there


def dabstep(rows: Sequence[Row], context: Context) -> Converted:
    """task_id, question, guidelines. The answers are not public: the key is empty, and the leaderboard scores the responses."""
    files = "\n".join(f"- {path.resolve()}" for path in _context_files(context, CONTEXT_FILES))
    done = Converted()
    for index, row in enumerate(rows):
        prompt = (
            "You are an expert data analyst. Answer the question below with the files of this list:\n"
            f"{files}\n\nRead the documentation first: it defines the terms and rules that the question uses."
            f"\n\nQuestion: {row['question']}\n\nGuidelines: {row['guidelines']}"
        )
        extra = {"split": context.split, "index": index, "instruction": row["question"], "task_id": str(row["task_id"])}
        extra["workspace"] = f"{context.options.workspace or '/tmp/dabstep'}/{row['task_id']}"
        done.add(row["question"], example("dabstep", prompt, "data_analysis", "", extra, DEEP_ANALYZE))
    return done


def dabstep_research(rows: Sequence[Row], context: Context) -> Converted:
    """id, question, type, checklist (the key)."""
    blocks = [
        json.dumps({"name": path.name, "size": f"{path.stat().st_size / 1024:.1f}KB"}, indent=1)
        for path in _context_files(context)
    ]
    done = Converted()
    for index, row in enumerate(rows):
        prompt = f"# Instruction\n{row['question']}\n\n# Data\n" + "\n".join(blocks)
        extra = {"split": context.split, "index": index, "instruction": row["question"], "task_id": str(row["id"])}
        extra |= {"type": row["type"], "workspace": f"{context.options.workspace or '/tmp/dabstep_research'}/{row['id']}"}
        done.add(row["question"], example("dabstep_research", prompt, "data_analysis", row["checklist"], extra, DEEP_ANALYZE))
    return done


#### DS-1000

NOTE = (
    "\n\nNote: give a short completion only. Do not repeat the code that is given above. End your response with the code as an "
    "answer in one fence:\n```python\n# your code\n```"
)


def ds1000(rows: Sequence[Row], context: Context) -> Converted:
    """prompt, metadata{library, problem_id}, reference_code, code_context."""
    done = Converted()
    for index, row in enumerate(rows):
        if not (row.get("reference_code") or "").strip():
            drop(done, context, "no reference code", index, row.get("reference_code"))
            continue
        prompt = re.sub(r"<code>\n?", "```python\n", row["prompt"]).replace("</code>", "```") + NOTE
        about = row.get("metadata") or {}
        extra = {
            "split": context.split,
            "index": index,
            "library": about.get("library"),
            "problem_id": about.get("problem_id", index),
            "code_context": row["code_context"],
        }
        done.add(row["prompt"], example("ds1000", prompt, "code", row["reference_code"], extra, REASONING))
    return done


def _tenth(count: int, seed: int) -> dict[str, list[int]]:
    """90 % for training and 10 % for testing, as Hugging Face's train_test_split(test_size=0.1, seed=seed) parts them."""
    order = np.random.default_rng(seed).permutation(count).tolist()
    test = math.ceil(count * 0.1)
    return {"full": list(range(count)), "train": order[test:], "test": order[:test]}


#### DSBench


def _index(path: pathlib.Path) -> list[Row]:
    """Lines of JSON or of Python literals, which are parsed and never run."""
    if not path.is_file():
        raise FileNotFoundError(f"source: {path} does not exist; expected the folder of DSBench that holds data.json")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                rows.append(json.loads(line) if line.lstrip().startswith('{"') else ast.literal_eval(line))
            except (ValueError, SyntaxError) as error:
                raise ValueError(f"source: {path}, line {number} is neither JSON nor a Python literal ({error})") from error
    return rows


def read_dsbench_analysis(place: pathlib.Path, split: str, options: Options) -> Found:
    """One row a question of each challenge, with its folder: data.json, data/<id>/{introduction.txt, <question>.txt, *.xlsx}."""
    rows = []
    for challenge in _index(place / "data.json"):
        folder = place / "data" / str(challenge["id"])
        workbook = None
        for name, answer in zip(challenge["questions"], challenge["answers"], strict=True):
            workbook = workbook_text(folder) if workbook is None else workbook
            rows.append(
                {
                    "introduction": (folder / "introduction.txt").read_text(encoding="utf-8"),
                    "question": (folder / f"{name}.txt").read_text(encoding="utf-8"),
                    "answer": answer,
                    "workbook": workbook,
                    "folder": str(folder.resolve()),
                }
            )
    return Found(rows, place, {"data.json": tables.sha256(place / "data.json")})


def workbook_text(folder: pathlib.Path, limit: int = WORKBOOK_TOKENS) -> str:
    """All sheets of all workbooks of a folder but those named after the answer, cut to the last `limit` GPT-4 tokens."""
    paths = [path for path in sorted(folder.glob("*.xls*")) if "answer" not in path.name.lower()]
    try:
        import openpyxl
        import tiktoken
    except ImportError as error:
        raise ImportError(
            f"dsbench_data_analysis needs {error.name}, which is not installed: pip install openpyxl tiktoken"
        ) from error
    parts = []
    for path in paths:
        for sheet in openpyxl.load_workbook(path, read_only=True, data_only=True):
            cells = ("\t".join("" if cell is None else str(cell) for cell in row) for row in sheet.iter_rows(values_only=True))
            parts.append(f"Workbook {path.name}, sheet {sheet.title}:\n" + "\n".join(cells))
    encoding = tiktoken.encoding_for_model("gpt-4")
    return encoding.decode(encoding.encode("\n\n".join(parts), disallowed_special=())[-limit:])


def dsbench_analysis(rows: Sequence[Row], context: Context) -> Converted:
    done = Converted()
    for index, row in enumerate(rows):
        answer = row["answer"]
        key = json.dumps(answer, ensure_ascii=False) if isinstance(answer, list | dict) else str(answer)
        prompt = (
            f"The workbook of this task contains:\n{row['workbook']}\n\nIntroduction:\n{row['introduction']}\n\n"
            f"Question:\n{row['question']}"
        )
        extra = {"split": context.split, "index": index, "question": row["question"], "instruction": prompt}
        extra["workspace"] = row["folder"]
        name = "DSBench_data_analysis"
        done.add(row["introduction"] + "\n" + row["question"], example(name, prompt, name, key, extra, DEEP_ANALYZE))
    return done


def read_dsbench_modeling(place: pathlib.Path, split: str, options: Options) -> Found:
    """One row a task: data.json, data/task/<name>.txt, data/answers/<name>/test_answer.csv, data/data_resplit/<name>,
    evaluation/<name>_eval.py, save_performance/{baseline,GT}/<name>/result.txt."""
    rows = []
    for task in _index(place / "data.json"):
        name = task["name"]
        results = {kind: place / "save_performance" / kind / name / "result.txt" for kind in ("baseline", "GT")}
        rows.append(
            {
                "description": (place / "data" / "task" / f"{name}.txt").read_text(encoding="utf-8"),
                "answer": str((place / "data" / "answers" / name / "test_answer.csv").resolve()),
                "script": str((place / "evaluation" / f"{name}_eval.py").resolve()),
                "folder": str((place / "data" / "data_resplit" / name).resolve()),
                "baseline": float(results["baseline"].read_text()),
                "gold": float(results["GT"].read_text()),
            }
        )
    return Found(rows, place, {"data.json": tables.sha256(place / "data.json")})


def dsbench_modeling(rows: Sequence[Row], context: Context) -> Converted:
    done = Converted()
    for index, row in enumerate(rows):
        prompt = (
            f"{row['description']}\n\nSave your predictions for the test file as submission.csv.\n"
            "IMPORTANT: the file submission.csv is mandatory; without it the task has failed.\n"
            "IMPORTANT: make the score of your predictions as good as you can."
        )
        extra = {"split": context.split, "index": index, "evaluation_script": row["script"], "instruction": prompt}
        extra["workspace"] = row["folder"]
        name = "DSBench_data_modeling"
        reward = {"expected_file": "submission.csv", "baseline_result": row["baseline"], "gold_result": row["gold"]}
        done.add(row["description"], example(name, prompt, name, row["answer"], extra, DEEP_ANALYZE, **reward))
    return done


def _evaluation(
    about: str, output: str, names: Sequence[str], convert: Callable[..., Converted], columns: Mapping[str, Schema], **more: Any
) -> Benchmark:
    rows = more.pop("rows", 0)
    return Benchmark(about, {output: Split(tuple(names), rows)}, convert, columns, **more)


_RL: Mapping[str, Split] = {
    "data_task": Split(("RL/datatask.parquet", "datatask.parquet"), train=True),
    "qa_task": Split(("RL/qa.parquet", "qa.parquet"), train=True),
    "research_task": Split(("RL/reseach.parquet", "reseach.parquet", "RL/research.parquet", "research.parquet"), train=True),
}
BENCHMARKS: dict[str, Benchmark] = {
    "deep_analyze": Benchmark(
        "DeepAnalyze's reinforcement-learning data",
        _RL,
        deep_analyze,
        {"prompt": [{"role": TEXT, "content": TEXT}], "data_source": TEXT, "input_seq": TEXT, "reward_spec": SPEC},
        "RUC-DataLab/DataScience-Instruct-500K",
    ),
    "dabench": _evaluation("InfiAgent's data analysis questions", "val", ["."], dabench, {}, read=read_dabench),
    "dabstep": _evaluation(
        "DABstep (--context-dir)",
        "test",
        ["tasks.jsonl", "data/tasks/all.jsonl", "test.jsonl", "*default-*.parquet"],
        dabstep,
        {"task_id": SCALAR, "question": TEXT, "guidelines": LINE},
        hub="adyen/DABstep",
    ),
    "dabstep_research": _evaluation(
        "DABstep's research questions (--context-dir)",
        "test",
        ["dabstep_research.jsonl", "test.jsonl"],
        dabstep_research,
        {"id": SCALAR, "question": TEXT, "type": SCALAR, "checklist": PLAIN},
    ),
    "ds1000": _evaluation(
        "DS-1000, code completion",
        "full",
        ["ds1000.jsonl", "test.jsonl", "*test-*.parquet", "data/test-*.parquet"],
        ds1000,
        {"prompt": TEXT, "metadata": Maybe({}), "reference_code": Maybe(LINE), "code_context": LINE},
        hub="xlangai/DS-1000",
        cut=_tenth,
    ),
    "dsbench_data_analysis": _evaluation(
        "DSBench, questions about workbooks", "data_analysis", ["."], dsbench_analysis, {}, read=read_dsbench_analysis, rows=466
    ),
    "dsbench_data_modeling": _evaluation(
        "DSBench, predictions", "data_modeling", ["."], dsbench_modeling, {}, read=read_dsbench_modeling, rows=74
    ),
}
