"""Damaged data files: every one is named in one list before anything is loaded; odd files that are whole are read."""

import decimal
import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from deepgrpo import config as config_lib
from deepgrpo.data.dataset import usable_rows
from deepgrpo.preflight import inputs as preflight
from deepgrpo.preflight import rules
from tests.conftest import ROOT

LINE = '{"problem": "1 + 1?", "answer": "2"}\n'
GSM8K = '{"question": "1 + 1?", "answer": "#### 2"}\n'


def cell(**columns) -> str:
    """A good row, and one with these columns instead."""
    return LINE + json.dumps({"problem": "1 + 1?", "answer": "2"} | columns) + "\n"


def verl(**columns) -> str:
    row = {"data_source": "MATH", "prompt": [{"role": "user", "content": "1 + 1?"}], "reward_model": {"ground_truth": "2"}}
    return json.dumps(row | columns) + "\n"


def parquet(names=(), **columns) -> bytes:
    table, sink = pyarrow.table(columns), pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table.rename_columns(names) if names else table, sink)
    return sink.getvalue().to_pybytes()


GOOD_PARQUET = parquet(problem=["1 + 1?"] * 99, answer=["2"] * 99)
QUESTION, KEY = (
    "row 1: problem must be text that is not empty, got ",
    "row 1: answer must be text, a finite number or a list of these, got ",
)
TRUTH = "row 0: reward_model.ground_truth must be "

