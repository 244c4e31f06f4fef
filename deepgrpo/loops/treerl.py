"""TreeRL (Hou et al. 2025), a baseline: trees of responses in the place of a group of separate ones.

A prompt gets M responses. In each of L rounds every tree is forked before the N tokens that surprised the student most, T new
continuations each: M (1 + N L T) responses a prompt, if all forks fit. Each is graded as a whole; its tokens get the advantages
of the segments they are in (`treerl_tree`), so that a response that is right after a fork teaches what the fork changed.
Validation and evaluation make plain single responses.
"""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import ml_collections
import numpy as np

from deepgrpo.loops import reasoning, treerl_tree
from deepgrpo.loops.base import RolloutContext
from deepgrpo.loops.treerl_tree import MIN_PREFIX_RATIO, MIN_SUFFIX_TOKENS, Segment
from deepgrpo.rollout.engine import Request, sample_seed
from deepgrpo.types import Completion, Grade, Group, Prompt, Rollout, as_ids


@dataclasses.dataclass(frozen=True)
class Shape:
    """M: trees a prompt. N: forks of a tree in a round. L: rounds. T: new continuations of a fork."""

    M: int
    N: int
    L: int
    T: int


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


def create(config: ml_collections.ConfigDict) -> Callable[[RolloutContext, Sequence[Prompt], int, str], list[Group]]:
    """The loop with the forks of the configuration's section `treerl`."""
    keys = config.treerl
    return functools.partial(run, Shape(keys.M, keys.N, keys.L, keys.T))


def run(shape: Shape, context: RolloutContext, prompts: Sequence[Prompt], step: int, purpose: str) -> list[Group]:
    """Grows trees from every prompt; returns a group of all their responses, depth first, the older continuation first.

    `Prompt.n` is ignored. A continuation that was aborted is no part of its tree. All samples are of one version of the weights.

    Args:
      step, purpose: name the random streams, one a round, together with the prompt's place in `prompts` and the sample's among
        all that the prompt could have.

    Raises:
      TimeoutError: not one answer was graded within `context.grading_deadline` seconds after the last continuation.
    """
    if purpose.startswith(reasoning.MEASURING):
        return reasoning.run(context, prompts, step, purpose)

    def seeds(rounds: int, i: int, first: int, n: int) -> tuple[int, ...]:
        stream = f"{purpose}:round {rounds}"
        return tuple(sample_seed(context.seed, step, stream, i, first + j) for j in range(n))

    stems = [Stem(prompt, None, 0, seeds(0, i, 0, shape.M)) for i, prompt in enumerate(prompts)]
    forests = [[[response] for response in responses] for responses in sample(context, stems)]
    for rounds in range(1, shape.L + 1):
        stems, grown = [], []
        for i, (prompt, forest) in enumerate(zip(prompts, forests, strict=True)):
            limit = context.sampling.max_model_len - len(prompt.ids) - MIN_SUFFIX_TOKENS
            for m, tree in enumerate(forest):
                for k, (response, start) in enumerate(forks(tree, shape.N)):
                    if start < limit:
                        first = (m * shape.N + k) * shape.T
                        stems.append(Stem(prompt, response, start, seeds(rounds, i, first, shape.T)))
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
            positions = treerl_tree.fork_candidates(logps, MIN_PREFIX_RATIO if parent < 0 else 0.0)
            places += [(response, begin + int(position)) for position in positions]
            scores.append(-logps[positions])
    return [places[i] for i in treerl_tree.most_surprising(np.concatenate(scores), n)] if places else []


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
    advantages: Iterator[np.ndarray] = iter(treerl_tree.token_advantages(listed))
    rollouts = []
    for response in responses:
        grade = reasoning.verdict_of(response.verdict)
        rollouts.append(Rollout(response.completion, grade, None if grade.reward is None else next(advantages), response.start))
    return Group(dataclasses.replace(prompt, n=len(rollouts)), tuple(rollouts))
