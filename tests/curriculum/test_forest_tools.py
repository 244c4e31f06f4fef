"""Operations on saved forests: unions that don't depend on the order, what pruning leaves, what differs, and a fresh start."""

import dataclasses

import numpy as np
import pytest

from deepgrpo.curriculum import forest_tools as tools
from deepgrpo.curriculum.forest_pool import Forest
from deepgrpo.curriculum.forest_records import NEVER, Annotation
from deepgrpo.types import Problem, as_ids
from tests.curriculum.forest_check import check


def wild(seed: int, prompts=(0, 1, 2)) -> tools.Saved:
    """A random forest over so few tokens that two of them share prompts, states with other parents, and failures."""
    rng, pool = np.random.default_rng(seed), Forest()
    for step in range(1, 9):
        for i in prompts:
            failed = [as_ids(rng.integers(1, 3, 4)) for _ in range(2)]
            pool.observe_root(Problem(i, "test", as_ids([9, i]), f"{i}", f"question {i}"), 1, 3, step, failed)
        for failure in pool.dispatch_teacher(3, step):
            cut = int(rng.integers(1, 4))
            ids = as_ids([*failure.state_ids, *failure.response_ids[:cut]])
            correction = Annotation(ids, as_ids(rng.integers(1, 3, 2)), 1.0, failure.response_ids[cut:])
            pool.teacher_result(failure.event, correction if rng.random() < 0.9 else None, step)
        for state in pool.sample_rollout(2, step):
            pool.observe_node(state.node, int(rng.integers(0, 3)), 2, step, [as_ids(rng.integers(1, 3, 3))])
    return saved_of(pool)


def saved_of(pool: Forest) -> tools.Saved:
    index = pool._index
    counters = dataclasses.asdict(pool._counters) | {"next_node": pool._next_node, "next_event": pool._next_event}
    return tools.Saved(index.trees, counters, dataclasses.asdict(index.history))


def plain(saved: tools.Saved) -> dict:
    """Everything but handles and orders."""
    content = {}
    for key, tree in saved.trees.items():
        by_id = {node.id: node for node in tree.nodes}
        content[key] = [tree.problem.index, {name: getattr(tree, name) for name in tools._NUMBERS}]
        for node in sorted(tree.nodes, key=lambda node: node.ids.tolist()):
            row = {name: getattr(node, name) for name in tools._COMPARED}
            row |= {"ids": node.ids.tolist(), "waiting": sorted((step, ids.tolist()) for step, _, _, ids in node.waiting)}
            if node.origin is not None:
                row["parent"] = by_id[node.parent].ids.tolist()
                row["origin"] = [np.asarray(value).tolist() for value in node.origin[1:]]
            content[key].append(row)
    return content | {"counters": saved.counters, "history": saved.history}


def restored(saved: tools.Saved, folder) -> Forest:
    """The pool that goes on with a saved forest, with all its invariants checked."""
    folder.mkdir()
    tools.write(saved, str(folder))
    pool = Forest()
    pool.restore(str(folder))
    check(pool)
    return pool


