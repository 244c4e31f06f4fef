"""The graders of the public reference as they behave, for numbers that can be compared with published ones.

`rewards.grader=compat_fast` is what the reference's training and its own validation do (stages A or B: there math-verify never
gets to work, because its alarms need a main thread); `compat_full` is what the same code does in a stand-alone evaluation script
(A or B or C). Both grade the whole transcript: prompt, locked prefix, response and end-of-turn token. Known faults are kept:
deleted variables, hangs on towers of powers, free rewards for empty keys, and so on; a hang ends as wrong, by the service's
deadline. They concern mathematics and GSM8K; `config.strict_reference` is another switch and does not turn them on.
"""

import contextlib
import itertools
import os.path
import re
from collections.abc import Callable, Sequence

from pylatexenc import latex2text

from deepgrpo.rewards import sympy_reader
from deepgrpo.rewards.answer import Answer
from deepgrpo.rewards.math import math_verify
from deepgrpo.types import Grade

#### Stage A: one spelling of text

# Words that are taken out wherever they stand alone, with their plurals. Single letters are among them: variables go.
# "a ." and its like are meant as abbreviations and used as patterns: the dot is any character.
_UNITS = [f"{letter} ." for letter in "abcdgq"] + (
    "degree mile mph foot feet inch inches yard acre hectare meter metre centimeter millimeter kilometer cm mm km ft square sq "
    "cubic second sec minute min hour hr day week month year am pm gram gm kg kilogram mg pound lb ounce oz ton dollar cent "
    "rupee rs euro liter litre ml gallon percent unit point person people men women by per st nd rd th deg prime "
    "ab bc mp a c d g h l m o s t"
).split()


_UNIT_PATTERNS = [re.compile(rf"(^|\W){unit}{plural}($|\W)") for unit in _UNITS for plural in ("", "s")]


def same_text(answer: str, key: str) -> bool:
    """Stage A compares both texts, in the spelling of MATH's first graders, as strings."""
    return spelling(answer) == spelling(key)


def spelling(text: str) -> str:
    """Returns stage A's normal form. A text that makes it stumble stays as it is, trimmed."""
    text = text.strip()
    try:
        if whole := re.search(r"^\\text\{(.+?)\}$", text):
            text = whole[1].strip()
        return _respelled(text)
    except (IndexError, ValueError):
        return text


def _respelled(text: str) -> str:
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = re.sub(r"\\begin\{array\}\{.*?\}", r"\\begin{pmatrix}", text)
    text = re.sub(r"\\end\{array\}", r"\\end{pmatrix}", text).replace("bmatrix", "pmatrix")
    for old, new in (("tfrac", "frac"), ("dfrac", "frac"), ("\\neq", "\\ne"), ("\\leq", "\\le"), ("\\geq", "\\ge")):
        text = text.replace(old, new)
    text = text.replace("\\left", "").replace("\\right", "")
    text = re.sub(r"\\text\{.*?\}$", "", text).strip() or text  # from the first group, not the last
    for _ in range(2):
        for pattern in _UNIT_PATTERNS:
            text = pattern.sub(r"\1\2", text) or text
    text = text.replace("^{\\circ}", "").replace("^\\circ", "").replace("\\$", "")
    before, *after = text.split("\\text{ ")
    if len(after) > 1:
        raise ValueError("more than one unit")
    text = before.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    text = "0" + text if text[0] == "." else text
    sides = text.split("=")
    text = sides[1] if len(sides) == 2 and len(sides[0]) <= 2 else text
    if re.search(r"\\sqrt(\\sqrt|$)", text):
        raise ValueError("a root of nothing")
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text).replace(" ", "")  # one character
    if not re.search(r"\\frac(?!\{).?(\\frac|$)", text):  # fewer than two characters stop the others too
        text = re.sub(r"\\frac([^{])\{", r"\\frac{\1}{", text)
        text = re.sub(r"\\frac([^{])([^{])", r"\\frac{\1}{\2}", text)
    text = "\\frac{1}{2}" if text == "0.5" else text
    number = "(0|-?[1-9][0-9]*)"
    return re.sub(rf"^{number}/{number}$", r"\\frac{\1}{\2}", text)


#### Stage B: plain text and sympy

_MEASURES = "degree cm centimeter meter mile second minute hour day week month year foot feet inch yard".split()
_SYMBOLS = {"\u221a": "sqrt", "\u03c0": "pi", "\u221e": "inf", "\u222a": "U", "\u00b7": "*", "\u00d7": "*"}
_BRACKETS = "()[]"
_LATEX = latex2text.LatexNodes2Text()


