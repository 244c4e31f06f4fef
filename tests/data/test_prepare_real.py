"""The published files, prepared whole: official numbers of rows, and no key left unusable."""

import pytest

from deepgrpo.data import dataset
from tests.data.test_prepare import run


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("gsm8k", (7473, 1319)),
        ("math", (8523, 500)),
        *(
            (name, (rows,))
            for name, rows in (("math500", 500), ("aime24", 30), ("amc", 83), ("minerva", 272), ("olympiad_bench", 675))
        ),
    ],
)
def test_real_sets_are_complete(data_folder, tmp_path, name, counts):
    report = run(name, tmp_path, "--source", data_folder)
    assert tuple(split["rows"] for split in report["splits"].values()) == counts
    assert not [note for split in report["splits"].values() for note in split["notes"] if "official number" in note]
    for split in report["splits"].values():
        assert sum(row.ground_truth is None for row in dataset.read(f"verl:{tmp_path / split['file']}")) == 0
    if name == "math":
        assert report["splits"]["train"]["repaired"] == {"answer corrected": 4}
