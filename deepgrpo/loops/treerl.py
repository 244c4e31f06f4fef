"""TreeRL (Hou et al. 2025), a baseline: trees of responses in the place of a group of separate ones.

A prompt gets M responses. In each of L rounds every tree is forked before the N tokens that surprised the student most, T new
continuations each: M (1 + N L T) responses a prompt, if all forks fit. Each is graded as a whole; its tokens get the advantages
of the segments they are in, so that a response that is right after a fork teaches what the fork changed.
Validation and evaluation make plain single responses.
"""

import concurrent.futures
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from deepgrpo.loops import reasoning
from deepgrpo.loops.base import RolloutContext
from deepgrpo.rollout.engine import Request, sample_seed
from deepgrpo.types import Completion, Grade, Group, Prompt, Rollout, as_ids

MIN_PREFIX_RATIO = 0.05  # of a response that has no fork yet, tokens before its first fork
MIN_SUFFIX_TOKENS = 10  # of the old continuation that lie after a fork, and fewest tokens that a new one has room for


@dataclasses.dataclass(frozen=True, eq=False)
class Response:
    """One sampled continuation with all that came before it in its tree.

    completion: of the whole response, from the prompt's end. parent: the response that it was forked from, None for a tree's
    first. start: tokens that it has from the parent, at its beginning.
    """

    completion: Completion
    verdict: concurrent.futures.Future[Grade]
    parent: "Response | None"
    start: int


@dataclasses.dataclass(frozen=True, eq=False)
class Stem:
    """What an engine is to continue: a prompt and the first `start` tokens of `parent`'s response; a sample for each seed."""

    prompt: Prompt
    parent: Response | None
    start: int
    seeds: tuple[int, ...]


Tree = list[Response]  # its first response, then those forked from earlier ones


def run(
    shape: tuple[int, int, int, int], context: RolloutContext, prompts: Sequence[Prompt], step: int, purpose: str
) -> list[Group]:
    """Grows trees from every prompt; returns a group of all their responses, depth first, the older continuation first.

    `Prompt.n` is ignored. A continuation that was aborted is no part of its tree. All samples are of one version of the weights.

    Args:
      shape: `config.treerl`, (M, N, L, T): M trees for each prompt, L rounds of N forks, T new continuations at a fork.
      step, purpose: name the random streams, one a round, together with the prompt's place in `prompts` and the sample's among
        all that the prompt could have.

    Raises:
      TimeoutError: not one answer was graded within `context.grading_deadline` seconds after the last continuation.
    """
    M, N, L, T = shape
    if purpose.startswith(reasoning.MEASURING):
        return reasoning.run(context, prompts, step, purpose)

    def seeds(rounds: int, i: int, first: int, n: int) -> tuple[int, ...]:
        stream = f"{purpose}:round {rounds}"
        return tuple(sample_seed(context.seed, step, stream, i, first + j) for j in range(n))

    stems = [Stem(prompt, None, 0, seeds(0, i, 0, M)) for i, prompt in enumerate(prompts)]
    forests = [[[response] for response in responses] for responses in sample(context, stems)]
    for rounds in range(1, L + 1):
        stems, grown = [], []
        for i, (prompt, forest) in enumerate(zip(prompts, forests, strict=True)):
            limit = context.sampling.max_model_len - len(prompt.ids) - MIN_SUFFIX_TOKENS
            for m, tree in enumerate(forest):
                for k, (response, start) in enumerate(forks(tree, N)):
                    if start < limit:
                        first = (m * N + k) * T
                        stems.append(Stem(prompt, response, start, seeds(rounds, i, first, T)))
                        grown.append(tree)
        for tree, responses in zip(grown, sample(context, stems), strict=True):
            tree += responses
    verdicts = [response.verdict for forest in forests for tree in forest for response in tree]
    reasoning.wait_for_verdicts(context, verdicts, step)
    return [scored(prompt, forest) for prompt, forest in zip(prompts, forests, strict=True)]


