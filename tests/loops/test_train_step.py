"""One whole training step with a scripted engine: states, groups, observations, rows. Golden cases `train_step`."""

import numpy as np
import pytest

from deepgrpo.curriculum.base import Correction
from deepgrpo.curriculum.forest import Forest
from deepgrpo.learner import rows as rows_lib
from deepgrpo.learner import training_rows
from deepgrpo.learner.minibatch import injection_count, interleave
from deepgrpo.learner.objective import MAIN, TEACHER
from deepgrpo.loops import reasoning
from deepgrpo.loops.base import RolloutContext
from deepgrpo.rollout.engine import Sampling
from deepgrpo.types import Completion, Grade, Group, Problem, Prompt, Rollout, as_ids
from tests.conftest import golden_cases
from tests.curriculum import made
from tests.loops.scripted import EOS, RIGHT, LastTokenGrader, NumberTokenizer, ScriptedEngine

SAMPLING = Sampling(1.0, 1.0, -1, (EOS,), 16)


def problem(index, prompt):
    return Problem(index, "scripted", as_ids(prompt), None, "")


def planted(states) -> Forest:
    """A forest in which every state was made at step 0 from a failing root group of two."""
    curriculum = made.forest(max_model_len=16, min_remaining_tokens=1)
    for state in states:
        root, prefix = problem(-1, state["root_prompt_ids"]), state["prefix_ids"]
        failed = Rollout(
            Completion(as_ids([*prefix, 6, EOS]), np.zeros(len(prefix) + 2, np.float32), "stop", 0), Grade(0.0, True, "wrong")
        )
        none = Rollout(failed.completion, Grade(0.0, True, "wrong"))
        curriculum.observe([Group(Prompt(root.prompt_ids, root, 2, "0:0"), (failed, none))], 0)
        for i, failure in enumerate(drain(curriculum)):
            suffix = as_ids(state["teacher_suffix_ids"])
            correction = Correction(as_ids(prefix), suffix, state["teacher_reward"], as_ids([6])) if i == 0 else None
            curriculum.resolve(failure, correction, 0)
    return curriculum


def drain(curriculum):
    failures = []
    while more := curriculum.dispatch(100, 0):
        failures += more
    return failures


def step(inputs):
    """The lines of train.py's loop between the prompts and the update, with teacher rows attached."""
    curriculum, ratio = planted(inputs["forest_before"]), inputs["injection_ratio"]
    origins = {node["node"]: node["origin"] for tree in made.describe(curriculum) for node in tree["nodes"]}
    drawn = [problem(i, prompt) for i, prompt in enumerate(inputs["dataset_prompts"])]
    states = curriculum.sample(injection_count(len(drawn), ratio, curriculum.ready()), inputs["global_step"])
    prompts = [Prompt(p.prompt_ids, p, inputs["rollout_n"], f"1:{i}") for i, p in enumerate(drawn)]
    prompts += [Prompt(s.ids, s.problem, inputs["prefix_rollout_n"], f"1:state:{i}", s.node) for i, s in enumerate(states)]
    setting = RolloutContext(ScriptedEngine(inputs["script"]), LastTokenGrader(), NumberTokenizer(), SAMPLING, 0, 10.0)
    groups = reasoning.run(setting, prompts, 1, "train")
    continuation = lambda node: (origins[node].suffix_ids, origins[node].reward)  # noqa: E731
    continuations = training_rows.find_continuations(groups, continuation)
    metrics = curriculum.observe(groups, inputs["global_step"])
    rows, attached = training_rows.add_teacher_rows(
        rows_lib.rows_from_groups(groups, "group_mean"),
        groups,
        continuations,
        teacher_loss=inputs["teacher_loss_type"] or "null",
        threshold=inputs["reward_threshold"],
        snis_beta=1.0,
        stop_ids=(inputs["eos_token_id"],),
        max_model_len=SAMPLING.max_model_len,
    )
    kept = rows_lib.keep_rows(rows)
    metrics |= attached | rows_lib.filter_metrics(rows, kept)
    return curriculum, states, kept, metrics


def as_golden(row):
    coef = row.teacher_coef if row.source == TEACHER else row.advantage
    return {
        "prompt_ids": row.prompt_ids.tolist(),
        "response_ids": row.response_ids.tolist(),
        "coef": pytest.approx(coef, abs=1e-6),
        "source": row.source,
        "dataset_idx": row.dataset_index,
    }


def trees(curriculum):
    listed = [
        {
            "prompt_ids": tree["problem"].prompt_ids.tolist(),
            "events": len(tree["events"]),
            "nodes": [
                {
                    "depth_tokens": len(node["ids"]) - len(tree["problem"].prompt_ids),
                    "active": node["active"],
                    "last_k": [node["last_k_succ"], node["last_k_total"]],
                    "last_rollout_step": node["last_rollout_step"],
                }
                for node in tree["nodes"]
            ],
        }
        for tree in made.describe(curriculum)
    ]
    return sorted(listed, key=lambda tree: tree["prompt_ids"])


@pytest.mark.parametrize("case", golden_cases("branching_*.json", {"train_step"}))
def test_golden_train_step(case):
    inputs, expected = case["inputs"], case["expected"]
    curriculum, states, rows, metrics = step(inputs)
    assert [state.ids.tolist() for state in states] == expected["injected_prompts"]
    assert trees(curriculum) == expected["forest_after"]
    # The reference trims every stream to a multiple of its workers, which loses a single teacher row on two of them; here rows
    # are padded instead. What it would have trained is checked by its own rule.
    sizes = tuple(sum(row.source == source for row in rows) for source in (MAIN, 1, TEACHER))
    trimmed = tuple(n - n % inputs["world_size"] for n in sizes)
    lost = sizes[TEACHER] - trimmed[TEACHER]
    if not lost:
        order = lambda r: (r["source"], r["prompt_ids"], r["response_ids"])  # noqa: E731
        ours = sorted(map(as_golden, rows), key=order)
        assert sorted(expected["update_rows"], key=order) == ours
    assert expected["per_worker_rows"] == [[n // inputs["world_size"] for n in trimmed]] * inputs["world_size"]
    assert sorted(interleave(trimmed, inputs["world_size"])) == list(range(sum(trimmed)))
    for name, value in expected["metrics"].items():
        assert value == (lost if name == "prefix_luffy/teacher_tail_filtered" else metrics[name]), name


def test_injection_adds_and_unequal_group_sizes_keep_their_meaning():
    """Dataset prompts get rollout_n rollouts, states prefix_rollout_n (the reference has them crossed)."""
    script = [{"prompt_ids": p, "completions": [{"token_ids": [6, EOS], "finish_reason": "stop"}]} for p in ([1], [2], [3, 5])]
    inputs = {
        "dataset_prompts": [[1], [2]],
        "forest_before": [{"root_prompt_ids": [3], "prefix_ids": [5], "teacher_suffix_ids": [RIGHT, EOS], "teacher_reward": 1.0}],
        "rollout_n": 2,
        "prefix_rollout_n": 3,
        "injection_ratio": 0.5,
        "teacher_loss_type": None,
        "script": script,
        "reward_threshold": 0.0,
        "eos_token_id": EOS,
        "global_step": 1,
    }
    curriculum, states, rows, metrics = step(inputs)
    assert [state.ids.tolist() for state in states] == [[3, 5]]
    assert rows == [] and metrics["data/main_chain/filtered_count"] == 2 * 2 + 3  # all fail: nothing to learn, nothing trained
    assert metrics["synthetic_inject/failed_collected"] == 7