DAMAGED = [  # file, content, what the list says of it
    ("math:null.jsonl", cell(problem=None), QUESTION + "null"),
    ("math:empty_text.jsonl", cell(problem=" \n\u200b"), QUESTION + "empty text"),
    ("math:list.jsonl", cell(problem=["a"]), QUESTION + "a list ['a']"),
    ("math:number.jsonl", cell(problem=5), QUESTION + "the number 5"),
    ("math:surrogate.jsonl", cell(problem="cut \ud83d"), QUESTION + r"text with a lone surrogate 'cut \ud83d'"),
    ("math:nul.jsonl", cell(problem="a\0b"), QUESTION + "text with a NUL character"),
    ("math:nan.jsonl", cell(answer=float("nan")), KEY + "the number nan"),
    ("math:infinite.jsonl", LINE + LINE.replace('"2"', "1e999"), KEY + "the number inf"),
    ("math:true.jsonl", cell(answer=True), KEY + "true"),
    ("math:object.jsonl", cell(answer={"value": 2}), KEY + "an object {'value': 2}"),
    ("math:nested.jsonl", cell(answer=[["2"], ["3"]]), KEY + "a list [['2'], ['3']]"),
    ("math:many.jsonl", cell(problem=None) * 9, "   row 9: problem must be"),
    ("math:more.jsonl", cell(problem=None) * 9, "and 4 more"),
    ("math:other.jsonl", GSM8K, "row 0 lacks problem; it has question, answer"),
    ("math:ragged.jsonl", LINE + '{"problem": "x"}\n', "row 1 lacks answer"),
    ("math:hidden.jsonl", '{"\\ufeffproblem": "x", "answer": "1"}', r"it has '\ufeffproblem', answer"),
    ("math:twice.jsonl", LINE + '{"problem": "x", "answer": "1", "answer": "2"}\n', "line 2 is not JSON ('answer' stands twice"),
    ("math:cut.jsonl", LINE + LINE[:20], "line 2 is not JSON"),
    ("math:scalar.jsonl", LINE + "7\n", "line 2 holds a int"),
    ("math:digits.jsonl", LINE.replace('"2"', "9" * 5000), "line 1 is not JSON (Exceeds the limit"),
    ("math:deep.jsonl", "[" * 100_000, "not JSON (it is nested too deeply)"),
    ("math:wrapped.json", json.dumps({"version": 1, "data": [{"a": 1}]}, indent=1), "is one JSON object, with version, data"),
    ("math:columns.json", json.dumps({"problem": {"0": "x"}, "answer": {"0": "1"}}), "row 0: problem must be text"),
    ("math:zero.jsonl", b"", "is empty (0 bytes)"),
    ("math:blank.jsonl", "\n\n", "has no rows"),
    ("math:keyless.jsonl", '{"problem": "x", "answer": null}\n', "none of its 1 rows has a usable answer"),
    ("math:pointer.jsonl", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "is a Git LFS pointer"),
    ("math:page.jsonl", "<!DOCTYPE html><html>404</html>", "is a web page"),
    ("math:zipped.jsonl", gzip.compress(LINE.encode()), "is compressed with gzip"),
    ("math:zipped.jsonl.gz", gzip.compress(LINE.encode()), "is compressed with gzip"),
    ("math:table.csv", "problem,answer\n1,2\n", "is of unknown type '.csv'"),
    ("math:utf16.jsonl", LINE.encode("utf-16"), "is UTF-16 text; expected UTF-8"),
    ("math:utf16le.jsonl", LINE.encode("utf-16-le"), "is UTF-16LE text"),
    ("math:latin.jsonl", LINE + LINE.replace("1 +", "Ren\u00e9") , "line 2: byte 0xe9 is not UTF-8; it looks like Latin-1"),
    ("math:misnamed.jsonl", GOOD_PARQUET, "holds parquet data"),
    ("math:cut.parquet", GOOD_PARQUET[:-40], "is not a readable parquet file"),
    ("math:text.parquet", LINE, "is not a readable parquet file"),
    ("math:twice.parquet", parquet(["problem", "problem"], a=["x"], b=["y"]), "has the column problem twice"),
    ("math:gaps.parquet", parquet(problem=["x", None], answer=["1", "2"]), QUESTION + "null"),
    ("math:floats.parquet", parquet(problem=["x", "y"], answer=[1.0, float("nan")]), KEY + "the number nan"),
    ("math:bytes.parquet", parquet(problem=["x", "y"], answer=[b"1", b"\xff"]), "row 0: answer must be text, a finite number"),
    ("math:folder.jsonl", None, "no data set in"),
    ("gsm8k:marks.jsonl", GSM8K + GSM8K.replace("#### 2", "two"), "row 1: answer must end in '#### NUMBER'"),
    ("gsm8k:comma.jsonl", GSM8K.replace("#### 2", "#### ,"), "row 0: answer must end in '#### NUMBER'"),
    ("gsm8k:long.jsonl", GSM8K.replace("#### 2", "#### " + "2" * 41), "row 0: answer must end in '#### NUMBER'"),
    ("gsm8k:nothing.jsonl", GSM8K + '{"question": "x", "answer": null}', "row 1: answer must be text that is not empty"),
    ("verl:text.jsonl", verl(prompt="1 + 1?"), "row 0: prompt must be a list that is not empty, got text '1 + 1?'"),
    ("verl:empty.jsonl", verl(prompt=[]), "row 0: prompt must be a list that is not empty"),
    ("verl:content.jsonl", verl(prompt=[{"role": "user", "content": None}]), "row 0: prompt[0].content must be text"),
    ("verl:spaces.jsonl", verl(prompt=[{"role": "user", "content": " "}]), "row 0: prompt, its user's message, must be"),
    ("verl:parts.jsonl", verl(prompt=[{"role": "user", "content": [{"type": "text"}]}]), "row 0: prompt[0].content must be text"),
    ("verl:reward.jsonl", verl(reward_model=None), "row 0: reward_model must be an object, got null"),
    ("verl:repr.jsonl", verl(reward_model="{'ground_truth': '2'}"), "row 0: reward_model must be an object, got text"),
    ("verl:key.jsonl", verl(reward_model={"ground_truth": {"a": 1}}), TRUTH + "text, a finite number or a list"),
    ("verl:words.jsonl", verl(data_source="openai/gsm8k", reward_model={"ground_truth": "two"}), TRUTH + "a number"),
    ("verl:source.jsonl", verl(data_source=["MATH"]), "row 0: data_source must be text that is not empty, got a list"),
    ("verl:extra.jsonl", verl(extra_info={"a": "\ud83d"}), "row 0: extra_info must be"),
    ("verl:unknown.jsonl", verl() + verl(data_source="hiyouga/geometry3k"), "row 1: no grader for data_source 'hiyouga"),
    ("verl:agent.jsonl", verl() + verl(agent_name="search_agent"), "row 1: agent_name 'search_agent' asks for a rollout"),
    ("verl:tools.jsonl", verl(extra_info={"tools_kwargs": {"t": {"a": 1}}}), "row 0: extra_info.tools_kwargs asks for"),
    ("verl:pictures.jsonl", verl(images=[{"path": "a.png"}]), "row 0: column images asks for"),
]  # fmt: skip


@pytest.fixture
def told(student, tmp_path, monkeypatch):
    """What the input check says of files of training: its list of problems, else its warnings."""

    def told(*specs: str, **overrides: str) -> str:
        monkeypatch.chdir(ROOT)
        flags = {"data.batch_size": "1", "optim.mini_batch_prompts": "1", "curriculum.pool": "none", "teacher.enabled": "false"}
        flags |= {"train.student_tokens": "0"}
        flags |= {"data.train": ",".join(f"{name.replace(':', f':{tmp_path}/')}" for name in specs), "curriculum.failures": "all"}
        flags |= {name.replace("__", "."): value for name, value in overrides.items()}
        line = [f"--config.{key}={value}" for key, value in flags.items()]
        config, _ = rules.from_command_line(["train", "--config=configs/carry_chain.py", *line])
        try:
            return "\n".join(preflight.check_inputs(config))
        except config_lib.ConfigError as error:
            return str(error)

    return told


def write(folder, spec: str, content) -> None:
    path = folder / spec.partition(":")[2]
    if content is None:
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content, encoding="latin-1" if "latin" in spec else "utf-8")


