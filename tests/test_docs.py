"""What the documentation names exists: keys, files, programs and their flags; its commands are accepted as they stand."""

import pathlib
import re

import pytest

from configs import common
from deepgrpo import config as config_lib
from deepgrpo.preflight import rules
from tests.conftest import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = [path for room in ("configs", "deepgrpo", "benchmarks", "launch") for path in sorted((ROOT / room).rglob("*.py"))]
CODE += sorted((ROOT / "launch").glob("*.sh"))
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in [*PAGES, *CODE]}
DOCUMENTED = [name for name in TEXTS if name.endswith(".md") or name.startswith("configs/")]

KEYS = config_lib.flatten(common.get_config())
SECTIONS = {key.rpartition(".")[0] for key in KEYS} - {""}
FILES = ("py", "md", "sh", "json", "jsonl", "html", "parquet", "txt", "png", "safetensors")  # `train.py` is no key of `train`
ROOMS = "|".join(path.name for path in (ROOT / "deepgrpo").iterdir() if path.is_dir() and path.name != "__pycache__")


def is_key(name: str) -> bool:
    """A key, a section, or what a closing star stands for."""
    return name in KEYS or name in SECTIONS or (name.endswith("*") and any(key.startswith(name[:-1]) for key in KEYS))


def columns_of_ours(name: str, text: str) -> str:
    """docs/knobs.md without the columns that name keys and variables of the original scripts."""
    return re.sub(r"^\|[^|]*\|", "|", text, flags=re.M) if name == "docs/knobs.md" else text


@pytest.mark.parametrize("name", TEXTS)
def test_flags_of_keys_exist(name):
    named = {key.rstrip(".") for key in re.findall(r"--config\.([a-z][\w.]*\*?)", TEXTS[name])}
    assert not [key for key in named if not is_key(key)]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_keys_in_backquotes_exist(name):
    quoted = re.findall(r"`([a-z]\w*(?:\.\w+)+\.?\*?)(?:=[^`]*)?`", columns_of_ours(name, TEXTS[name]))
    named = {key for key in quoted if key.partition(".")[0] in SECTIONS and key.rpartition(".")[2] not in FILES}
    assert not [key for key in named if not is_key(key)]


@pytest.mark.parametrize("name", TEXTS)
def test_paths_exist(name):
    """Those that begin with a folder of the checkout, and modules by their place in the package (`learner/costs.py`)."""
    named = set(re.findall(r"(?<![\w/.-])(?:deepgrpo|configs|docs|launch|tests|benchmarks)/[\w./-]*[\w/]", TEXTS[name]))
    modules = set(re.findall(rf"(?<![\w/.-])(?:{ROOMS})/\w+\.py\b", TEXTS[name]))
    assert not [path for path in named if not (ROOT / path).exists()]
    assert not [path for path in modules if not (ROOT / "deepgrpo" / path).exists()]


def test_constants_that_took_the_place_of_keys_exist():
    """The table of docs/log.md: no key that it lists is back, and each place that it names is there."""
    table = TEXTS["docs/log.md"].partition("## Keys that became constants")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", table, re.M)[2:]
    assert len(rows) > 50 and not [key for key, _ in rows if key in KEYS]
    for key, where in rows:
        for module, name in re.findall(r"((?:\w+/)+\w+)\.([A-Z]\w+)", where):
            assert re.search(rf"\b{name}\b", (ROOT / "deepgrpo" / f"{module}.py").read_text()), f"{key}: {where}"


#### Commands


def commands(text: str) -> list[list[str]]:
    """The arguments after `python -m` of each command: up to the end of the quotes, or to a comment after two spaces.

    What is in square brackets is optional and left out; a backslash joins lines.
    """
    joined = re.sub(r"\s*\\+\n\s*(#\s*)?", " ", text)
    found = re.findall(r"python3? -m ((?:deepgrpo|benchmarks|configs)\.[\w.]+[^`\n\"|]*)", joined)
    lines = [re.split(r"\s{2,}|[;,)](?:\s|$)", re.sub(r"\[[^\]]*\]", "", line))[0] for line in found]
    return [[word.rstrip(").") for word in line.split()] for line in lines]


def module_file(name: str) -> pathlib.Path:
    return ROOT / (name.replace(".", "/") + ".py")


EXAMPLES = [(name, words) for name, text in TEXTS.items() for words in commands(text)]
EXPERIMENT = r"--config=configs/\w+\.py(:(?!ARM$)\w+)?"  # ARM stands for any; tests/config/test_experiments.py loads them all
WITH_CONFIG = sorted({tuple(words) for _, words in EXAMPLES if any(re.fullmatch(EXPERIMENT, word) for word in words)})


def test_programs_and_their_flags_exist():
    assert {words[0] for _, words in EXAMPLES} >= {f"deepgrpo.{name}" for name in ("train", "evaluate", "prepare", "forest")}
    for name, words in EXAMPLES:
        program = module_file(words[0])
        assert program.is_file(), f"{name}: {words[0]}"
        source = program.read_text() + ((ROOT / "deepgrpo/telemetry/compare.py").read_text() if "compare" in words else "")
        flags = {word.partition("=")[0] for word in words if re.match(r"--(?!config\b|help$)\w", word)}
        assert not [flag for flag in flags if f'"{flag}"' not in source], f"{name}: {' '.join(words)}"


@pytest.mark.parametrize("words", WITH_CONFIG, ids=" ".join)
def test_documented_configurations_are_accepted(words, monkeypatch, tmp_path):
    """Every check of values and combinations; files and endpoints are not looked for."""
    monkeypatch.chdir(ROOT)
    line = [word for word in words if word.startswith("--config") and not word.endswith("=")]
    for folder in re.findall(r"--config\.(?:teacher|judge)\.replay=(\S+)", " ".join(line)):
        line = [word.replace(folder, str(tmp_path)) for word in line]  # the one thing that a rule looks for on the disk
    rules.from_command_line([words[0], *line])