def same_algebra(answer: str, key: str) -> bool:
    """Stage B compares both as plain text, and then element by element whether sympy simplifies the difference to zero."""
    key, answer = plain(key), plain(answer)
    expected, given = _elements(key), _elements(answer)
    if key == answer or not answer or len(expected) != len(given):
        return key == answer
    if len(expected) > 1 and (key[0], key[-1]) != (answer[0], answer[-1]):
        return False
    return all(map(_same_element, expected, given))


def plain(text: str) -> str:
    """Returns stage B's normal form: lower case, no spaces, no units, LaTeX as Unicode text."""
    if whole := re.search(r"^\\text\{(.+?)\}$", text):
        text = whole[1]
    text = text.replace("\\%", "%").replace("\\$", "$").replace("$", "").replace("%", "")
    text = text.replace(" or ", " , ").replace(" and ", " , ")
    for word, power in (("million", 6), ("billion", 9), ("trillion", 12)):
        text = text.replace(word, f"*10^{power}")
    for measure in _MEASURES:  # within other words as well: Monday becomes Mon
        text = re.sub(rf"{measure}(es)?(s)? *(\^[0-9]+)?", "", text)
    text = re.sub(r"\^ *\\circ", "", text)
    text = text[1:-1] if text[:1] == "{" and text[-1:] == "}" else text
    text = re.sub(r",\\! *", "", text)
    if (number := _whole(text)) is not None:
        text = str(number)  # Python's parser takes 52_8 for 528
    if "\\" in text:
        with contextlib.suppress(Exception):  # whatever pylatexenc raises, the reference goes on with the LaTeX
            text = _LATEX.latex_to_text(re.sub(r"\\[td]?frac", r" \\frac", text))
            for symbol, name in _SYMBOLS.items():
                text = text.replace(symbol, name)
            text = text.strip()
    text = re.sub("- *", "-", text)
    text = re.sub("([0-9]) +([0-9])", r"\1+\2", text)  # mixed numbers, and 10 080
    text = text.replace(" ", "").replace("{", "").replace("}", "").lower()
    return text if _whole(_without_commas(text)) is None else str(int(float(text.replace(",", ""))))


def _whole(text: str) -> int | None:
    """Returns the integer that a text is, give or take what floats leave; None for any other text."""
    try:
        number = float(text)
        return round(number) if abs(number - round(number)) <= 1e-7 else None
    except (OverflowError, ValueError):  # no number, or an infinite one
        return None


def _without_commas(text: str) -> str:
    """Takes thousands commas out, from the left, until none is left."""
    while (shorter := re.sub(r"(\d),(\d\d\d)($|\D)", r"\1\2\3", text)) != text:
        text = shorter
    return text


def _elements(text: str) -> list[str]:
    text = _without_commas(text)
    if len(text) > 2 and text[0] in _BRACKETS and text[-1] in _BRACKETS and not any(b in text[1:-1] for b in _BRACKETS):
        return [element.strip() for element in text[1:-1].split(",")]
    return [text] if text else []


