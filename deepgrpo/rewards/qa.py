"""The graders of questions whose answers are words, numbers or dates: about tables, DABench, and multi-hop search.

Tables and DABench have one extractor: the answer pairs of the response (`<Answer>` or `<answer>`), each of which must be right,
or else its last `Answer:` line. A response without either has no final answer. The comparison is the source's (`RULES`):

    finqa               numbers agree in the coarser of the two written precisions (see `normalise.rounded`); (3.2) is -3.2
    multihiertt         numbers agree within 1e-5 of the key
    wikitq              exact; a key of several items is a list in any order
    DABench             values by name, `@name[value]`, all of which must be there: equal as text, as lists, or within 1e-6
    all others          exact
"""

import re
from typing import Any

from deepgrpo.rewards import latex, normalise
from deepgrpo.rewards.answer import MAX_STATED, Answer, own_words, usable_keys, worst
from deepgrpo.types import STUDENT, TASK, Grade

PLAIN = normalise.Rules(bare_units=True)
RULES = {
    "finqa": normalise.Rules(normalise.rounded, bare_units=True, accounting=True),
    "multihiertt": normalise.Rules(normalise.nearly, bare_units=True),
}
LISTS = frozenset({"wikitq"})  # sources whose key may be a list

_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_MARK = re.compile(r"\banswer\b[*_ ]{0,4}[:\uff1a]", re.IGNORECASE)
_END = re.compile(r"\n\s*\n|\bused cells\s*:", re.IGNORECASE)
_SENTENCE = re.compile(
    r"(?:(?:so|thus|therefore|hence)\b[, ]{0,3})?(?:(?:the|my) )?(?:(?:final|correct) )?answer (?:is|was|=):? ?", re.IGNORECASE
)
_IN_SCALE = re.compile(r"(?:\bin |\()(?:u\.?s\.? )?(?:\w+ (?:of )?)?(?:thousands|millions|billions)\b", re.IGNORECASE)
_WRAPPERS = " \t\r\n*_`\"'\u201c\u201d\u2018\u2019"


def grade_table(answer: Answer) -> Grade:
    """Returns 1 if the final answer says the same as the key, else 0; no verdict where the row has no usable key."""
    found, keys = stated(own_words(answer.response)), usable_keys(answer.ground_truth)
    if len(keys) > 1 and answer.data_source in LISTS:
        keys = ["|".join(keys)]  # one key's items; elsewhere a list holds choices
    if not keys:
        return Grade(None, bool(found), "bad_key", (found or [""])[-1][:200])
    return worst(_verdict(answer, keys, text) for text in found[::-1])


def _verdict(answer: Answer, keys: list[str], found: str) -> Grade:
    if len(found) > normalise.MAX_CHARS:
        return Grade(0.0, True, "too_long", found[:200])
    rules, prompt = RULES.get(answer.data_source, PLAIN), answer.question
    # The question proper stands behind table and texts; what these say about scale ("in millions") counts too.
    asked = " ".join([prompt.rpartition("Question:")[2], *_IN_SCALE.findall(prompt)[:20]])
    right = any(normalise.same(key, found, rules, asked) for key in keys)
    if not right and answer.data_source in LISTS:
        right = any(normalise.same_list(key, found, rules) for key in keys)
    return Grade(float(right), True, "right" if right else "wrong", found[:200])


def stated(text: str) -> list[str]:
    """Returns the final answers of a response, without what they are wrapped in; none if the last one is empty."""
    found = [_inside(pair) for pair in pairs(text)] or [_after_mark(text).lstrip(_WRAPPERS).split("\n", 1)[0]]
    found = [unwrapped(one) for one in found]
    return list(filter(None, found)) if found[-1] else []


def pairs(text: str) -> list[str]:
    """Returns the contents of the last `<answer>` pairs, in any case; of nested ones the inner one."""
    opened, found = None, []
    for tag in _TAG.finditer(text):
        if tag[1] and opened is not None:
            found.append(text[opened : tag.start()])
        opened = None if tag[1] else tag.end()
    return found[-MAX_STATED:]


def _inside(pair: str) -> str:
    pair = pair[pair.lower().rfind("</analyze>") + len("</analyze>") :] if "</analyze>" in pair.lower() else pair
    marked = _after_mark(pair)
    return _END.split(marked if marked.strip() else pair.strip(), maxsplit=1)[0]


def _after_mark(text: str) -> str:
    """Returns what follows the last `Answer:`."""
    marks = list(_MARK.finditer(text))
    return text[marks[-1].end() :] if marks else ""


def unwrapped(text: str) -> str:
    """Returns `text` without emphasis, quotes, a box, an introducing "the answer is" and a final period."""
    text = text.strip(_WRAPPERS)
    if "\\boxed" in text and (boxes := latex.last_boxes(text)):
        text = boxes[-1]
    for _ in range(2):
        text = text.strip(_WRAPPERS).rstrip(".;,:!").strip(_WRAPPERS)
        if len(text) > 2 and text[0] == text[-1] == "$":
            text = text[1:-1]
        text = text[match.end() :] if (match := _SENTENCE.match(text)) else text
    return text.replace("**", "").replace("\\%", "%").replace("\\$", "$")


