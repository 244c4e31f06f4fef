"""The grader of multi-hop search questions: hotpotqa, 2wikimultihopqa, musique, bamboogle.

The answer pairs of the response count that stand outside of thoughts, queries and retrieved passages. Each must say the same as
one of the golden answers (see `normalise`): a second one that doesn't is hedging. In training a part of the reward is for
structure: prefix and response, one text, must be think -> (search -> information -> think)* -> answer, with nothing but white
space in between. In validation the reward is plain 0 or 1. A wrong answer earns up to 0.2 in training, and is a failure all the
same: success is the answer's part.
"""

import collections
import dataclasses
import re
from collections.abc import Sequence

from deepgrpo.rewards import marks, normalise
from deepgrpo.rewards.answer import Answer, own_words
from deepgrpo.types import TASK, Grade

LEAK = r"<\s*/?\s*answer\b"  # whatever the case: a locked prefix with this has stated an answer, or has begun to

_TAG = re.compile(r"<(/?)(think|search|information|answer)>")
_NEXT = {  # state between tags: what may open
    "start": {"think"},
    "after think": {"search", "answer"},
    "after search": {"information"},
    "after information": {"think"},
    "after answer": set(),
}
_PROMPT_PAIRS = 2  # answer pairs that the reference's prompt holds
_ASSISTANT = ("<|im_start|>assistant", "<|start_header_id|>assistant<|end_header_id|>")


@dataclasses.dataclass(frozen=True)
class Levels:
    """What an outcome is worth.

    right: a right answer in valid structure.
    structure: valid structure without a right answer; a right answer in invalid structure loses as much.
    answered: a wrong answer in invalid structure.
    retrieved: added where a passage holds a golden answer, if the structure is valid and the answer is not right.
    """

    right: float = 1.0
    structure: float = 0.2
    answered: float = 0.1
    retrieved: float = 0.0


TRAINING = Levels()
VALIDATION = Levels(structure=0.0, answered=0.0)


def grade(answer: Answer, training: Levels = TRAINING, validation: Levels = VALIDATION) -> Grade:
    """The reward by structure and answer; no verdict where the row has no usable golden answer."""
    golden = golden_answers(answer.ground_truth)
    response = own_words(answer.response)
    found = final_answers(answer.prefix, response)
    last = found[-1][:200] if found else ""
    if not golden:
        return Grade(None, bool(found), "bad_key", last)
    valid = bool(response.strip()) and valid_structure(answer.prefix + response)
    right = bool(found) and all(
        any(normalise.same(key, one, normalise.Rules()) for key in golden) for one in found[-marks.MAX_STATED :]
    )
    levels = validation if answer.validation else training
    hit = levels.retrieved > 0 and valid and retrieved(response, golden)
    reason = "right" if right else "wrong" if found else "unformatted"
    return _grade(levels, bool(found), right, valid, hit, bool(found), reason, last)


def _grade(levels: Levels, answered: bool, right: bool, valid: bool, hit: bool, completed: bool, reason: str, text: str) -> Grade:
    """The grade of an outcome. What is not for the right answer itself is a part of its own: it makes no success."""
    if right:
        reward = levels.right if valid else levels.right - levels.structure
    else:
        reward = levels.structure + levels.retrieved * hit if valid else levels.answered * answered
    task = levels.right * right
    return Grade(reward, completed, reason, text, parts=((TASK, task), ("structure", reward - task)) if reward != task else ())


def golden_answers(ground_truth: str | Sequence[str]) -> list[str]:
    """The accepted answers of a row, without empty ones."""
    golden = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    return [text for one in golden if one is not None and (text := str(one).strip())]


def final_answers(prefix: str, response: str) -> list[str]:
    """Contents of the answer pairs that `response` opens and closes outside of other tags; none if the last one is empty."""
    text = prefix + response
    tags = list(_TAG.finditer(text))
    last_close = {tag[2]: tag.start() for tag in tags if tag[1]}
    inside, opened, found = "", None, []
    for tag in tags:
        closes, name = bool(tag[1]), tag[2]
        if inside:
            inside = "" if closes and name == inside else inside
        elif name == "answer":
            if closes and opened is not None:
                found.append(text[opened : tag.start()].strip())
            opened = tag.end() if not closes and tag.start() >= len(prefix) else None
        elif not closes and last_close.get(name, -1) > tag.start():
            inside, opened = name, None
    return list(filter(None, found)) if found and found[-1] else []


def valid_structure(text: str) -> bool:
    """Whether the tags of `text` follow the automaton, with free text only inside of them."""
    state, end = "start", 0
    for tag in _TAG.finditer(text):
        closes, name = bool(tag[1]), tag[2]
        if state in _NEXT:
            if closes or name not in _NEXT[state] or text[end : tag.start()].strip():
                return False
            state = name
        elif not closes or name != state:
            return False
        else:
            state = f"after {name}"
        end = tag.end()
    return state == "after answer" and not text[end:].strip()


def retrieved(text: str, golden: Sequence[str]) -> bool:
    """Whether an information block of `text` holds one of the golden answers, word for word."""
    passages = pairs(text, "<information>", "</information>")
    return any(
        f" {key} " in f" {passage} "
        for block in passages
        for passage in normalise.words(block)
        for g in golden
        for key in normalise.words(g)
    )


def token_f1(found: str, golden: Sequence[str]) -> float:
    """Best F1 in [0, 1] of an answer's words against a golden answer's: the soft metric of SQuAD (Rajpurkar et al. 2016)."""
    return max(
        (_f1(a.split(), k.split()) for key in golden for k in normalise.words(key) for a in normalise.words(found)), default=0.0
    )


def _f1(found: list[str], wanted: list[str]) -> float:
    shared = sum((collections.Counter(found) & collections.Counter(wanted)).values())
    return 2 * shared / (len(found) + len(wanted)) if shared else 0.0


#### As the reference does it


def grade_strict_reference(answer: Answer) -> Grade:
    """The public reference's verdict on the whole transcript, faults included; `completed` means right, as there.

    Its answer is the last of more than two pairs anywhere (the prompt is expected to hold two), and with the end-of-turn token,
    which counts as text after the answer, no structure is valid.
    """
    levels = VALIDATION if answer.validation else TRAINING
    text = answer.transcript
    found = pairs(text, "<answer>", "</answer>")
    golden = [without_punctuation(str(key)) for key in _listed(answer.ground_truth)]
    header = min(((text.find(h), h) for h in _ASSISTANT if h in text), default=None)
    valid = header is not None and valid_structure(text[header[0] + len(header[1]) :])
    answered = len(found) > _PROMPT_PAIRS
    right = answered and without_punctuation(found[-1]) in golden
    reason = "right" if right else "wrong" if answered else "unformatted"
    return _grade(levels, answered, right, valid, False, right, reason, found[-1].strip()[:200] if answered else "")


def pairs(text: str, opening: str, closing: str) -> list[str]:
    """What the expression `opening(.*?)closing` finds in `text`, one after the other, in linear time."""
    found, at = [], 0
    while (start := text.find(opening, at)) >= 0 and (end := text.find(closing, start + len(opening))) >= 0:
        found.append(text[start + len(opening) : end])
        at = end + len(closing)
    return found


def _listed(ground_truth: str | Sequence[str]) -> Sequence[str]:
    return ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]


def without_punctuation(text: str) -> str:
    """Lower case, without ASCII punctuation, articles and extra spaces."""
    text = re.sub(r"[!-/:-@\[-`{-~]", "", text.lower())
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", text).split())
