"""The graders of the public reference as they behave, for numbers that can be compared with published ones.

`rewards.grader=compat_fast` is what the reference's training and its own validation do (stages A or B: there math-verify never
gets to work, because its alarms need a main thread); `compat_full` is what the same code does in a stand-alone evaluation script
(A or B or C). Both grade the whole transcript: prompt, locked prefix, response and end-of-turn token. Known faults are kept:
deleted variables, hangs on towers of powers, free rewards for empty keys, and so on; a hang ends as wrong, by the service's
deadline. They concern mathematics and GSM8K; `config.strict_reference` is another switch and does not turn them on.
"""

import re
from collections.abc import Callable, Sequence

from deepgrpo.rewards import strict_stages
from deepgrpo.rewards.answer import Answer
from deepgrpo.types import Grade

FAST = (strict_stages.same_text, strict_stages.same_algebra)
FULL = (*FAST, strict_stages.same_by_math_verify)
STAGES = {"compat_fast": FAST, "compat_full": FULL}

_ASSISTANT = ("<|im_start|>assistant", "<|start_header_id|>assistant<|end_header_id|>", "[/INST]", "### Assistant:", "Assistant:")
_TURN_ENDS = re.compile(r"<\|im_end\|>|<\|eot_id\|>|<\|endoftext\|>")
_FINAL_MARK = re.compile(r"####\s*\$?\s*(?:\\boxed|[+-]?\d)")
_NUMBER_RUN = re.compile(r"-?[0-9.,]+")
_STRICT_MARK = re.compile(r"#### (-?[0-9.,]+)")


def warm_up() -> None:
    """Imports what the stages need (sympy, math-verify, pylatexenc)."""
    strict_stages.same_algebra("\\frac{x}{2}", "x/2 + 0*x")
    strict_stages.same_by_math_verify("\\frac{x}{3}", "x/3")


#### Boxes


def grade_boxed(answer: Answer, mode: str) -> Grade:
    """1 if the transcript's last box equals one of the keys by one of the mode's stages."""
    return _by_stages(box(answer.transcript), answer, mode)


def grade_tagged(answer: Answer, mode: str, lenient: bool) -> Grade:
    """The same for R1-style answer tags; what stands between the last pair, or its box, is the answer."""
    text = answer.prefix + answer.response
    found = ("<answer>" in text if lenient else "</think> <answer>" in text) and "</answer>" in text
    if not found:
        return Grade(0.0, False, "unformatted")
    inside = text.rpartition("<answer>")[2].replace("</answer>", "")
    return _by_stages(box(inside) if "\\boxed" in inside else inside, answer, mode)


def _by_stages(found: str | None, answer: Answer, mode: str) -> Grade:
    if found is None:
        return Grade(0.0, False, "unformatted")
    right = any(equal(found, key, STAGES[mode]) for key in keys(answer.ground_truth))
    return Grade(float(right), True, "right" if right else "wrong", found[:200])


def box(text: str) -> str | None:
    """Content of the last box: braces are counted, escaped ones too; the opening brace must follow at once."""
    start = text.rfind("\\boxed")
    if not text.startswith("\\boxed{", start) or start < 0:
        return None
    depth = 0
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[start + len("\\boxed{") : start + brace.start()]
    return None


def keys(ground_truth) -> list[str]:
    """The accepted answers as they are stored; of a key that holds a box, the box. One whose box is broken matches nothing.

    Raises:
      TypeError: a key is neither text nor a number.
    """
    texts = []
    for key in ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]:
        if not isinstance(key, str | int | float):
            raise TypeError(f"a key must be text or a number, got {key!r}")
        texts.append(box(str(key)) if "\\boxed" in str(key) else str(key))
    return [text for text in texts if text is not None]


def equal(found: str, key: str, stages: Sequence[Callable[[str, str], bool]] = FULL) -> bool:
    """Whether an answer equals a key by one of the stages, asked in order."""
    return any(stage(found, key) for stage in stages)


#### DeepScaleR


def grade_formula(answer: Answer) -> Grade:
    """1 if math-verify finds one of the keys among what it reads in the transcript: a box, or any formula or number at its end.

    The reference runs this in processes' main threads, so the library's own time limits hold, in both modes.
    """
    found = keys(answer.ground_truth)
    right = strict_stages.by_metric([f"\\boxed{{{key}}}" for key in found], answer.transcript)
    return Grade(float(right), True, "right" if right else "wrong")


#### GSM8K


def grade_gsm8k(answer: Answer, only_mark: bool = False) -> Grade:
    """1 if the transcript's last run of digits, dots and commas is the key, character by character.

    only_mark: the reference's strict method, which it does not use: the number right after the last `#### `, without commas.
    """
    text = answer.transcript
    own = _assistant_part(text)
    if len(_FINAL_MARK.findall(own)) > 1 or own.count("\\boxed") > 1:
        return Grade(0.0, False, "hedge")
    if only_mark:
        stated = _STRICT_MARK.findall(text)
        found = stated[-1].replace(",", "").replace("$", "") if stated else None
    else:
        runs = [run for run in _NUMBER_RUN.findall(text) if run != "."]
        found = runs[-1] if runs else None
    if found is None:
        return Grade(0.0, False, "unformatted")
    right = found == str(answer.ground_truth)
    return Grade(float(right), True, "right" if right else "wrong", found[:200])


def _assistant_part(text: str) -> str:
    """What the rule against two answers looks at: what follows the last header of an assistant's turn, up to that turn's end."""
    starts = [(at, marker) for marker in _ASSISTANT if (at := text.rfind(marker)) >= 0]
    if starts:
        at, marker = max(starts)
        text = text[at + len(marker) :].lstrip()
        text = text[: end.start()] if (end := _TURN_ENDS.search(text)) else text
    return text
