"""Damaged run folders: each is refused with what is wrong and the way out, or gone on with where nothing is lost.

Of what is there no byte changes in a refused start, metrics.jsonl least of all.
"""

import json
import pathlib
import re
import shutil

import pytest

from deepgrpo import config as config_lib
from deepgrpo.telemetry.metrics import Metrics
from tests.faults.conftest import STEPS, begin, contents

STEP = f"checkpoints/{STEPS}"
OLDER = f"checkpoints/{STEPS - 1}"


def edit(path: pathlib.Path, **changes: object) -> None:
    """Sets keys of a JSON file; None removes one."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def cut(path: pathlib.Path) -> None:
    path = largest(path) if path.is_dir() else path
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: pathlib.Path) -> None:
    """Another bit in the middle, the same size; of a folder, in its largest file."""
    path = largest(path) if path.is_dir() else path
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def largest(folder: pathlib.Path) -> pathlib.Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def remove(path: pathlib.Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def each(action, *names: str, **changes: object):
    """A damage: the action on each of these files of the run."""
    return lambda run: [action(run / name, **changes) for name in names]


def manifests(action, **changes: object):
    return each(action, f"{STEP}/manifest.json", f"{OLDER}/manifest.json", **changes)


def text(content: str):
    return lambda path: path.write_text(content)


def lines(keep):
    """A damage of metrics.jsonl: the lines that `keep` returns of those that are there."""
    return lambda run: (run / "metrics.jsonl").write_text("".join(keep((run / "metrics.jsonl").read_text().splitlines(True))))


def replaced_by(make):
    def action(path):
        remove(path)
        make(path)

    return action


def link(target: str):
    return replaced_by(lambda path: path.symlink_to(target))


FOLDER = replaced_by(pathlib.Path.mkdir)


def another_run(path: pathlib.Path) -> None:
    records = [json.loads(line) | {"critic/main_chain/rewards/mean": 0.5} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def a_models_folder(run: pathlib.Path) -> None:
    each(remove, "checkpoints", "latest", "metrics.jsonl")(run)
    (run / "config.json").write_text('{"model_type": "qwen2"}')


def killed_before_the_first_save(run: pathlib.Path) -> None:
    each(remove, "checkpoints", "latest")(run)
    keys = json.loads((run / "config.json").read_text())["config"]
    edit(run / "config.json", config=keys | {"checkpoint.every": 10, "train.steps": 20})


REFUSED = {  # damage: what the one list says
    "all damaged": (
        each(flip, STEP, OLDER),
        "no checkpoint that .*step 3: .* is damaged: sha256.*step 2: .*-> copy a good one there",
    ),
    "no manifests": (manifests(remove), "step 3: .*manifest.json is missing.*step 2: .*manifest.json is missing"),
    "torn manifests": (manifests(cut), "cannot be read as JSON"),
    "manifests without files": (manifests(edit, files=None), "manifest.json lacks parts"),
    "manifests of wrong types": (manifests(edit, files={"host.json": 3}), "manifest.json lacks parts"),
    "manifests of no files": (manifests(edit, files={}), "manifest.json lacks parts"),
    "manifests that are lists": (manifests(text("[1]")), "no manifest of a checkpoint"),
    "manifests nested too deep": (manifests(text("[" * 100_000)), "cannot be read as JSON"),
    "a format of tomorrow": (manifests(edit, format=2), "is of format 2, expected 1"),
    "no arrays": (each(remove, f"{STEP}/arrays", f"{OLDER}/arrays"), "arrays/.* is missing"),
    "steps not mounted": (
        each(remove, STEP, OLDER),
        "latest in .* says that checkpoints were saved, and none is in .*-> mount its",
    ),
    "steps gone": (each(remove, "checkpoints"), "checkpoints, which does not exist"),
    "steps and pointer gone": (each(remove, "checkpoints", "latest"), "holds steps up to 3, so checkpoints were saved"),
    "steps are a link to nowhere": (
        each(link("/nowhere/steps"), "checkpoints"),
        "is a link to /nowhere/steps, which is not there",
    ),
    "steps are a link to themselves": (each(link("checkpoints"), "checkpoints"), "checkpoints is a link to checkpoints"),
    "only metrics are left": (each(remove, "checkpoints", "latest", "config.json"), "config.json is missing"),
    "a model's folder": (a_models_folder, "is no record of a run: it lacks config"),
    "metrics lost": (each(remove, "metrics.jsonl"), "metrics.jsonl is missing.* -> .*accept_changes=metrics.jsonl"),
    "metrics empty": (lines(lambda found: []), "metrics.jsonl holds no step"),
    "metrics cut": (lines(lambda found: found[:-2]), "metrics.jsonl ends at step 1"),
    "metrics torn": (each(cut, "metrics.jsonl"), "metrics.jsonl ends at step 1"),
    "metrics without their middle": (lines(lambda found: found[::2]), "is another run's, or was edited"),
    "metrics of another run": (each(another_run, "metrics.jsonl"), "is another run's, or was edited"),
    "metrics of another program": (each(text("epoch,loss\n1,0.5\n"), "metrics.jsonl"), "damaged .*line 1 is no metrics record"),
    "metrics are a folder": (each(FOLDER, "metrics.jsonl"), "metrics.jsonl is no regular file"),
    "record lost": (each(remove, "config.json"), "config.json is missing.* -> .*accept_changes=config.json"),
    "record torn": (each(cut, "config.json"), "is damaged .*config.json cannot be read as JSON"),
    "record empty": (each(text(""), "config.json"), "config.json.* is damaged"),
    "both lost": (each(remove, "config.json", "metrics.jsonl"), "2 problems.* -> .*accept_changes=config.json,metrics.jsonl"),
    "record of another run": (each(edit, "config.json", config={"optim.lr": 1.0}), "optim.lr: 1.0 -> 0.0005"),
    "another tokenizer": (each(edit, "config.json", vocabulary="0" * 64), "numbers its tokens otherwise"),
    "the log is a folder": (each(FOLDER, "log.txt"), "log.txt is no regular file"),
}

GONE_ON_WITH = {  # damage: the step that is resumed from, None for a new run, and what is said
    "nothing": (lambda run: None, 3, "^$"),
    "the newest damaged": (each(flip, STEP), 2, "step 3: .* is damaged.*goes on after step 2"),
    "the newest cut": (each(cut, STEP), 2, "step 3: .* bytes, expected"),
    "the newest gone": (each(remove, STEP), 2, "latest names step 3, which is not in"),
    "the pointer is garbage": (each(text("newest"), "latest"), 3, "^$"),
    "the pointer is gone": (each(remove, "latest"), 3, "^$"),
    "foreign steps": (each(pathlib.Path.mkdir, "checkpoints/007", "checkpoints/8.partial", "checkpoints/x"), 3, "^$"),
    "metrics of a step that was not saved": (lines(lambda found: [*found, '{"step": 4}\n{"st']), 3, "^$"),
    "killed before the first save": (killed_before_the_first_save, None, "ended after step 3 without a checkpoint"),
    "an empty folder": (lambda run: [remove(path) for path in run.iterdir()], None, "^$"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_and_nothing_is_touched(run, tmp_path, name):
    damage, said = REFUSED[name]
    damage(run)
    before = contents(run)
    with pytest.raises(config_lib.ConfigError, match="^run run cannot start: ") as caught:
        begin(tmp_path)
    assert re.search(f"{said}", " ".join(str(caught.value).split())) and "Traceback" not in str(caught.value), caught.value
    assert contents(run) == before


@pytest.mark.parametrize("name", GONE_ON_WITH)
def test_gone_on_with(run, tmp_path, name):
    damage, step, said = GONE_ON_WITH[name]
    damage(run)
    (run / "log.txt").unlink(missing_ok=True)
    resumed, log = begin(tmp_path)
    assert resumed == step and re.search(f"(?s){said}", log), log


def test_metrics_are_set_aside_and_never_emptied(run, tmp_path):
    killed_before_the_first_save(run)
    before = (run / "metrics.jsonl").read_bytes()
    begin(tmp_path)
    Metrics(run, tensorboard=False).close()
    assert (run / "metrics.1.jsonl").read_bytes() == before and (run / "metrics.jsonl").read_bytes() == b""


def test_what_is_accepted_is_gone_on_without(run, tmp_path):
    each(remove, "config.json", "metrics.jsonl")(run)
    assert begin(tmp_path, checkpoint__accept_changes="config.json,metrics.jsonl")[0] == 3
