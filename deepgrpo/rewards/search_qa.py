"""The grader of multi-hop search questions: hotpotqa, 2wikimultihopqa, musique, bamboogle.

The answer pairs of the response count that stand outside of thoughts, queries and retrieved passages. Each must say the same as
one of the golden answers (see `normalise`): a second one that does not is hedging. In training a part of the reward is for
structure: prefix and response, as one text, must be think -> (search -> information -> think)* -> answer, with nothing but white
space in between. In validation the reward is 0 or 1. A wrong answer earns up to 0.2 in training, and is a failure all the same:
success is the answer's part of the reward.
"""

import re

from deepgrpo.rewards import normalise
from deepgrpo.rewards.answer import MAX_STATED, Answer, own_words, usable_keys
from deepgrpo.types import TASK, Grade

LEAK = r"<\s*/?\s*answer\b"  # whatever the case: a locked prefix with this has stated an answer, or has begun to
STRUCTURE = 0.2  # reward of valid structure without a right answer; a right answer in invalid structure loses as much
ANSWERED = 0.1  # reward of a wrong answer in invalid structure

_TAG = re.compile(r"<(/?)(think|search|information|answer)>")
_THINK, _SEARCH, _INFORMATION, _ANSWER = (
    rf"\s*<{name}>(?:(?!</?(?:think|search|information|answer)>)[\s\S])*</{name}>"
    for name in ("think", "search", "information", "answer")
)
_STRUCTURE = re.compile(rf"{_THINK}(?:{_SEARCH}{_INFORMATION}{_THINK})*{_ANSWER}\s*")


def grade(answer: Answer) -> Grade:
    """Returns the reward for structure and answer; no verdict where the row has no usable golden answer."""
    response = own_words(answer.response)
    found = final_answers(answer.prefix, response)
    last = found[-1][:200] if found else ""
    if not (golden := usable_keys(answer.ground_truth)):
        return Grade(None, bool(found), "bad_key", last)
    right = bool(found) and all(any(normalise.same(key, one, normalise.Rules()) for key in golden) for one in found[-MAX_STATED:])
    reason = "right" if right else "wrong" if found else "unformatted"
    reward = task = float(right)
    if not answer.validation:
        valid = bool(response.strip()) and _STRUCTURE.fullmatch(answer.prefix + response) is not None
        reward = 1 - STRUCTURE * (not valid) if right else STRUCTURE if valid else ANSWERED * bool(found)
    # What is not for the right answer itself is a part of its own: it makes no success.
    parts = ((TASK, task), ("structure", reward - task)) if reward != task else ()
    return Grade(reward, bool(found), reason, last, parts=parts)


def final_answers(prefix: str, response: str) -> list[str]:
    """Returns what stands in the answer pairs that `response` opens and closes outside of other tags; [] if the last is empty."""
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
