"""Paired evaluation against numbers worked out by hand."""

import pytest

from deepgrpo.telemetry import paired
from deepgrpo.telemetry.paired import Pair
from tests.telemetry.made import group
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


def test_metrics():
    lost = pair((None, None), (1, 0))
    got = {name.partition("/")[2]: value for name, value in paired.metrics([*PAIRS, lost], 0.0).items()}
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


def test_published_names_and_nothing_undocumented():
    got, known = paired.metrics(PAIRS, 0.0), documented()
    assert not missing([got], "paired", "paired_buckets")
    assert not [name for name in got if not known.fullmatch(name)]


def test_without_a_verdict_there_is_no_rate():
    got = paired.metrics([pair((None,), (None,))], 0.0)
    assert got["prefix_paired_eval/pairs"] == 0 and not any(name.endswith("_rate") for name in got)


def test_roots_of_the_first_states_beside_a_step_and_out_of_it_again():
    step = [
        group("1:0", 0, 0).prompt,
        group("1:state:0", 0, 0, 0, locked=[5], node=4).prompt,
        group("1:branch", 0, locked=[5], node=8, stream="branch").prompt,
        group("1:state:1", 0, index=2, locked=[6], node=7).prompt,
    ]
    roots = paired.root_prompts(step, 1)
    assert [(r.group_id, r.ids.tolist(), r.n, r.injected, r.stream) for r in roots] == [
        ("1:state:0:root", [1, 2, 0], 3, False, "paired")
    ]
    assert [r.group_id for r in paired.root_prompts(step, 9)] == ["1:state:0:root", "1:state:1:root"]
    groups = [group("1:0", 0), group("1:state:0:root", 1, stream="paired"), group("1:state:0", 0, node=4)]
    rest, by_state = paired.split(groups)
    assert rest == [groups[0], groups[2]] and by_state == {"1:state:0": groups[1]}
