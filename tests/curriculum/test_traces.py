"""The pools replay recorded traces operation by operation; so do the mini-batches of the epoch-local SFT phase."""

import json

import pytest

from deepgrpo.curriculum.suffix_sft import epoch_sft_minibatches
from tests.conftest import golden_files
from tests.curriculum.replay import REPLAYS, ForestReplay


def _scenarios(*kinds: str) -> list:
    scenarios = [
        pytest.param(kind, scenario, suite.get("stat_keys"), id=f"{path.stem}-{scenario['name']}")
        for kind in kinds
        for path in golden_files(f"pools_*_{kind}*.json")
        for suite in [json.loads(path.read_text())]
        for scenario in suite["scenarios"]
    ]
    absent = pytest.mark.skip(reason=f"golden traces of {kinds} are absent: set DEEPGRPO_GOLDEN")
    return scenarios or [pytest.param(None, None, None, marks=absent, id="absent")]


@pytest.mark.parametrize(("kind", "scenario", "stat_keys"), _scenarios(*REPLAYS))
def test_trace(kind, scenario, stat_keys):
    REPLAYS[kind](scenario["config"]).run(scenario["ops"], stat_keys)


@pytest.mark.parametrize(("kind", "scenario", "stat_keys"), _scenarios("epoch_sft"))
def test_epoch_sft_minibatches(kind, scenario, stat_keys):
    for case in scenario["cases"]:
        args = case["args"]
        snapshot = [(entry["tree"], entry["node"]) for entry in args["snapshot"]]
        batches = epoch_sft_minibatches(snapshot, args["mini_batch_size"], args["epoch_passes"])
        assert [{"pass": epoch_pass, "batch": batch} for epoch_pass, batch in batches] == case["result"], args


def _op(name, result, stats=None, **args):
    return {"op": name, "args": args, "result": result} | ({} if stats is None else {"stats": stats})


def _seen(**counts):
    names = ("tree_created", "root_deactivated", "node_deactivated", "node_reactivated", "node_retired", "events_added")
    return dict.fromkeys((*names, "observations_recorded"), 0) | counts


def test_life_of_a_state():
    """A prompt fails, the newest failure is corrected, the new state is rolled out, mastered and, at the end, forgotten."""
    failed = [{"event": "a", "response_ids": [7, 8]}, {"event": "b", "response_ids": [7, 9]}]
    answer = {"annotated": {"prompt_ids": [1, 2], "prefix_ids": [7], "suffix_ids": [5, 0]}, "success": True, "step": 2}
    b = {"event": "b", "tree": [1, 2], "parent": [1, 2], "created_step": 1}
    ForestReplay({"max_model_len": 40}).run(
        [
            _op("observe_root", _seen(), prompt=[3], k_succ=2, k_total=2, step=1, failed=None),
            _op(
                "observe_root",
                _seen(tree_created=1, events_added=2, observations_recorded=1),
                {"teacher/events_queued": 2, "forest/num_trees": 1, "root_any_success_rate": 0.0},
                **{"prompt": [1, 2], "k_succ": 0, "k_total": 2, "step": 1, "failed": failed},
            ),
            _op("sample_rollout", [], n=4, step=1),
            _op("dispatch_teacher", [b], max_items=5, step=1),
            _op("save_load", None, {"teacher/events_in_flight": 0, "teacher/events_queued": 2}),
            _op("teacher_result", {"outcome": "child_created", "child": [1, 2, 7]}, event="b", **answer),
            _op("teacher_result", {"outcome": "stale_unknown_event"}, event="b", **answer),
            _op("teacher_result", {"outcome": "duplicate"}, event="a", **answer),
            _op("sample_rollout", [{"tree": [1, 2], "node": [1, 2, 7]}], n=4, step=3),
            _op("sample_rollout", [], n=4, step=3),
            _op(
                "observe_node",
                _seen(node_deactivated=1, node_retired=1, observations_recorded=1),
                {"prefix_any_success_rate": 1.0, "forest_pool/active_trees": 0},
                **{"tree": [1, 2], "node": [1, 2, 7], "k_succ": 2, "k_total": 2, "step": 3, "failed": None},
            ),
            _op("cleanup", 0),
            _op(
                "observe_root",
                _seen(root_deactivated=1, node_deactivated=1, observations_recorded=1),
                **{"prompt": [1, 2], "k_succ": 3, "k_total": 2, "step": 4, "failed": None},
            ),
            _op("cleanup", 1, {"forest/num_nodes": 0, "prefix_any_success_rate": 0.0, "teacher/events_succeeded": 1}),
        ],
        stat_keys=None,
    )
