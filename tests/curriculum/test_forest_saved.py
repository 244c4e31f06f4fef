"""Saved forests: equal content gives equal bytes, a restored forest goes on exactly; merging, pruning, comparing."""

import dataclasses
import json

import numpy as np
import pytest

from deepgrpo.curriculum import forest_tools as tools
from deepgrpo.curriculum.base import NEVER, Correction, Failure
from deepgrpo.curriculum.forest import Forest
from deepgrpo.curriculum.forest_state import SavedForest, read, write
from deepgrpo.curriculum.forest_view import texts_after
from deepgrpo.types import Problem, as_ids, marked, marks
from tests.curriculum.made import answer, check, content, correction, create, forest, saved


def grown(trees: int = 8, **bounds) -> Forest:
    """A forest with active and retired nodes, waiting events, events in flight, clocks and SFT credits."""
    pool = forest(max_model_len=100, **bounds)
    for i in range(trees):
        problem = Problem(i, "test", as_ids([7, i]), {"answer": [i, None]}, f"Wie groß\u2028ist {i}?", {"level": i, "id": 5})
        pool.observe_root(problem, i % 2, 4, 1 + i // 2, [as_ids([i, 5, k]) for k in range(4 - i % 2)])
    for step in (3, 4):
        for failure in pool.dispatch(trees - 2, step):
            if failure.failure_id % 3:
                pool.resolve(failure, correction(failure, 2, [9, failure.failure_id]), step)
        for state in pool.sample_rollout(3, step):
            pool.observe_node(state.node, int(step == 4) * 2, 2, step, [as_ids([8])])
    for entry in pool.sample_sft(2, 5):
        pool.record_sft(entry.node, 5)
    return pool


def drive(pool: Forest) -> list:
    """What the next operations return."""
    seen = []
    for step in range(6, 12):
        seen += [state.ids.tolist() for state in pool.sample_rollout(2, step)]
        for failure in pool.dispatch(2, step):
            seen.append((failure.failure_id, failure.step, failure.state_ids.tolist(), failure.response_ids.tolist()))
            seen.append((failure.problem.index, failure.problem.ground_truth, failure.problem.question, failure.problem.extra))
            seen.append(pool.resolve(failure, Correction(as_ids([step]), as_ids([1]), 1.0, as_ids([])), step))
        seen += [entry.suffix_ids.tolist() for entry in pool.sample_sft(1, step)]
    return seen + [sorted(pool.metrics().items())]


def test_restored_forest_goes_on_exactly(tmp_path):
    pool = grown()
    for event in list(pool.index.in_flight):  # they would wait again: answered, the two stay equal
        pool.resolve(Failure(event, None, as_ids([]), as_ids([]), 0), None, 5)
    first = saved(pool, tmp_path / "a")
    restored = forest(max_model_len=100)
    restored.restore(str(tmp_path / "a"))
    check(restored)
    assert saved(restored, tmp_path / "b") == first
    assert drive(restored) == drive(pool)
    assert saved(restored, tmp_path / "c") == saved(pool, tmp_path / "d") != first


def test_events_in_flight_wait_again(tmp_path):
    pool = grown()
    flying = pool.metrics()["teacher/events_in_flight"]
    assert flying > 0
    saved(pool, tmp_path / "a")
    bounded = forest(max_model_len=100, max_events=4)
    bounded.restore(str(tmp_path / "a"))
    check(bounded)
    before = bounded.metrics()
    assert before["teacher/events_in_flight"] == 0 and before["teacher/events_queued"] == len(pool.index.events) > 5
    bounded.observe_root(Problem(0, "test", as_ids([7, 0]), "", ""), 0, 1, 9, [as_ids([1])])
    assert bounded.metrics()["teacher/events_queued"] == 4  # a tighter bound takes effect with the next event
    check(bounded)


def test_files_open_with_plain_tools(tmp_path):
    saved(grown(), tmp_path / "a")
    header = json.loads((tmp_path / "a/curriculum.json").read_text())
    assert (header["pool"], header["version"]) == ("forest", 2)
    problems = json.loads((tmp_path / "a/trees.json").read_text())["problems"]
    assert [problem["index"] for problem in problems] == list(range(8))
    nodes = np.load(tmp_path / "a/nodes.npz")
    rows = [nodes["ids"][a:b].tolist() for a, b in zip(nodes["ids_offsets"], nodes["ids_offsets"][1:], strict=False)]
    child = int(np.flatnonzero(nodes["parent"] >= 0)[0])
    parent = int(np.flatnonzero(nodes["id"] == nodes["parent"][child])[0])
    assert rows[child][: len(rows[parent])] == rows[parent] and nodes["reward"][child] == 1.0


def test_empty_forest_round_trips(tmp_path):
    first = saved(forest(), tmp_path / "a")
    pool = grown()
    pool.restore(str(tmp_path / "a"))
    assert len(pool) == 0 and saved(pool, tmp_path / "b") == first


def test_foreign_folders_are_refused(tmp_path):
    create("none").state(str(tmp_path))
    with pytest.raises(ValueError, match="'none'.*'forest'"):
        forest().restore(str(tmp_path))
    header = tmp_path / "curriculum.json"
    header.write_text(json.dumps({"pool": "forest", "version": 1}))
    with pytest.raises(ValueError, match="version 1 .*'forest'.* reads version 2"):
        forest().restore(str(tmp_path))
    header.unlink()
    with pytest.raises(ValueError, match="curriculum.json is absent"):
        create("none").restore(str(tmp_path))


def test_problem_that_json_cannot_hold_is_named(tmp_path):
    pool = forest()
    pool.observe_root(Problem(12, "test", as_ids([1]), {1, 2}, ""), 0, 1, 1, [as_ids([2])])
    with pytest.raises(ValueError, match="row 12 of 'test'"):
        pool.state(str(tmp_path))
    check(pool)


def wild(seed: int, prompts=(0, 1, 2)) -> SavedForest:
    """A random forest over so few tokens that two of them share prompts, states with other parents, and failures."""
    rng, pool = np.random.default_rng(seed), forest()
    for step in range(1, 9):
        for i in prompts:
            failed = [as_ids(rng.integers(1, 3, 4)) for _ in range(2)]
            pool.observe_root(Problem(i, "test", as_ids([9, i]), f"{i}", f"question {i}"), 1, 3, step, failed)
        for failure in pool.dispatch(3, step):
            cut = int(rng.integers(1, 4))
            made = correction(failure, cut, rng.integers(1, 3, 2))
            pool.resolve(failure, made if rng.random() < 0.9 else None, step)
        for state in pool.sample_rollout(2, step):
            pool.observe_node(state.node, int(rng.integers(0, 3)), 2, step, [as_ids(rng.integers(1, 3, 3))])
    return saved_of(pool)


def saved_of(pool: Forest) -> SavedForest:
    return SavedForest(pool.index.trees, pool.counters)


def plain(saved: SavedForest) -> dict:
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
    return content | {"counters": saved.counters}


def restored(saved: SavedForest, folder) -> Forest:
    """The pool that goes on with a saved forest, with all its invariants checked."""
    folder.mkdir()
    write(saved, str(folder))
    pool = forest()
    pool.restore(str(folder))
    check(pool)
    return pool


def test_reading_and_writing_and_the_union_with_nothing_change_no_byte(tmp_path):
    saved = wild(0)
    for name, same in (
        ("as it is", saved),
        ("first", tools.merge(saved, SavedForest({}))),
        ("second", tools.merge(SavedForest({}), saved)),
    ):
        restored(same, tmp_path / name)
        assert content(tmp_path / name) == content(tmp_path / "as it is")
    again = read(str(tmp_path / "as it is"))
    assert plain(again) == plain(saved) and not any(tools.diff(again, saved)[1].values())


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
    assert pool.sample_rollout(4, 20) and pool.dispatch(4, 20)


def line_of_states(*states: list[int]) -> SavedForest:
    """Each state is the child of the one before; the first is made at step 1, the second at step 2, and so on."""
    pool = forest()
    pool.observe_root(Problem(0, "test", as_ids([9]), "", ""), 0, 1, 1, [as_ids([7, 7, 7])])
    for step, state in enumerate(states, 1):
        (failure,) = pool.dispatch(1, step)
        child = answer(pool, failure, [9, *state][len(failure.state_ids) :], step)
        pool.observe_node(child, 0, 1, step, [as_ids([7, 7])])
    return saved_of(pool)


def test_the_earlier_record_gives_the_parent_and_parents_come_first(tmp_path):
    def parent_of(saved: SavedForest, *state: int) -> list[int]:
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
    assert not any(tools.diff(left, tools.prune(left, **criteria))[1].values())


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
    before = read(str(tmp_path / "a"))
    (state,) = pool.sample_rollout(1, 20)
    pool.observe_node(state.node, 2, 2, 20, None)
    pool.observe_root(Problem(7, "test", as_ids([9, 7]), "", ""), 0, 1, 20, [as_ids([1])])
    (added, changed), numbers = tools.diff(before, saved_of(pool))
    assert (added.what, added.tree.problem.index) == ("tree added", 7) and numbers["waiting failures new"] == 1
    assert changed.node.id == state.node and changed.fields["active"] == (True, False)
    assert changed.fields["last_success_step"][1] == 20 and sum(numbers.values()) == 3
    removed = tools.diff(saved_of(pool), before)[0][0]
    assert (removed.what, removed.tree.problem.index) == ("tree removed", 7)


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


def test_what_an_environment_wrote_stays_marked_in_states_failures_and_files(tmp_path):
    """Ids of observed tokens are complements all the way: from a rollout's failure to a child's state, file and page."""
    pool, response = forest(), marked(as_ids([5, 40, 41, 6, 7]), np.array([False, True, True, False, False]))
    problem = Problem(0, "test", as_ids([1]), "", "")
    pool.observe_root(problem, 0, 1, 1, [response])
    (failure,) = pool.dispatch(1, 1)
    assert failure.response_ids.tolist() == response.tolist()
    suffix = marked(as_ids([9, 42, 2]), np.array([False, True, False]))
    assert pool.resolve(failure, Correction(response[:4], suffix, 1.0, response[4:]), 1) == "child_created"
    pool.state(str(tmp_path))
    restored = forest()
    restored.restore(str(tmp_path))
    (state,) = restored.sample(1, 2)
    assert state.ids.tolist() == [1, 5, ~40, ~41, 6] and marks(state.ids).tolist() == [False, False, True, True, False]
    assert restored.continuation(state.node)[0].tolist() == suffix.tolist()
    words = lambda lists: [" ".join(map(str, ids)) for ids in lists]  # noqa: E731
    assert texts_after([(as_ids([1]), state.ids[1:])], words) == ["5⟦40 41⟧6"]