def content(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_reading_and_writing_and_the_union_with_nothing_change_no_byte(tmp_path):
    saved = wild(0)
    for name, same in (
        ("as it is", saved),
        ("first", tools.merge(saved, tools.empty())),
        ("second", tools.merge(tools.empty(), saved)),
    ):
        restored(same, tmp_path / name)
        assert content(tmp_path / name) == content(tmp_path / "as it is")
    again = tools.read(str(tmp_path / "as it is"))
    assert plain(again) == plain(saved) and not tools.diff(again, saved)


@pytest.mark.parametrize("seed", range(6))
def test_unions_do_not_depend_on_the_order(tmp_path, seed):
    a, b, c = wild(seed), wild(100 + seed, (1, 2, 3)), wild(200 + seed)
    before = plain(a), plain(b)
    both = tools.merge(a, b)
    assert plain(both) == plain(tools.merge(b, a)) and (plain(a), plain(b)) == before
    assert plain(tools.merge(both, c)) == plain(tools.merge(a, tools.merge(b, c)))
    states = {node.ids.tobytes() for forest in (a, b) for node in forest.nodes()}
    assert {node.ids.tobytes() for node in both.nodes()} == states and len(list(both.nodes())) == len(states)
    pool = restored(both, tmp_path / "both")
    assert pool.sample_rollout(4, 20) and pool.dispatch_teacher(4, 20)


def line_of_states(*states: list[int]) -> tools.Saved:
    """Each state is the child of the one before; the first is made at step 1, the second at step 2, and so on."""
    pool = Forest()
    pool.observe_root(Problem(0, "test", as_ids([9]), "", ""), 0, 1, 1, [as_ids([7, 7, 7])])
    for step, state in enumerate(states, 1):
        (failure,) = pool.dispatch_teacher(1, step)
        _, child = pool.teacher_result(failure.event, Annotation(as_ids([9, *state]), as_ids([5]), 1.0), step)
        pool.observe_node(child, 0, 1, step, [as_ids([7, 7])])
    return saved_of(pool)


def test_the_earlier_record_gives_the_parent_and_parents_come_first(tmp_path):
    def parent_of(saved: tools.Saved, *state: int) -> list[int]:
        nodes = {node.id: node for node in saved.nodes()}
        assert all(node.parent is None or node.parent < node.id for node in nodes.values())
        (node,) = [node for node in nodes.values() if node.ids.tolist() == [9, *state]]
        return nodes[node.parent].ids.tolist()

    of_root, of_state = line_of_states([1, 2, 3], [1, 2, 3, 4]), line_of_states([1], [1, 2, 3])
    for merged in (tools.merge(of_root, of_state), tools.merge(of_state, of_root)):
        assert parent_of(merged, 1, 2, 3) == [9] and parent_of(merged, 1, 2, 3, 4) == [9, 1, 2, 3]
    for node in of_root.nodes():
        node.created_step += 5
    merged = tools.merge(of_root, of_state)  # handles alone would put [1], which the first forest lacks, last
    assert parent_of(merged, 1, 2, 3) == [9, 1] and parent_of(merged, 1, 2, 3, 4) == [9, 1, 2, 3]
    assert restored(merged, tmp_path / "merged").find([9], [9, 1]) == 1


def test_forests_that_grade_a_prompt_otherwise_are_refused():
    a, b = wild(0), wild(1)
    tree = next(iter(b.trees.values()))
    tree.problem = dataclasses.replace(tree.problem, ground_truth="other")
    with pytest.raises(ValueError, match="ground_truth.*question 0.*'0' and 'other'.*--drop-tree"):
        tools.merge(a, b)
    assert len(tools.merge(a, tools.prune(b, drop_trees=[0])).trees) == 3


@pytest.mark.parametrize(
    ("criteria", "goes"),
    [
        ({"retired": True}, lambda node, now: not node.active),
        ({"stale": 3}, lambda node, now: now - max(node.rollout_clock, node.created_step) > 3),
        ({"older_than": 4}, lambda node, now: now - node.created_step > 4),
        ({"longer_than": 4}, lambda node, now: len(node.ids) > 4),
    ],
)
def test_pruning_takes_what_it_is_told_and_hangs_up_the_children(tmp_path, criteria, goes):
    saved = wild(3)
    left, now = tools.prune(saved, **criteria), tools.last_step(saved)
    expected = {node.ids.tobytes() for node in saved.nodes() if node.parent is None or not goes(node, now)}
    assert {node.ids.tobytes() for node in left.nodes()} == expected and len(expected) < len(list(saved.nodes()))
    pool = restored(left, tmp_path / "left")  # checks that each parent is there and a prefix, and what became of the failures
    assert pool.metrics()["teacher/events_cleared"] == saved.num_events() - left.num_events()
    assert not tools.diff(left, tools.prune(left, **criteria))


def test_full_trees_keep_active_and_young_states_and_empty_trees_go():
    saved = wild(4)
    left = tools.prune(saved, max_nodes=3)
    for key, tree in left.trees.items():
        assert len(tree.nodes) == min(3, len(saved.trees[key].nodes))
        kept, gone = {node.id for node in tree.nodes[1:]}, saved.trees[key].nodes[1:]
        ranks = [(node.active, node.created_step, node.id) for node in gone]
        assert kept == {rank[2] for rank in sorted(ranks, reverse=True)[:2]}
    for node in saved.nodes():
        node.active = False
    assert tools.prune(saved, retired=True).trees == {}
    for wrong in ({"stale": -1}, {"max_nodes": 0}, {"drop_trees": [7]}):
        with pytest.raises(ValueError, match="expected at least|no tree 7"):
            tools.prune(saved, **wrong)


def test_differences_are_named(tmp_path):
    pool = restored(wild(5), tmp_path / "a")
    before = tools.read(str(tmp_path / "a"))
    (state,) = pool.sample_rollout(1, 20)
    pool.observe_node(state.node, 2, 2, 20, None)
    pool.observe_root(Problem(7, "test", as_ids([9, 7]), "", ""), 0, 1, 20, [as_ids([1])])
    found = tools.diff(before, saved_of(pool))
    assert [tree.problem.index for tree in found.trees_added] == [7] and not found.trees_removed and found.events == (0, 1)
    ((_, node, fields),) = found.changed
    assert node.ids is not None and node.id == state.node and fields["active"] == (True, False)
    assert fields["last_success_step"][1] == 20 and not found.nodes_added and not found.nodes_removed
    assert [tree.problem.index for tree in tools.diff(saved_of(pool), before).trees_removed] == [7]


def test_a_fresh_start_keeps_states_and_failures_and_no_history(tmp_path):
    saved = wild(6)
    fresh = tools.without_history(saved)
    pool = restored(fresh, tmp_path / "fresh")
    assert [node.ids.tolist() for node in fresh.nodes()] == [node.ids.tolist() for node in saved.nodes()]
    assert [node.active for node in fresh.nodes()] == [node.active for node in saved.nodes()]
    assert fresh.num_events() == saved.num_events() and tools.last_step(fresh) == 0
    assert {node.rollout_clock for node in fresh.nodes()} == {NEVER} and not any(node.observations for node in fresh.nodes())
    candidates = [[node.id for node in tree.nodes[1:] if node.active] for tree in fresh.trees.values()]
    for turn in range(2):  # the least recently used comes next, whatever the old run's clocks said
        sampled = {state.node for state in pool.sample_rollout(9, turn + 1)}
        assert sampled == {nodes[turn % len(nodes)] for nodes in candidates if nodes}
    assert all(node.active for node in tools.reopened(saved).nodes())
