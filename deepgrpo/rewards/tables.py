"""The graders of questions about tables: finqa, hybridqa, ottqa, multihiertt, wikitq, reasoning-table.

One extractor for all: the answer pairs of the response (`<Answer>` or `<answer>`), each of which must be right, else its last
`Answer:` line. A response without either has no final answer. The comparison is the source's (`RULES`):

    finqa               numbers agree in the coarser of the two written precisions (see `normalise.rounded`); (3.2) is -3.2
    multihiertt         numbers agree within 1e-5 of the key
    wikitq              exact; a key of several items is a list in any order
    all others          exact
"""

import re

from deepgrpo.rewards import latex, marks, normalise
from deepgrpo.rewards.answer import Answer, own_words
from deepgrpo.types import Grade

LEAK = r"<\s*/?\s*answer\b|\banswer\b[\s*_]{0,4}[:\uff1a]|\banswer\s+is\b"  # of a prefix that states an answer, or begins to

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


def grade(answer: Answer) -> Grade:
    """1 if the final answer of the response says the same as the key, else 0; no verdict where the row has no usable key."""
    found, keys = stated(own_words(answer.response)), _keys(answer)
    if not keys:
        return Grade(None, bool(found), "bad_key", (found or [""])[-1][:200])
    return marks.worst(_verdict(answer, keys, one) for one in found[::-1])


def _verdict(answer: Answer, keys: list[str], found: str) -> Grade:
    if len(found) > normalise.MAX_CHARS:
        return Grade(0.0, True, "too_long", found[:200])
    rules = RULES.get(answer.data_source, PLAIN)
    right = any(normalise.same(key, found, rules, _asked(answer.question)) for key in keys)
    if not right and answer.data_source in LISTS:
        right = any(normalise.same_list(key, found, rules) for key in keys)
    return Grade(float(right), True, "right" if right else "wrong", found[:200])


def _asked(prompt: str) -> str:
    """The question proper, behind table and texts, and what these say about scale ("in millions")."""
    return " ".join([prompt.rpartition("Question:")[2], *_IN_SCALE.findall(prompt)[:20]])


def _keys(answer: Answer) -> list[str]:
    """The accepted answers of a row, without empty ones. A list holds choices, or one key's items where the source has such."""
    key = answer.ground_truth if isinstance(answer.ground_truth, list | tuple) else [answer.ground_truth]
    texts = [text for one in key if one is not None and (text := str(one).strip())]
    return ["|".join(texts)] if len(texts) > 1 and answer.data_source in LISTS else texts


def stated(text: str) -> list[str]:
    """The final answers that a response gives, without what they are wrapped in; none if the last one is empty."""
    found = [_inside(pair) for pair in pairs(text)] or [(_after_mark(text) or "").lstrip(_WRAPPERS).split("\n", 1)[0]]
    found = [unwrapped(one) for one in found]
    return list(filter(None, found)) if found[-1] else []


def _inside(pair: str) -> str:
    pair = pair[pair.lower().rfind("</analyze>") + len("</analyze>") :] if "</analyze>" in pair.lower() else pair
    marked = _after_mark(pair)
    return _END.split(marked if marked and marked.strip() else pair.strip(), maxsplit=1)[0]


def pairs(text: str) -> list[str]:
    """Contents of the last `<answer>` pairs, in any case; of nested ones the inner one."""
    opened, found = None, []
    for tag in _TAG.finditer(text):
        if tag[1] and opened is not None:
            found.append(text[opened : tag.start()])
        opened = None if tag[1] else tag.end()
    return found[-marks.MAX_STATED :]


def _after_mark(text: str) -> str | None:
    """What follows the last `Answer:`; None without one."""
    end = None
    for mark in _MARK.finditer(text):
        end = mark.end()
    return None if end is None else text[end:]


def unwrapped(text: str) -> str:
    """`text` without emphasis, quotes, a box, an introducing "the answer is" and a final period."""
    text = text.strip(_WRAPPERS)
    if "\\boxed" in text and (boxes := latex.last_boxes(text)):
        text = boxes[-1]
    for _ in range(2):
        text = text.strip(_WRAPPERS).rstrip(".;,:!").strip(_WRAPPERS)
        if len(text) > 2 and text[0] == text[-1] == "$":
            text = text[1:-1]
        text = text[match.end() :] if (match := _SENTENCE.match(text)) else text
    return text.replace("**", "").replace("\\%", "%").replace("\\$", "$")
