"""Pairs and recoverability against numbers worked out by hand."""

import pytest

from configs import common
from deepgrpo.telemetry import recover
from deepgrpo.telemetry.recover import Pair
from deepgrpo.types import Group
from tests.telemetry.made import group, problem, rollouts
from tests.telemetry.published_names import missing
from tests.telemetry.test_documented import documented


def pair(prefix, root, depth=1, descendants=0, locked=2):
    about = {"depth_edges": depth, "descendants": descendants}
    return Pair(group("s", *prefix, locked=[5] * locked, node=3), group("s:root", *root, stream="paired"), about)


PAIRS = [
    pair((1, 1, 0, 0), (0, 0, 0, 0), depth=1, descendants=2, locked=2),
    pair((0, 0, 0, None), (1, 0, 0, 0), depth=2, locked=4),
    pair((1, 0), (1, 0), depth=3, locked=9),
]


def test_pair_metrics():
    lost = pair((None, None), (1, 0))
    got = {name.partition("/")[2]: value for name, value in recover.pair_metrics([*PAIRS, lost], 0.0).items()}
    assert (got["requested_pairs"], got["pairs"], got["filtered_rollouts"]) == (4, 3, 12)
    assert got["prefix_response_success_rate"] == 3 / 9 and got["root_response_success_rate"] == 2 / 10
    assert got["prefix_minus_root_response_success"] == pytest.approx(3 / 9 - 2 / 10)
    assert got["prefix_any_success_rate"] == 2 / 3 and got["root_any_success_rate"] == 2 / 3
    assert got["prefix_minus_root_any_success"] == 0
    assert (got["prefix_better_frac"], got["root_better_frac"], got["equal_frac"]) == (1 / 3, 1 / 3, 1 / 3)
    assert (got["any_prefix_only_frac"], got["any_root_only_frac"]) == (1 / 3, 1 / 3)
    assert (got["any_both_success_frac"], got["any_both_fail_frac"]) == (1 / 3, 0)
    assert got["prefix_depth_edges_mean"] == 2 and got["prefix_depth_tokens_mean"] == 5
    assert got["prefix_depth_ge2_frac"] == 2 / 3 and got["prefix_has_descendant_frac"] == 1 / 3
    assert [got[f"{b}_pairs"] for b in ("root_zero", "root_at_most_one_success", "root_nonzero")] == [1, 3, 2]
    assert (got["depth1_pairs"], got["depth_ge2_pairs"]) == (1, 2)
    assert got["root_zero_prefix_response_success_rate"] == 0.5 and got["root_zero_prefix_better_frac"] == 1
    assert got["depth_ge2_prefix_minus_root_response_success"] == pytest.approx(1 / 5 - 2 / 6)


def test_published_names_of_pairs():
    got, known = recover.pair_metrics(PAIRS, 0.0), documented()
    assert not missing([got], "paired", "paired_buckets")
    assert not [name for name in got if not known.fullmatch(name)]


def test_without_a_verdict_there_is_no_rate():
    got = recover.pair_metrics([pair((None,), (None,))], 0.0)
    assert got["prefix_paired_eval/pairs"] == 0 and not any(name.endswith("_rate") for name in got)


def test_roots_of_the_first_states_beside_a_step_and_out_of_it_again():
    step = [
        group("1:0", 0, 0).prompt,
        group("1:state:0", 0, 0, 0, locked=[5], node=4).prompt,
        group("1:branch", 0, locked=[5], node=8, stream="branch").prompt,
        group("1:state:1", 0, index=2, locked=[6], node=7).prompt,
    ]
    roots = recover.root_prompts(step, 1)
    assert [(r.group_id, r.ids.tolist(), r.n, r.injected, r.stream) for r in roots] == [
        ("1:state:0:root", [1, 2, 0], 3, False, "paired")
    ]
    assert [r.group_id for r in recover.root_prompts(step, 9)] == ["1:state:0:root", "1:state:1:root"]
    groups = [group("1:0", 0), group("1:state:0:root", 1, stream="paired"), group("1:state:0", 0, node=4)]
    rest, by_state = recover.split(groups)
    assert rest == [groups[0], groups[2]] and by_state == {"1:state:0": groups[1]}


def roll(asked):
    """A sampler: problem 1 is right, 2 has no verdict; a branch succeeds once it keeps two tokens of the answer."""

    def run(prompts, purpose):
        asked.append((purpose, [(p.group_id, p.ids.tolist(), p.n) for p in prompts]))
        if purpose == "recoverability":
            rewards = {1: 1.0, 2: None}
            return [Group(p, rollouts([rewards.get(p.problem.index, 0.0)], length=5)) for p in prompts]
        return [Group(p, rollouts([0.0, float(p.locked >= 2), None])) for p in prompts]

    return run


def evaluate(problems, asked):
    config = common.get_config()
    config.branches.tokens_per_node, config.branches.branches_per_point, config.rollout.max_model_len = 2, 3, 100
    return list(recover.recoverability(problems, roll(asked), config))


def test_every_place_of_failed_answers():
    asked = []
    records = evaluate([problem(i) for i in range(4)], asked)
    assert [purpose for purpose, _ in asked] == ["recoverability", "recoverability:branches:0"]
    assert all(n == 1 for _, _, n in asked[0][1]) and all(n == 3 for _, _, n in asked[1][1])
    # Five tokens in windows of two: root, 2, 2, 1; the last one is no place.
    assert [ids for _, ids, _ in asked[1][1]][:3] == [[1, 2, 0], [1, 2, 0, 10, 11], [1, 2, 0, 10, 11, 12, 13]]
    assert [(r["task_id"], r["position_index"]) for r in records] == [(0, 0), (0, 1), (0, 2), (3, 0), (3, 1), (3, 2)]
    assert len({r["uid"] for r in records}) == 2
    second = records[1]
    assert (second["chain_length"], second["position_ratio"]) == (4, 0.5)
    assert (second["n_branches"], second["n_success"], second["recoverability"]) == (2, 1, 1.0)
    assert second["mean_branch_reward"] == 0.5 and second["main_chain_reward"] == 0.0
    assert records[0]["recoverability"] == 0.0


def test_recoverability_metrics():
    got, known = recover.recoverability_metrics(evaluate([problem(0), problem(3)], [])), documented()
    assert got["recoverability/answers"] == 2 and got["recoverability/positions"] == 6
    assert got["recoverability/recovered_share"] == pytest.approx(4 / 6)
    assert got["recoverability/success_rate"] == pytest.approx(4 / 12)
    assert got["recoverability/recovered_answers_share"] == 1 and got["recoverability/last_recoverable_ratio"] == 0.75
    assert not [name for name in got if not known.fullmatch(name)]
    assert recover.recoverability_metrics([]) == {"recoverability/answers": 0, "recoverability/positions": 0}


def test_more_failures_than_a_chunk(monkeypatch):
    monkeypatch.setattr(recover, "CHUNK", 2)
    asked = []
    problems = [problem(i) for i in (0, 3, 4, 5, 6)]
    assert len(evaluate(problems, asked)) == 15
    purposes = [purpose for purpose, _ in asked]
    assert len(set(purposes)) == len(purposes) == 4  # no two of them share their seeds


def test_subset_is_fixed():
    problems = [problem(i) for i in range(50)]
    chosen = [p.index for p in recover.subset(problems, 8)]
    assert chosen == [p.index for p in recover.subset(problems, 20)][:8] and len(set(chosen)) == 8
    assert chosen != sorted(chosen) and len(recover.subset(problems, 99)) == 50
