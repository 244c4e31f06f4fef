"""Steps of a branching curriculum with a scripted engine, up to the rows."""

import numpy as np

from deepgrpo.curriculum.pivots import Partition
from deepgrpo.learner import rows as rows_lib
from deepgrpo.learner.objective import BRANCH
from deepgrpo.loops import reasoning
from deepgrpo.loops.base import RolloutContext
from deepgrpo.rollout.engine import Sampling
from deepgrpo.types import Completion, Grade, Group, Problem, Prompt, Rollout, as_ids
from tests.curriculum.made import create
from tests.loops.scripted import EOS, LastTokenGrader, NumberTokenizer, ScriptedEngine


def setting(script, max_model_len=32) -> RolloutContext:
    sampling = Sampling(1.0, 1.0, -1, (EOS,), max_model_len)
    return RolloutContext(ScriptedEngine(script), LastTokenGrader(), NumberTokenizer(), sampling, 0, 10.0)


def problem(prompt=(1, 2, 3)) -> Problem:
    return Problem(0, "scripted", as_ids(prompt), None, "")


def roll(parties, prompts, step=1) -> list[Group]:
    return reasoning.run(parties, prompts, step, "train")


def dataset_prompt(inputs, step=1) -> Prompt:
    row = problem(inputs["prompt_ids"])
    return Prompt(row.prompt_ids, row, inputs["rollout_n"], f"{step}:0")


def branching(pool, inputs=(), **changes):
    """A pool of branches by the keys of a golden case; `changes` are of the section `branches`."""
    inputs = {"max_model_len": 32, "tokens_per_node": 3} | dict(inputs)
    names = ("tokens_per_node", "n_branch_points", "branches_per_point", "branches_per_entry")
    keys = {name: inputs[name] for name in names if name in inputs} | changes
    branches = {f"branches__{name}": value for name, value in keys.items()}
    curriculum = create(pool, max_model_len=inputs["max_model_len"], **branches)
    curriculum.only_failures = inputs.get("expand_only_on_low_quality", True)
    if "segment_method" in inputs:
        sizes = inputs["tokens_per_node"], inputs.get("n_segments", 5), inputs.get("stop_ids", ())
        curriculum.partition = Partition(inputs["segment_method"], *sizes)
    return curriculum


def golden_rows(groups) -> dict[str, list]:
    """Main and branch rows as the golden cases write them, in their order."""
    found = {"main_rows": [], "branch_rows": []}
    for row in rows_lib.rows_from_groups(groups, "group_mean"):
        found["branch_rows" if row.source == BRANCH else "main_rows"].append(as_golden(row))
    return {name: in_order(rows) for name, rows in found.items()}


def as_golden(row) -> dict:
    ids = {"prompt_ids": row.prompt_ids.tolist(), "response_ids": row.response_ids.tolist()}
    return ids | {"response_mask": [1] * len(row.response_ids), "reward": row.reward, "advantage": row.advantage}


def in_order(rows) -> list[dict]:
    return sorted(rows, key=lambda row: (row["prompt_ids"], row["response_ids"], row["advantage"]))


def scored(rewards, prompt, length=9) -> Group:
    """A group with the given rewards, each response of `length` tokens that tell it apart."""
    completions = [Completion(as_ids([40 + i] * length), np.zeros(length, np.float32), "stop", 0) for i in range(len(rewards))]
    grades = [Grade(reward, True, "scripted") for reward in rewards]
    return Group(prompt, tuple(Rollout(c, g) for c, g in zip(completions, grades, strict=True)))
