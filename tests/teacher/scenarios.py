"""Golden cases of the teacher (`pools_*_teacher.json`) as test parameters."""

import json

import pytest

from tests.conftest import golden_files


def teacher_cases(scenario: str) -> list:
    """Cases of one scenario over all files of the pattern, or one skipped case that says what is absent."""
    cases = [
        pytest.param(case["args"], case["result"], id=f"{path.stem}-{i}")
        for path in golden_files("pools_*_teacher.json")
        for found in json.loads(path.read_text())["scenarios"]
        if found["name"] == scenario
        for i, case in enumerate(found["cases"])
    ]
    absent = pytest.mark.skip(reason="golden cases pools_*_teacher.json are absent: set DEEPGRPO_GOLDEN")
    return cases or [pytest.param(None, None, marks=absent, id="absent")]
