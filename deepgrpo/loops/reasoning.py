"""One request, one answer: the loop of the mathematics tasks (and of every task without tools)."""

import concurrent.futures
import dataclasses
import logging
from collections.abc import Sequence

from deepgrpo.loops.base import RolloutContext
from deepgrpo.rewards.grade import Answer
from deepgrpo.rollout.engine import Request, sample_seed
from deepgrpo.telemetry import waits
from deepgrpo.types import Completion, Grade, Group, Ids, Prompt, Rollout

log = logging.getLogger(__name__)

MEASURING = ("validation", "evaluation")  # how the purposes begin whose rollouts only measure; others train


def run(context: RolloutContext, prompts: Sequence[Prompt], step: int, purpose: str) -> list[Group]:
    """Rolls every prompt out `prompt.n` times and grades each answer as soon as it is finished.

    A completion that was aborted is left out of its group: it is neither a success nor a failure.

    Args:
      step, purpose: name the random stream ("train", "validation"), together with the prompt's place in `prompts`.

    Raises:
      TimeoutError: not one answer was graded within `context.grading_deadline` seconds after the last completion.
    """
    requests = [
        Request(p.ids, tuple(sample_seed(context.seed, step, purpose, i, j) for j in range(p.n))) for i, p in enumerate(prompts)
    ]
    verdicts: dict[tuple[int, int], concurrent.futures.Future[Grade]] = {}

    def grade(i: int, j: int, completion: Completion) -> None:
        if completion.finish_reason != "abort":
            completion = full_is_truncated(context, prompts[i], completion)
            verdicts[i, j] = context.grading.submit(as_answer(context, prompts[i], completion, purpose))

    completions = context.engine.generate(requests, context.sampling, on_done=grade)
    wait_for_verdicts(context, list(verdicts.values()), step)
    return [
        Group(
            p,
            tuple(
                Rollout(full_is_truncated(context, p, completion), verdict_of(verdicts[i, j]))
                for j, completion in enumerate(completions[i])
                if (i, j) in verdicts
            ),
        )
        for i, p in enumerate(prompts)
    ]


def wait_for_verdicts(context: RolloutContext, verdicts: Sequence[concurrent.futures.Future[Grade]], step: int) -> None:
    """Waits `context.grading_deadline` seconds at most. An answer that is not graded by then has no verdict (`verdict_of`).

    Raises:
      TimeoutError: none is: that is the service, not the answers.
    """
    with waits.on(lambda: f"{sum(not v.done() for v in verdicts)} of {len(verdicts)} verdicts (rewards.deadline)"):
        done, late = concurrent.futures.wait(verdicts, timeout=context.grading_deadline)
    for future in late:
        future.cancel()
    if late:
        wait = f"{context.grading_deadline:.0f} s after the last rollout"
        said = f"step {step}: {len(late)} of {len(verdicts)} answers had no verdict {wait}"
        if not done:
            raise TimeoutError(f"{said}; the grading service hangs (rewards.workers, rewards.deadline)")
        log.warning("%s, and are left out; more rewards.workers or a shorter rewards.deadline would help", said)


def verdict_of(future: "concurrent.futures.Future[Grade]") -> Grade:
    """What an answer's grading came to; it is not waited for."""
    finished = future.done() and not future.cancelled()
    return future.result() if finished else Grade(None, False, "unfinished")


def full_is_truncated(context: RolloutContext, prompt: Prompt, completion: Completion) -> Completion:
    """An answer that ends exactly where the context does counts as truncated, as in the reference."""
    full = len(prompt.ids) + len(completion.ids) >= context.sampling.max_model_len
    return dataclasses.replace(completion, finish_reason="length") if full else completion


def as_answer(context: RolloutContext, prompt: Prompt, completion: Completion, purpose: str = "train") -> Answer:
    """The text that the grader sees: what the student wrote now, with its locked prefix apart; stop ids are not text."""
    problem = prompt.problem
    locked = prompt.ids[len(problem.prompt_ids) :]
    ended = completion.ids[len(without_stop(context, completion.ids)) :]
    return Answer(
        data_source=problem.data_source,
        question=problem.question,
        prefix=context.tokenizer.decode(locked.tolist()),
        response=text_of(context, completion.ids),
        finish_reason=completion.finish_reason,
        ground_truth=problem.ground_truth,
        extra=problem.extra,
        validation=purpose.startswith(MEASURING),
        prompt=context.tokenizer.decode(prompt.ids.tolist()),
        ending=context.tokenizer.decode(ended.tolist()),
    )


def text_of(context: RolloutContext, ids: Ids) -> str:
    return context.tokenizer.decode(without_stop(context, ids).tolist())


def without_stop(context: RolloutContext, ids: Ids) -> Ids:
    return ids[:-1] if len(ids) and int(ids[-1]) in context.sampling.stop_ids else ids
