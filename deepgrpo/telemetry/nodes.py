"""Hard states of a step by their age, what they lean on, and their share of the gradient."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from deepgrpo.learner.objective import BRANCH, MAIN
from deepgrpo.learner.rows import Row
from deepgrpo.types import Group, Ids

AGES = ((0, 1), (2, 4), (5, 9), (10, 19), (20, 49), (50, None))  # steps since a state was made, inclusive

Fetch = Callable[[], list[np.ndarray]]  # log-probs of sequences that were enqueued for scoring


@dataclasses.dataclass(frozen=True, eq=False)
class Rolled:
    """A hard state that a step rolled out. about: `Curriculum.look_up` of it, before the step's groups were observed."""

    group: Group
    about: Mapping[str, Any]


def rolled(groups: Sequence[Group], look_up: Callable[[Any], Mapping[str, Any]]) -> list[Rolled]:
    """The step's hard states that are judged, as far as the curriculum knows them."""
    found = [Rolled(g, look_up(g.prompt.node)) for g in groups if g.prompt.injected and g.judged]
    return [state for state in found if "created_step" in state.about]


def bucket(age: int) -> str:
    low, high = next((low, high) for low, high in AGES if high is None or age <= high)
    return f"from_{low}" if high is None else f"{low}_to_{high}"


def ages(states: Sequence[Rolled], step: int, threshold: float) -> dict[str, float]:
    """`node_age/*`: steps since the states were made, and by bucket of these, groups and successes over rollouts."""
    if not states:
        return {}
    steps = [step - state.about["created_step"] for state in states]
    metrics = {"node_age/mean": sum(steps) / len(steps), "node_age/max": float(max(steps))}
    for name, members in by_age(states, step).items():
        counts = [state.group.successes(threshold) for state in members]
        metrics[f"node_age/{name}/groups"] = float(len(members))
        metrics[f"node_age/{name}/success_rate"] = sum(k for k, _ in counts) / sum(n for _, n in counts)
    return metrics


def by_age(states: Sequence[Rolled], step: int) -> dict[str, list[Rolled]]:
    found: dict[str, list[Rolled]] = {}
    for state in states:
        found.setdefault(bucket(step - state.about["created_step"]), []).append(state)
    return found


def hint_reliance(states: Sequence[Rolled], threshold: float) -> dict[str, float]:
    """`transfer/hint_reliance`: success at the states minus the newest known success at their roots, a mean over states whose
    root was observed."""
    gaps = [
        k_succ / k_total - state.about["root_success_rate"]
        for state in states
        if state.about.get("root_success_rate") is not None
        for k_succ, k_total in [state.group.successes(threshold)]
    ]
    return {"transfer/hint_reliance": sum(gaps) / len(gaps)} if gaps else {}


#### Log-probs by age: how far the policy has moved from what it once wrote, and from what the engine sampled now


def sequences(states: Sequence[Rolled]) -> list[tuple[Ids, Ids]]:
    """(the problem's prompt, locked prefix and response) of every rollout, for `Learner.start_score`."""
    pairs = []
    for state in states:
        start = len(state.group.prompt.problem.prompt_ids)
        prompt, locked = state.group.prompt.ids[:start], state.group.prompt.ids[start:]
        pairs += [(prompt, np.concatenate([locked, r.completion.ids])) for r in state.group.rollouts]
    return pairs


def scores(states: Sequence[Rolled], logps: Sequence[np.ndarray], step: int) -> dict[str, float]:
    """`node_age/<bucket>/{mismatch,prefix_logp}`: mean |learner - engine| log-prob of the sampled tokens; mean log-prob that the
    present policy gives the tokens of the locked prefixes, one rollout of an older policy each.

    logps: float32[tokens] each, of `sequences(states)`.
    """
    found = iter(logps)
    of_state = {id(state): [next(found) for _ in state.group.rollouts] for state in states}
    metrics = {}
    for name, members in by_age(states, step).items():
        prefixes, gaps = [], []
        for state in members:
            locked = state.group.prompt.locked
            mine = of_state[id(state)]
            prefixes += mine[:1] and [mine[0][:locked]]
            gaps += [np.abs(m[locked:] - r.completion.logps) for m, r in zip(mine, state.group.rollouts, strict=True)]
        for key, values in (("prefix_logp", prefixes), ("mismatch", gaps)):
            tokens = np.concatenate(values).astype(np.float64) if values else np.zeros(0)
            if len(tokens):
                metrics[f"node_age/{name}/{key}"] = float(tokens.mean())
    return metrics


#### The step's rows


def gradient_shares(rows: Sequence[Row]) -> dict[str, float]:
    """`data/gradient_share_{original,synthetic,branch}`: parts of the students' sum of |advantage| over the tokens that train."""
    parts = dict.fromkeys(("original", "synthetic", "branch"), 0.0)
    for row in rows:
        if row.source in (MAIN, BRANCH):
            name = "branch" if row.source == BRANCH else "synthetic" if row.injected else "original"
            parts[name] += float(np.abs(row.token_advantages).sum())
    total = sum(parts.values())
    return {f"data/gradient_share_{name}": value / total for name, value in parts.items()} if total else {}
