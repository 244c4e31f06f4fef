"""What became of the forest's states: how many groups and steps they took, what that did for their roots, how failures wait.

Counted as it happens, in whole numbers alone, so that a restored forest goes on exactly and nothing is scanned.

Root transfer compares a root before and after the first state of its tree was mastered. The group that made the tree counts
as neither: it is there because it failed, so its rate says nothing about the prompt.
"""

import math

from deepgrpo.curriculum.forest_index import Index
from deepgrpo.curriculum.forest_records import NEVER, History, Node, Tree

SCALE = 1 << 40  # success rates are added up as multiples of 1 / SCALE: the order of additions does not matter then
DEEPEST = 5  # depth from which on states are counted together
PERCENTILES = (50, 90)


def observed(history: History, tree: Tree, node: Node, k_succ: int, k_total: int) -> None:
    """Notes a group of a node, after the node has counted it."""
    if node.parent is not None or node.observations == 1:
        return
    trees, before, after = _transfer(tree)
    if tree.mastered:
        tree.after_succ, tree.after_total = tree.after_succ + k_succ, tree.after_total + k_total
    else:
        tree.before_succ, tree.before_total = tree.before_succ + k_succ, tree.before_total + k_total
    now = _transfer(tree)
    history.transfer_trees += now[0] - trees
    history.transfer_before += now[1] - before
    history.transfer_after += now[2] - after


def _transfer(tree: Tree) -> tuple[int, int, int]:
    """What a tree adds to the sums: 1 and the root's two success rates, once there are both."""
    if not (tree.before_total and tree.after_total):
        return 0, 0, 0
    return 1, tree.before_succ * SCALE // tree.before_total, tree.after_succ * SCALE // tree.after_total


def mastered(history: History, tree: Tree, node: Node, step: int) -> None:
    """Notes that a node other than the root retires."""
    tree.mastered += 1
    history.mastered += 1
    history.mastered_visits += node.observations
    history.mastered_unfailed += node.observations == node.mastered_in_a_row
    history.mastered_steps += step - node.created_step


def grown(history: History, tree: Tree, event_step: int, step: int) -> None:
    """Notes that a tree is about to get a child for a failure of step `event_step`."""
    history.children += 1
    history.child_event_steps += step - event_step
    if len(tree.nodes) == 1:
        history.first_children += 1
        history.first_child_steps += step - tree.created_step
    if history.first_child_step == NEVER:
        history.first_child_step = step


def metrics(index: Index) -> dict[str, float]:
    """Depths of the active states, and what came of all states so far; what has no value yet is left out."""
    depths, c = index.depths, index.history
    values = {f"forest_depth/{depth}": depths[depth] for depth in range(1, DEEPEST)}
    values[f"forest_depth/from_{DEEPEST}"] = sum(n for depth, n in depths.items() if depth >= DEEPEST)
    values |= {"mastery/nodes": c.mastered, "mastery/reopened_roots": c.reopened, "transfer/trees": c.transfer_trees}
    if depths:
        values["forest_depth/mean"] = sum(depth * n for depth, n in depths.items()) / depths.total()
        values["forest_depth/max"] = max(depths)
    if c.mastered:
        values["mastery/visits_mean"] = c.mastered_visits / c.mastered
        values["mastery/steps_mean"] = c.mastered_steps / c.mastered
        values["mastery/unfailed_share"] = c.mastered_unfailed / c.mastered
    if c.first_children:
        values["mastery/first_node_step"] = c.first_child_step
        values["mastery/first_node_wait_mean"] = c.first_child_steps / c.first_children
        values["mastery/node_event_age_mean"] = c.child_event_steps / c.children
    if c.transfer_trees:
        before, after = (total / SCALE / c.transfer_trees for total in (c.transfer_before, c.transfer_after))
        values |= {"transfer/root_success_before": before, "transfer/root_success_after": after, "transfer/gain": after - before}
    return values


def event_ages(index: Index, step: int) -> dict[str, float]:
    """Steps that the failures have waited which the teacher could be given now; empty without any."""
    ages = sorted((step - made, n) for made, n in index.dispatchable_steps.items())
    if not ages:
        return {}
    total = index.num_dispatchable
    values = {"mean": sum(age * n for age, n in ages) / total, "max": float(ages[-1][0])}
    for percent in PERCENTILES:
        rank, seen = math.ceil(percent / 100 * total), 0
        for age, n in ages:
            seen += n
            if seen >= rank:
                values[f"p{percent}"] = float(age)
                break
    return {f"teacher/event_age_{name}": value for name, value in values.items()}