#### DABench

_FIELD = re.compile(  # brackets within a value nest; where they do not pair ([0, 5) is a value), it ends at the first one
    r"@(\w+)\[(?:((?:(?!@\w+\[)[^\[\]]|\[[^\[\]]*\])*)|((?:(?!@\w+\[)[^\]])*))\]"
)
_LIST = re.compile(r"\[([^\[\]()]*)\]|\(([^\[\]()]*)\)")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


def grade_named(answer: Answer) -> Grade:
    """Returns 1 if every named value of the key is stated and right; no verdict where the row has no usable key."""
    found, key = pairs(own_words(answer.response)), answer.ground_truth
    if not (key and isinstance(key, list | tuple) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in key)):
        return Grade(None, bool(found), "bad_key", (found or [""])[-1][:200])
    return worst(_named_verdict(dict(key), pair) for pair in found[::-1])


def _named_verdict(key: dict[str, Any], found: str) -> Grade:
    values = {name: nested or plain for name, nested, plain in _FIELD.findall(found)}
    if not key.keys() <= values.keys():
        return Grade(0.0, False, "partial" if values else "unformatted", found.strip()[:200])
    right = all(same_value(str(value), values[name]) for name, value in key.items())
    return Grade(float(right), True, "right" if right else "wrong", found.strip()[:200])


def same_value(key: str, found: str) -> bool:
    """Returns whether two values are equal: as text without case and quotes, as flat lists item by item, or as numbers."""
    if len(found) > normalise.MAX_CHARS:
        return False
    key, found = (text.strip().strip('"').strip("'").strip().casefold() for text in (key, found))
    lists = [_LIST.fullmatch(text) for text in (key, found)]
    if all(lists):
        left, right = ((match[1] or match[2] or "").split(",") for match in lists)
        return len(left) == len(right) and all(map(same_value, left, right))
    left, right = _number(key), _number(found)
    return key == found or (left is not None and right is not None and (left == right or abs(left - right) <= 1e-6))


def _number(text: str) -> float | None:
    try:
        return None if "_" in text else float(text.replace(",", "") if _THOUSANDS.fullmatch(text) else text)
    except ValueError:
        return None


#### Search: hotpotqa, 2wikimultihopqa, musique, bamboogle

# The answer pairs of the response count that stand outside of thoughts, queries and retrieved passages. A second one that does
# not say the same as a golden answer is hedging. In training a part of the reward is for structure: prefix and response, as one
# text, must be think -> (search -> information -> think)* -> answer, with nothing but white space in between. In validation the
# reward is 0 or 1. A wrong answer earns up to 0.2 in training, and is a failure all the same: success is the answer's own part.
STRUCTURE = 0.2  # reward of valid structure without a right answer; a right answer in invalid structure loses as much
ANSWERED = 0.1  # reward of a wrong answer in invalid structure

_SEARCH_TAG = re.compile(r"<(/?)(think|search|information|answer)>")
_THINK, _SEARCH, _INFORMATION, _ANSWER = (
    rf"\s*<{name}>(?:(?!</?(?:think|search|information|answer)>)[\s\S])*</{name}>"
    for name in ("think", "search", "information", "answer")
)
_STRUCTURE = re.compile(rf"{_THINK}(?:{_SEARCH}{_INFORMATION}{_THINK})*{_ANSWER}\s*")


def grade_search(answer: Answer) -> Grade:
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
        valid = bool(response.strip()) and structured(answer, response)
        reward = 1 - STRUCTURE * (not valid) if right else STRUCTURE if valid else ANSWERED * bool(found)
    # What is not for the right answer itself is a part of its own: it makes no success.
    parts = ((TASK, task), ("structure", reward - task)) if reward != task else ()
    return Grade(reward, bool(found), reason, last, parts=parts)


def structured(answer: Answer, response: str) -> bool:
    """Whether the whole trace has the structure, and every information block in it was the environment's."""
    parts = answer.prefix_parts + answer.parts
    # Whatever stands in an observation, it is one information block.
    said = ["<information></information>" if who != STUDENT and text.strip() else text for who, text in parts]
    trace = "".join(said) if parts else answer.prefix + response
    forged = any("information>" in text for who, text in parts if who == STUDENT)
    return not forged and _STRUCTURE.fullmatch(own_words(trace)) is not None


def final_answers(prefix: str, response: str) -> list[str]:
    """Returns what stands in the answer pairs that `response` opens and closes outside of other tags; [] if the last is empty."""
    text = prefix + response
    tags = list(_SEARCH_TAG.finditer(text))
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
