"""Diagnostics in the real training loop: they leave what they promise, and training is what it is without them."""

import json

import pytest

from deepgrpo.config import ConfigError
from deepgrpo.preflight import rules
from deepgrpo.telemetry import diagnostics, recover
from deepgrpo.telemetry import metrics as metrics_lib
from tests.telemetry.published_names import GROUPS, missing, names
from tests.telemetry.test_documented import documented
from tests.test_train import command, in_process

SMALL = {  # whose students fail, hence rows without a contrast stay and the teacher's rows make the gradient
    **{"objective__teacher_loss": "luffy", "objective__zero_gradient_rows": "keep"},
    **{"train__steps": 4, "data__batch_size": 8, "optim__mini_batch_prompts": 8, "rollout__n": 4, "data__validation_limit": 8},
    **{"validation__every": 2, "checkpoint__every": 1, "checkpoint__keep": 2, "telemetry__rollouts_every": 1},
}
ALL = {
    **{"diagnostics__paired_every": 2, "diagnostics__dump_every": 2, "diagnostics__score_every": 1},
    **{"diagnostics__recover_every": 2, "branches__tokens_per_node": 30, "branches__branches_per_point": 2},
}


@pytest.fixture(scope="module")
def runs(student, tmp_path_factory):
    """Records and folders of a run without diagnostics, and of one with all of them that was stopped half way."""
    folder = tmp_path_factory.mktemp("diagnostics")
    plain = in_process(folder / "plain", **SMALL)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(diagnostics, "COMPARE_EVERY", 1)
    monkeypatch.setattr(recover, "PAIRED_STATES", 3)
    monkeypatch.setattr(recover, "RECOVER_PROBLEMS", 3)
    in_process(folder / "watched", **SMALL | ALL | {"train__steps": 2})
    watched = in_process(folder / "watched", **SMALL | ALL)
    monkeypatch.undo()
    return plain, watched, folder


def test_training_does_not_notice(runs):
    plain, watched, folder = runs
    assert [record["step"] for record in watched] == [0, 1, 2, 3, 4]
    for without, record in zip(map(metrics_lib.reproducible, plain), watched, strict=True):
        exact = {name: value for name, value in without.items() if not name.startswith("rollout_mismatch/")}
        assert {name: record[name] for name in exact} == exact
        # The engine's log-probs are those of larger batches: equal but for rounding.
        assert record.get("rollout_mismatch/abs_mean", 0.0) < 1e-5
    forests = [folder / run / "carry_chain" / "checkpoints" / "4" / "curriculum" for run in ("plain", "watched")]
    files = [{path.name: path.read_bytes() for path in sorted(forest.iterdir())} for forest in forests]
    assert files[0] == files[1] and len(files[0]) > 4


def test_published_names_and_nothing_undocumented(runs):
    _, watched, _ = runs
    groups = ("actor", "data", "states", "time", "validation", "checkpoint", "rollout_dump", "injection", "forest", "teacher")
    assert not missing(watched, *groups, "attached", "luffy", "teacher_tokens", "paired", "debug_dump", "recoverability")
    known = documented()
    assert not {name for record in watched for name in record if name != "step" and not known.fullmatch(name)}
    assert not [name for name in names(*GROUPS) if not known.fullmatch(name)]


def test_what_a_run_leaves(runs):
    _, watched, folder = runs
    run = folder / "watched" / "carry_chain"
    shown = {path.name: path.read_text().splitlines() for path in (run / "prefix_debug").iterdir()}
    assert shown.keys() == {"2.jsonl", "4.jsonl"}
    for record in watched[2::2]:
        lines = [json.loads(line) for line in shown[f"{record['step']}.jsonl"]]
        assert len(lines) == record["prefix_debug_dump/records"]
        assert sum(line["source"] == "paired_root" for line in lines) == 3 == record["prefix_paired_eval/pairs"]
        assert record["prefix_paired_eval/filtered_rollouts"] == 12
    assert all("prefix_paired_eval/pairs" not in record for record in watched[1::2])
    assert {path.name for path in (run / "recoverability").iterdir()} == {"0.jsonl", "2.jsonl", "4.jsonl"}
    assert watched[0]["recoverability/answers"] == 3 and watched[0]["timing_s/recoverability_eval"] > 0
    assert {path.name for path in (run / "teacher_comparison").iterdir()} == {"2.jsonl", "3.jsonl", "4.jsonl"}  # 1 has no states
    dumped = (run / "rollouts" / "2.jsonl").read_text()
    assert ":root" not in dumped and len(dumped.splitlines()) == 8 * 4


def test_figures_of_the_curriculum(runs):
    _, watched, _ = runs
    steps = watched[1:]
    assert sum(r["teacher_worker/step_attempted"] for r in steps) == steps[-1]["teacher_worker/total_attempted"] > 0
    assert sum(r["teacher_worker/step_succeeded"] for r in steps) == steps[-1]["teacher_suffix/total_succeeded"] > 0
    last = steps[-1]
    assert last["mastery/first_node_step"] == 1 and sum(last[f"forest_depth/{d}"] for d in (1, 2, 3, 4, "from_5")) > 0
    young = "node_age/0_to_1"
    assert steps[1][f"{young}/groups"] > 0 and 0 <= steps[1][f"{young}/mismatch"] < 1e-4 and steps[1][f"{young}/prefix_logp"] < 0
    assert "node_age/mean" not in steps[0] and last["node_age/max"] >= 1
    shares = [[value for name, value in r.items() if name.startswith("data/gradient_share_")] for r in steps]
    assert all(not values or sum(values) == pytest.approx(1) for values in shares)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"diagnostics__paired_every": 1, "curriculum__pool": "none"}, "diagnostics.paired_every"),
        ({"diagnostics__dump_every": 1, "curriculum__pool": "chain"}, "diagnostics.dump_every"),
        ({"diagnostics__score_every": 1, "curriculum__pool": "chain"}, "diagnostics.score_every"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, keys, named):
    with pytest.raises(ConfigError, match=named):
        rules.from_command_line(command(tmp_path, **keys)[2:])