def test_every_damaged_file_is_in_one_list_that_names_row_and_column(told, tmp_path):
    for spec, content, _ in DAMAGED:
        write(tmp_path, spec, content)
    text = told(*(spec for spec, _, _ in DAMAGED), "math:absent.jsonl")
    assert text.startswith(f"run carry_chain cannot start: {len(DAMAGED) + 1} problems\n1. data: {tmp_path}/absent.jsonl")
    entries = text.split("\n")
    for spec, _, said in DAMAGED:
        path = str(tmp_path / spec.partition(":")[2])
        start = next(i for i, line in enumerate(entries) if "data: " in line and path in line and not line.startswith("   "))
        end = next(i for i in range(start, len(entries)) if entries[i].startswith("   -> "))
        assert said in "\n".join(entries[start:end]), (spec, entries[start : end + 1])
    assert "git lfs pull" in text and f"iconv -f UTF-16 -t UTF-8 {tmp_path}/utf16.jsonl" in text
    assert "--config.rewards.graders='hiyouga/geometry3k=deepgrpo.rewards.math:grade_declared'" in text


GOOD = [
    ("math:bom.jsonl", "\ufeff" + LINE + "\ufeff" + LINE, [["2"], ["2"]]),
    ("math:windows.jsonl", LINE.replace("\n", "\r\n") * 2, [["2"], ["2"]]),
    ("math:list.jsonl", f"[{LINE},{LINE}]", [["2"], ["2"]]),
    ("math:separator.jsonl", cell(problem="a\u2028b \x85 \U0001f600"), [["2"], ["2"]]),
    ("math:gaps.jsonl", cell(answer=None) + cell(answer="") + cell(answer="nan"), [["2"], None] * 3),
    ("math:keys.jsonl", cell(answer=["1", 2.5]) + cell(answer=10**300), [["2"], ["1", "2.5"], ["2"], [str(10**300)]]),
    ("math:decimal.parquet", parquet(problem=["x"], answer=[decimal.Decimal("2.50")]), [["2.50"]]),
    ("math:encoded.parquet", parquet(problem=pyarrow.array(["x"]).dictionary_encode(), answer=[["2"]]), [["2"]]),
    ("gsm8k:final.jsonl", GSM8K + GSM8K.replace("#### 2", "#### -1,234.5 "), ["2", "-1234.5"]),
    ("verl:text.jsonl", verl(**{name: json.dumps(value) for name, value in json.loads(verl(extra_info={"index": 1})).items()
                                if name != "data_source"}), ["2"]),
    ("verl:others.jsonl", verl(data_source="lighteval/MATH") + verl(data_source="openai/gsm8k") + verl(data_source="aime2025"),
     ["2", "2", "2"]),
    ("verl:loops.jsonl", verl(agent_name="single_turn_agent", extra_info={"need_tools_kwargs": False, "score": float("nan")},
                              images=[]), ["2"]),
    ("verl:search.jsonl", verl(data_source="searchR1_hotpotqa", reward_model={"ground_truth": {"target": ["Rome"]}}), [["Rome"]]),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "content", "keys"), GOOD, ids=[spec for spec, _, _ in GOOD])
def test_odd_files_that_are_whole_are_read(told, tmp_path, spec, content, keys):
    write(tmp_path, spec, content)
    assert "data:" not in told(spec, data__template="chat")  # that the demo's student lacks a token for an x is another matter
    assert [row.ground_truth for row in usable_rows(spec.replace(":", f":{tmp_path}/"), "chat")] == keys


def test_what_sets_do_not_allow_is_said_with_the_names_that_exist(told, tmp_path):
    (tmp_path / "a.jsonl").write_text(LINE * 20)
    text = told("math:a.jsonl", data__batch_size="21", optim__mini_batch_prompts="21")
    assert "data.batch_size=21 can't be drawn from 20 training problems" in text
    text = told("math:a.jsonl", data__batch_size="10", train__epochs="3", optim__warmup_steps="6", optim__mini_batch_prompts="1")
    assert "optim.warmup_steps=6, but the run has at most 6 steps" in text
    text = told("math:a.jsonl", optim__warmup_steps="9", train__student_tokens="50")
    assert "optim.warmup_steps=9 may take all of train.student_tokens=50" in text and "cannot start" not in text
    for metric in (
        "val-core/carry_chain/reward/mean@2",
        "val-core/MATH/reward/mean@1",
        "val-aux/carry_chain/response_length/mean",
    ):
        text = told("math:a.jsonl", checkpoint__best_metric=metric)
        assert f"best_metric={metric} is no score of data.validation" in text and "val-core/carry_chain/reward/mean@1" in text
    assert told("math:a.jsonl", checkpoint__best_metric="val-core/carry_chain/reward/mean@1") == ""
    (tmp_path / "v.jsonl").write_text(verl())
    assert "set it to chat: --config.data.template=chat" in told("verl:v.jsonl", data__template="math_boxed")
