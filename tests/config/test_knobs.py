"""The table in docs/knobs.md, the warnings and the schema say the same."""

import pathlib
import re

from deepgrpo.config import command_line, knobs

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_table_warnings_and_schema_agree():
    table = dict(re.findall(r"^\| `([A-Z0-9_]+)` \| `([a-z_.]+)` \|", (ROOT / "docs" / "knobs.md").read_text(), re.M))
    assert table == knobs.KEYS
    keys = command_line.flatten(command_line.load(command_line.SCHEMA, None))
    assert not set(knobs.KEYS.values()) - keys.keys()


def test_every_key_that_the_page_names_exists():
    keys = command_line.flatten(command_line.load(command_line.SCHEMA, None))
    sections = {key.partition(".")[0] for key in keys if "." in key}
    column = re.findall(r"^\| [^|]+ \| ([^|]+) \|", (ROOT / "docs" / "knobs.md").read_text().partition("## Keys of")[0], re.M)
    named = {key for cell in column for key in re.findall(r"`(\w+(?:\.\w+)+)", cell) if key.partition(".")[0] in sections}
    assert named and not named - keys.keys()


def test_warnings():
    assert knobs.warnings({"PATH": "/bin", "OPENAI_API_KEY": "x"}) == []
    (line,) = knobs.warnings({"ROLLOUT_N": "8"})
    assert "ROLLOUT_N=8" in line and "--config.rollout.n=" in line