def _same_element(key: str, answer: str) -> bool:
    if all(re.search(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$", text) for text in (key, answer)):
        return key == answer  # a fraction must be reduced
    if (_whole(_without_commas(key)) is None) != (_whole(_without_commas(answer)) is None):
        return False  # an integer must be written as one
    return _vanishes(f"({key})-({answer})")


def _vanishes(difference: str) -> bool:
    letters = {char for char in difference.replace("sqrt", "").replace("frac", "") if char.isalpha()}
    if len(letters) > 2 or "^{" in difference or "^(" in difference or re.search(r"\^[0-9]+\^|\^[0-9][0-9]+", difference):
        return False
    import sympy

    sympy_parser = sympy_reader.install()
    rules = (*sympy_parser.standard_transformations, sympy_parser.implicit_multiplication_application)
    try:
        return bool(sympy.simplify(sympy_parser.parse_expr(difference.replace("^", "**"), transformations=rules)) == 0)
    except Exception:  # the reference refuses whatever sympy can't do
        return False


#### Stage C: math-verify

MAX_UNCHECKED = 128  # characters; longer texts must not repeat themselves
MAX_REPETITION = 0.2
SECONDS = 1  # of math-verify's alarms, each


def same_by_math_verify(answer: str, key: str) -> bool:
    """Stage C asks math-verify, whose alarms (a second each) need the main thread, as in every grading worker."""
    if any(len(text) > MAX_UNCHECKED and _repetition(text) > MAX_REPETITION for text in (answer, key)):
        return False
    if plain(key) == plain(answer):
        return True
    library = math_verify()
    config = (library.LatexExtractionConfig(boxed_match_priority=0), library.ExprExtractionConfig())
    # The reference means to take the first match only, but passes the mode in a list, which math-verify reads as "any match".
    rules = {"fallback_mode": "no_fallback", "extraction_mode": "any_match", "parsing_timeout": SECONDS}
    try:
        left, right = (library.parse(text if "$" in text else f"${text}$", config, **rules) for text in (key, answer))
        return bool(library.verify(left, right, timeout_seconds=SECONDS))
    except Exception:  # the reference refuses whatever math-verify can't do
        return False


def _repetition(text: str) -> float:
    """Returns how much the sorted suffixes of a text share with their neighbours: common prefixes over n(n+1)/2."""
    neighbours = itertools.pairwise(sorted(text[i:] for i in range(len(text))))
    return 2 * sum(len(os.path.commonprefix(pair)) for pair in neighbours) / (len(text) * (len(text) + 1))


def by_metric(keys: list[str], text: str) -> bool:
    """DeepScaleR's rule: math-verify's metric with its default limits; keys as LaTeX, the text as expressions or LaTeX."""
    library = math_verify()
    from math_verify.metric import math_metric

    latex, plain_expression = library.LatexExtractionConfig(), library.ExprExtractionConfig()
    metric = math_metric(gold_extraction_target=(latex,), pred_extraction_target=(plain_expression, latex))
    try:
        return metric(keys, [text])[0] > 0
    except Exception:  # the reference refuses whatever math-verify can't do
        return False


FAST = (same_text, same_algebra)
FULL = (*FAST, same_by_math_verify)
STAGES = {"compat_fast": FAST, "compat_full": FULL}

_ASSISTANT = ("<|im_start|>assistant", "<|start_header_id|>assistant<|end_header_id|>", "[/INST]", "### Assistant:", "Assistant:")
_TURN_ENDS = re.compile(r"<\|im_end\|>|<\|eot_id\|>|<\|endoftext\|>")
_FINAL_MARK = re.compile(r"####\s*\$?\s*(?:\\boxed|[+-]?\d)")
_NUMBER_RUN = re.compile(r"-?[0-9.,]+")
_STRICT_MARK = re.compile(r"#### (-?[0-9.,]+)")


def warm_up() -> None:
    """Imports what the stages need (sympy, math-verify, pylatexenc)."""
    same_algebra("\\frac{x}{2}", "x/2 + 0*x")
    same_by_math_verify("\\frac{x}{3}", "x/3")


#### Boxes


def grade_boxed(answer: Answer, mode: str) -> Grade:
    """Returns 1 if the transcript's last box equals one of the keys by one of the mode's stages."""
    return _by_stages(box(answer.transcript), answer, mode)


def grade_tagged(answer: Answer, mode: str, lenient: bool) -> Grade:
    """Returns the same for R1-style answer tags; what stands between the last pair, or its box, is the answer."""
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
    """Returns the content of the last box: braces are counted, escaped ones too; the opening brace must follow at once."""
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
    """Returns the accepted answers. A key that holds a box is replaced by its content; an unbalanced box never matches.

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
    """Returns whether an answer equals a key by one of the stages, asked in order."""
    return any(stage(found, key) for stage in stages)


#### DeepScaleR


def grade_formula(answer: Answer) -> Grade:
    """Returns 1 if math-verify finds a key among what it reads in the transcript: a box, or any formula or number at its end.

    The reference runs this in processes' main threads, so the library's own time limits hold, in both modes.
    """
    found = keys(answer.ground_truth)
    right = by_metric([f"\\boxed{{{key}}}" for key in found], answer.transcript)
    return Grade(float(right), True, "right" if right else "wrong")


#### GSM8K


def grade_gsm8k(answer: Answer, only_mark: bool = False) -> Grade:
    """Returns 1 if the transcript's last run of digits, dots and commas is the key, character by character.

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
    """Returns what follows the last header of an assistant's turn, up to its end: here the rule against two answers looks."""
    starts = [(at, marker) for marker in _ASSISTANT if (at := text.rfind(marker)) >= 0]
    if starts:
        at, marker = max(starts)
        text = text[at + len(marker) :].lstrip()
        text = text[: end.start()] if (end := _TURN_ENDS.search(text)) else text
    return text