def sample(context: RolloutContext, stems: Sequence[Stem]) -> list[list[Response]]:
    """Continues every stem, and hands each whole response to the graders as soon as it is there."""
    if not stems:
        return []
    found: dict[tuple[int, int], Response] = {}

    def grade(i: int, j: int, continuation: Completion) -> None:
        if continuation.finish_reason != "abort":
            stem = stems[i]
            whole = reasoning.full_is_truncated(context, stem.prompt, joined(stem, continuation))
            verdict = context.grading.submit(reasoning.as_answer(context, stem.prompt, whole))
            found[i, j] = Response(whole, verdict, stem.parent, stem.start)

    context.engine.generate([Request(given_ids(stem), stem.seeds) for stem in stems], context.sampling, on_done=grade)
    return [[found[i, j] for j in range(len(stem.seeds)) if (i, j) in found] for i, stem in enumerate(stems)]


def given_ids(stem: Stem) -> np.ndarray:
    """The ids that are continued, all of them as they were sampled: int32[len]."""
    if stem.parent is None:
        return stem.prompt.ids
    return as_ids(np.concatenate([stem.prompt.ids, stem.parent.completion.ids[: stem.start]]))


def joined(stem: Stem, continuation: Completion) -> Completion:
    """A continuation with the response's tokens before it; their log-probs are those of when they were sampled."""
    if stem.parent is None:
        return continuation
    before = stem.parent.completion
    return dataclasses.replace(
        continuation,
        ids=as_ids(np.concatenate([before.ids[: stem.start], continuation.ids])),
        logps=np.concatenate([before.logps[: stem.start], continuation.logps]),
        version=min(before.version, continuation.version),
    )


def forks(tree: Tree, n: int) -> list[tuple[Response, int]]:
    """The n places of a tree to fork next, the most surprising first: (response, tokens of it that stay).

    Only the tokens of leaf segments are considered, which no two responses share.
    """
    places, scores = [], []
    for parent, length, response in segments(tree):
        if response is not None:
            begin = len(response.completion.ids) - length
            logps = response.completion.logps[begin:]
            positions = fork_candidates(logps, MIN_PREFIX_RATIO if parent < 0 else 0.0)
            places += [(response, begin + int(position)) for position in positions]
            scores.append(-logps[positions])
    return [places[i] for i in most_surprising(np.concatenate(scores), n)] if places else []


def segments(tree: Tree) -> list[tuple[int, int, Response | None]]:
    """A tree's segments, depth first: (index of the parent, -1 for the first; tokens; the response that it ends)."""
    children: dict[tuple[Response, int], list[Response]] = {}
    for response in tree[1:]:
        children.setdefault((response.parent, response.start), []).append(response)
    found: list[tuple[int, int, Response | None]] = []

    def add(response: Response, parent: int) -> None:
        begin, above = response.start, []
        for start in sorted(start for forked, start in children if forked is response):
            found.append((parent, start - begin, None))
            begin, parent = start, len(found) - 1
            above.append((start, parent))
        found.append((parent, len(response.completion.ids) - begin, response))
        for start, parent in reversed(above):
            for child in children[response, start]:
                add(child, parent)

    add(tree[0], -1)
    return found


def scored(prompt: Prompt, forest: Sequence[Tree]) -> Group:
    """The group of a prompt's trees. Its responses without a verdict stay in it, without advantages."""
    listed: list[Segment] = []
    responses: list[Response] = []
    for tree in forest:
        offset = len(listed)
        for parent, length, response in segments(tree):
            parent = parent + offset if parent >= 0 else -1
            reward = None if response is None else reasoning.verdict_of(response.verdict).reward
            listed.append(Segment(parent, length, response is not None, reward))
            responses += [] if response is None else [response]
    advantages: Iterator[np.ndarray] = iter(token_advantages(listed))
    rollouts = []
    for response in responses:
        grade = reasoning.verdict_of(response.verdict)
        rollouts.append(Rollout(response.completion, grade, None if grade.reward is None else next(advantages), response.start))
    return Group(dataclasses.replace(prompt, n=len(rollouts)), tuple(rollouts))


