"""Golden cases of the teacher (`pools_*_teacher*.json`) as test parameters."""

import json

import pytest

from tests.conftest import golden_files

MARKS = {  # kind: what its cases' arguments or results have and no other kind's; a scenario may have any name
    "suffix_alignment": "teacher_ids",
    "append_eos": "mask",
    "parse_solution_reply": "solution",
    "parse_index_reply": "index",
    "client_retry": "temperature_schedule",
    "worker_modes": "worker_step",
}


def teacher_cases(kind: str) -> list:
    """Cases of one kind over all files of the pattern, or one skipped case if there is no file."""
    files = golden_files("pools_*_teacher*.json")
    cases = [
        pytest.param(case["args"], case["result"], id=f"{path.stem}-{found['name']}-{i}")
        for path in files
        for found in json.loads(path.read_text())["scenarios"]
        for i, case in enumerate(found["cases"])
        if MARKS[kind] in {*case["args"], *(case["result"] or ())}
    ]
    assert cases or not files, f"no case of the kind {kind} in {files}"
    absent = pytest.mark.skip(reason="golden cases pools_*_teacher*.json are absent: set DEEPGRPO_GOLDEN")
    return cases or [pytest.param(None, None, marks=absent, id="absent")]
