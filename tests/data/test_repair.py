"""Keys in one form, and corrections that are held against the data before they are believed."""

import json

import pytest

from deepgrpo.data import repair

ROWS = [{"problem": f"question {i}", "answer": str(i)} for i in range(4)] + [{"problem": "box \\boxed{1}", "answer": "None"}]


@pytest.mark.parametrize(
    ("stored", "clean", "kept"),
    [
        ("025", ["025"], ["025"]),
        (142.0, ["142.0"], ["142.0"]),
        (7, ["7"], ["7"]),
        (["9.6\n"], ["9.6"], ["9.6\n"]),
        (["$\\frac{1}{2 n+2}$"], ["\\frac{1}{2 n+2}"], ["$\\frac{1}{2 n+2}$"]),
        (["$69$,$84$"], ["69,84"], ["$69$,$84$"]),
        (["$(-1, 0) \\cup\\{1\\}$."], ["(-1, 0) \\cup\\{1\\}"], ["$(-1, 0) \\cup\\{1\\}$."]),
        ("\\$18.90", ["\\$18.90"], ["\\$18.90"]),
        (["7.5 \\times 10^7", "7.5 \\times 10^7\n"], ["7.5 \\times 10^7"], ["7.5 \\times 10^7", "7.5 \\times 10^7\n"]),
        ("", None, None),
        (" None ", None, None),
        (None, None, None),
        ([], None, None),
        (["1", ""], None, None),
        (["$$"], None, ["$$"]),
    ],
)
def test_keys(stored, clean, kept):
    assert repair.keys(stored) == clean and repair.keys(stored, clean=False) == kept


def test_unbalanced_keys_are_noticed():
    assert repair.unbalanced("$221,$8$") and repair.unbalanced("\\frac{1}{2") and not repair.unbalanced("\\$5 is $x_{1}$")


def test_kinds_of_keys():
    keys = {
        "142.0": "number",
        "2n-2": "expression",
        "\\text{Evelyn}": "words",
        "1,2": "items",
        "(3, \\frac{\\pi}{2})": "brackets",
    }
    assert {key: repair.kind(key) for key in keys} == keys and repair.kind("\\oint \\clubsuit") == "other notation"


def test_duplicates_fold_white_space():
    assert repair.duplicates(["a b", "c", " a\n b ", "a b"]) == {2: 0, 3: 0}


@pytest.fixture
def corrections(tmp_path):
    content = {
        "file": "train.jsonl",
        "answer_fixes": [{"row": 4, "stored": "None", "correct": "9", "why": "lost"}],
        "duplicate_problem_rows": [[0, 1]],
        "statement_contains_boxed": [4, 2],
        "normaliser_traps": [{"row": 3, "stored": "4"}],
    }
    (tmp_path / "set_known_issues.json").write_text(json.dumps(content))
    return repair.corrections_beside(tmp_path / "train.jsonl")


@pytest.mark.parametrize("stored", ["None", None])
def test_corrections_are_put_in_once(corrections, stored):
    rows = [*ROWS[:4], {**ROWS[4], "answer": stored}]
    fixed, (change,) = repair.correct(rows, corrections)
    assert fixed[4]["answer"] == "9" and fixed[:4] == rows[:4] and rows[4]["answer"] == stored
    assert (change.row, change.before, change.after, change.why) == (4, stored, "9", "lost")
    assert repair.correct(fixed, corrections) == (fixed, [])
    assert repair.summary([change, change]) == {"answer corrected": 2}


def test_corrections_of_other_data_are_refused(corrections, tmp_path):
    with pytest.raises(ValueError, match=r"row 4 should hold 'None' and holds '3'.*--fixes=none.*train.jsonl"):
        repair.correct([*ROWS[:4], ROWS[3]], corrections)
    with pytest.raises(ValueError, match="names row 4, the data has rows 0 to 2"):
        repair.correct(ROWS[:3], corrections)
    assert repair.corrections_beside(tmp_path / "other.jsonl") is None
    (tmp_path / "set_known_issues.json").write_text('{"file": "train.jsonl", "answer_fixes": {"a": 1}}')
    with pytest.raises(ValueError, match="is not such a file.*a list of {row, stored, correct, why}"):
        repair.corrections_beside(tmp_path / "train.jsonl")
    with pytest.raises(FileNotFoundError, match="nowhere.json does not exist"):
        repair.read_corrections(tmp_path / "nowhere.json")


def test_what_the_data_does_not_bear_out_is_said(corrections):
    notes = repair.mismatches(ROWS, corrections)
    assert len(notes) == 3
    assert "rows 0, 1 the same problem, they are not" in notes[0] and "row 2 contains a box" in notes[1] and "row 3" in notes[2]