#### The numbers: where a tree is forked, and what its tokens earned, in float64 on the host
#
# A tree's nodes are *segments*: runs of response tokens between forks. A leaf ends a response; what is above it is its path.


@dataclasses.dataclass(frozen=True)
class Segment:
    """A node of the trees of one prompt.

    parent: index of the segment before it, which comes earlier in the list; -1: it is a tree's first. length: tokens.
    leaf: it ends a response. reward: of that response; None: it has no verdict, or the segment is no leaf.
    """

    parent: int
    length: int
    leaf: bool = False
    reward: float | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Values:
    """What the segments of a prompt's trees are worth.

    root: V_root, mean reward of all judged leaves. value: float64[n], V. leaves: int64[n], judged leaves below. advantage:
    float64[n], R. Segments above no judged leaf have 0 of each.
    """

    root: float
    value: np.ndarray
    leaves: np.ndarray
    advantage: np.ndarray


def fork_candidates(
    logps: np.ndarray, min_prefix_ratio: float = MIN_PREFIX_RATIO, min_suffix_tokens: int = MIN_SUFFIX_TOKENS
) -> np.ndarray:
    """Positions p of a segment's tokens before which it may be forked: int64[m], rising.

    max(1, int(min_prefix_ratio * n)) <= p <= n - min_suffix_tokens. In the trees, the ratio counts for a response without a fork
    only: below one it is 0.

    Args:
      logps: float[n], log-probs of the segment's tokens.
    """
    n = len(logps)
    return np.arange(max(1, int(min_prefix_ratio * n)), n - min_suffix_tokens + 1)


def most_surprising(scores: np.ndarray, n: int) -> np.ndarray:
    """Indices of the at most n highest scores (-log p of sampled tokens), highest first, of equals the first: int64[<= n]."""
    return np.argsort(-np.asarray(scores, np.float64), kind="stable")[:n]


def values(segments: Sequence[Segment]) -> Values:
    """V and R of every segment.

        V(s) = mean reward of the judged leaves below s
        R(s) = (V(s) - V_root + V(s) - V(parent)) / sqrt(judged leaves below s)      the second difference is 0 for a tree's first

    A leaf without a verdict counts nowhere. Equal rewards give exactly 0.

    Args:
      segments: of all trees of one prompt.
    """
    rewards = [s.reward for s in segments if s.leaf and s.reward is not None]
    origin = rewards[0] if rewards else 0.0  # a reward of their own as origin: the means of equal rewards are then exact
    leaves, total = np.zeros(len(segments), np.int64), np.zeros(len(segments))
    for i, segment in reversed(list(enumerate(segments))):
        if segment.leaf and segment.reward is not None:
            leaves[i], total[i] = 1, segment.reward - origin
        if segment.parent >= 0:
            leaves[segment.parent] += leaves[i]
            total[segment.parent] += total[i]
    V = total / np.maximum(leaves, 1)
    parent = np.array([s.parent for s in segments], np.int64)
    root = float(total[parent < 0].sum()) / max(len(rewards), 1)
    local = np.where(parent >= 0, V - V[parent], 0.0)
    R = np.where(leaves > 0, (V - root + local) / np.sqrt(np.maximum(leaves, 1)), 0.0)
    return Values(root + origin, np.where(leaves > 0, V + origin, 0.0), leaves, R)


def token_advantages(segments: Sequence[Segment]) -> list[np.ndarray]:
    """For each judged leaf, in their order, R of the segment that each token of its path belongs to: float64[path length]."""
    R, paths, found = values(segments).advantage, [], []
    for segment, advantage in zip(segments, R, strict=True):
        before = [paths[segment.parent]] if segment.parent >= 0 else []
        paths.append(np.concatenate([*before, np.full(segment.length, advantage)]))
        if segment.leaf and segment.reward is not None:
            found.append(paths[-1])
    return found
