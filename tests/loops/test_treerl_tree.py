"""Values of trees against golden numbers and against their definition; places of forks."""

import itertools

import numpy as np
import pytest

from deepgrpo.loops import treerl
from deepgrpo.loops.treerl import Segment
from tests.conftest import golden_cases


def listed(trees, parent=-1, out=None) -> list[Segment]:
    """Nested {len, reward} or {len, children}, depth first."""
    out = [] if out is None else out
    for tree in trees:
        children = tree.get("children", [])
        out.append(Segment(parent, tree["len"], not children, tree.get("reward")))
        listed(children, len(out) - 1, out)
    return out


def flat(nodes) -> list[dict]:
    return [found for node in nodes for found in (node, *flat(node.get("children", [])))]


def tolerance(case):
    return {"abs": case["tolerance"]["atol"], "rel": case["tolerance"]["rtol"]}


@pytest.mark.parametrize("case", golden_cases("branching_*.json", {"treerl_tree_values"}))
def test_golden_values(case):
    segments, expected, close = listed(case["inputs"]["trees"]), case["expected"], tolerance(case)
    found, nodes = treerl.values(segments), flat(expected["trees"])
    assert found.root == pytest.approx(expected["V_root"], **close)
    assert found.leaves.tolist() == [node["n_leaves"] for node in nodes]
    assert found.value == pytest.approx([node["V"] for node in nodes], **close)
    assert found.advantage == pytest.approx([node["process_reward"] for node in nodes], **close)
    tokens = treerl.token_advantages(segments)
    assert [s.reward for s in segments if s.leaf] == [row["reward"] for row in expected["rows"]]
    for advantages, row in zip(tokens, expected["rows"], strict=True):
        assert advantages == pytest.approx(row["token_level_advantages"], **close)
        assert np.mean(advantages) == pytest.approx(row["advantage"], **close)


@pytest.mark.parametrize("case", golden_cases("branching_*.json", {"treerl_fork_candidates"}))
def test_golden_fork_candidates(case):
    inputs, expected, close = case["inputs"], case["expected"], tolerance(case)
    logps = np.array(inputs["token_logprobs"])
    positions = treerl.fork_candidates(logps, inputs["min_prefix_ratio"], inputs["min_suffix_tokens"])
    best = treerl.most_surprising(-logps[positions], inputs["N"])
    assert len(positions) == expected["n_candidates"] and positions[best].tolist() == expected["positions_top_n"]
    assert -logps[positions[best]] == pytest.approx(expected["scores_top_n"], **close)


def random_trees(rng, depth=3) -> list[dict]:
    """Some leaves have no verdict."""

    def tree(depth):
        node = {"len": int(rng.integers(0, 5))}
        if depth and rng.random() < 0.7:
            return node | {"children": [tree(depth - 1) for _ in range(rng.integers(1, 4))]}
        return node | {"reward": None if rng.random() < 0.2 else float(rng.normal())}

    return [tree(depth) for _ in range(3)]


def naive_rows(trees) -> list[list[float]]:
    """R by its definition, looked up anew for every token of every path."""

    def rewards(node):
        below = node.get("children")
        return [r for child in below for r in rewards(child)] if below else [node["reward"]] * (node["reward"] is not None)

    V = lambda node: sum(rewards(node)) / len(rewards(node))  # noqa: E731
    everything = list(itertools.chain.from_iterable(map(rewards, trees)))

    def rows(node, parent, path):
        if not rewards(node):
            return []
        R = V(node) - sum(everything) / len(everything)
        R += V(node) - V(parent) if parent else 0.0
        path = path + [R / len(rewards(node)) ** 0.5] * node["len"]
        return [row for child in node["children"] for row in rows(child, node, path)] if "children" in node else [path]

    return [row for tree in trees for row in rows(tree, None, [])]


@pytest.mark.parametrize("seed", range(8))
def test_advantages_by_their_definition(seed):
    trees = random_trees(np.random.default_rng(seed))
    expected, found = naive_rows(trees), treerl.token_advantages(listed(trees))
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)


def test_equal_rewards_teach_nothing_at_all():
    tree = {"len": 3, "children": [{"len": 2, "reward": 0.1}, {"len": 1, "children": [{"len": 2, "reward": 0.1}] * 3}]}
    assert all((row == 0).all() for row in treerl.token_advantages(listed([tree, {"len": 2, "reward": 0.1}])))
    assert treerl.token_advantages(listed([{"len": 3, "reward": None}])) == []


def test_forks_keep_away_from_both_ends():
    for n, ratio, first, last in [(100, 0.05, 5, 90), (100, 0.0, 1, 90), (11, 0.05, 1, 1), (400, 0.05, 20, 390)]:
        positions = treerl.fork_candidates(np.zeros(n), ratio)
        assert (positions[0], positions[-1]) == (first, last)
    assert not len(treerl.fork_candidates(np.zeros(10))) and not len(treerl.fork_candidates(np.zeros(0)))
    assert treerl.most_surprising(np.array([1.0, 2.0, 2.0, 0.5]), 3).tolist() == [1, 2, 0]  # of equals the first
    assert treerl.most_surprising(np.array([1.0]), 3).tolist() == [0]
