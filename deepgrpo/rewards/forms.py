"""The shape of an answer: value, words, base-n numeral, list or set, tuple or interval, union, matrix, relation.

`parse` looks at structure only; what stands in the leaves stays clean text (see `latex`), for `compare` to decide upon.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Sequence

from deepgrpo.rewards.latex import COMPOUND, ROW, TEXT_CLOSE, TEXT_OPEN, Quantity, canonical, compound, quantity, unmarked


@dataclasses.dataclass(frozen=True)
class Value:
    """A number or an expression, perhaps with a unit."""

    quantity: Quantity


@dataclasses.dataclass(frozen=True)
class Words:
    """Prose: lower case, no punctuation."""

    text: str


@dataclasses.dataclass(frozen=True)
class Numeral:
    """Digits with a written base."""

    digits: str
    base: int


@dataclasses.dataclass(frozen=True)
class Clock:
    """A time of day, in minutes."""

    minutes: int


@dataclasses.dataclass(frozen=True)
class Items:
    """Several answers without an order: a list, or a set in braces."""

    parts: tuple["Form", ...]
    braces: bool


@dataclasses.dataclass(frozen=True)
class Brackets:
    """A tuple, a vector or an interval; with MATRIX for brackets, a matrix of rows or a row of cells."""

    opening: str
    closing: str
    parts: tuple["Form", ...]


@dataclasses.dataclass(frozen=True)
class Sets:
    """Sets joined by `operators` (\\cup, \\cap, \\setminus), read from the left."""

    operators: tuple[str, ...]
    parts: tuple["Form", ...]


@dataclasses.dataclass(frozen=True)
class Relation:
    """A chain such as `a < x <= b` or `y = 2x + 3`; `>` is written as `<`, with the sides turned round."""

    operators: tuple[str, ...]
    sides: tuple[str, ...]


Form = Value | Words | Numeral | Clock | Items | Brackets | Sets | Relation

MAX_NESTING = 12  # structures within structures
MATRIX = "\\begin"

_TOKEN = re.compile(
    rf"\\begin\{{\w+\*?\}}|\\end\{{\w+\*?\}}|\\[A-Za-z]+|\\.|{TEXT_OPEN}[^{TEXT_CLOSE}]*{TEXT_CLOSE}|<=|>=|.", re.DOTALL
)
_DEEPER = dict.fromkeys(("(", "[", "{", "\\{", "\\begin"), 1) | dict.fromkeys((")", "]", "}", "\\}", "\\end"), -1)
_JOINS = re.compile(r"(\b(?:and|or)\b|(?<!\d),|,(?!\d))")
_TEXT_RUN = re.compile(f"{TEXT_OPEN}([^{TEXT_CLOSE}]*){TEXT_CLOSE}")
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?!\d|,\d)")
_RELATIONS = {"=": "=", "<": "<", ">": ">", "\\le": "<=", "\\ge": ">=", "<=": "<=", ">=": ">=", "\\ne": "!=", "\\equiv": "="}
_APPROXIMATE = {"\\approx", "\\simeq", "\\sim", "\\doteq"}
_NUMBER_SETS = re.compile(r".*\\in\s*\\mathbb\s*\{?[ZNQRC]\}?.*|.*\\in\s*\{?\\?(?:Z|N)\}?")
_LABEL = re.compile(rf"{TEXT_OPEN}[^{TEXT_CLOSE}]*{TEXT_CLOSE}\s*[:.]?\s*(?=\S)")
_PREAMBLE = re.compile(  # the function is .., there are .., the answer: .., total: ..
    r"\s*(?:(?:(?!(?:no|not|never|neither|nor|than|least|most|cannot|every|all|if|when|for|where)\b)[a-z][a-z']*\s+){1,9}?"
    r"(?:is|are|was|were|equals|has|have|had|costs?)(?:\s*:|\s+that)?\s+"
    r"|(?:[a-z]+\s+){0,5}[a-z]{3,}\s*:\s*|answer\s*=?\s*)(?=[^\s.])",
    re.IGNORECASE,
)
_QUANTIFIER = re.compile(rf"^{TEXT_OPEN}\s*(?:for )?(?:all|every|each|any)\b[^{TEXT_CLOSE}]*{TEXT_CLOSE}\s*(?=\S)")
_CHOICE = re.compile(r"\s*(?:(?:[Oo]ption|[Cc]hoice)\s+)?(?:\(\s*([A-J])\s*\)|([A-J])\s*[).:])\s*(?=[^\s,])(?!(?:and|or)\b)")
_CLAUSE = re.compile(
    rf"[ (\[]*{TEXT_OPEN}[\s(\[,]*(?:(?:for|where|with|if|when|whenever|such that|since|because|provided|assuming|given)\b|"
    r"(?<=[(\[])(?:as|by)\b)"
)
_REMARK = re.compile(r" [(\[]([^()\[\]]*)[)\]]$")
_SAYS = re.compile(rf"{TEXT_OPEN}|[<>=]|\\(?:le|ge|ne|in|approx)(?![a-z])")
_CONDITION = re.compile(r"([A-Za-z])\s*(?:[<>]=?|\\(?:le|ge|ne)(?![a-z]))\s*-?\w+")
_EMPTY = re.compile(
    r"(?:there (?:is|are) )?no (?:(?:real|integer|such|possible|valid) )*(?:(?:solution|value|root|number|integer|pair)s?|[a-z])"
    r"(?: of [a-z]| exists?)?|none(?: exists?)?|(?:the )?(?:empty|null) set"
)
_FILL = frozenset("option choice answer letter figure graph statement the a an".split())
_CLOCK = re.compile(r"(\d{1,2})(?::(\d\d))?\s*([ap])\.?\s*m\.?|(noon|midnight)", re.IGNORECASE)
NAME = re.compile(
    r"(?!\\(?:sqrt|ln|log|sin|cos|tan|exp))(?:\\?[A-Za-z]+(?:_\{?\w+\}?)?'*|"
    r"\\?[A-Za-z]+'*\([A-Za-z,]+\)|\([A-Za-z\\,_{}0-9]+\)|d?[A-Za-z]/d?[A-Za-z])"
)
_MATRIX = re.compile(
    r"(?P<factor>.*?)\\begin\{(?P<name>[bpB]?matrix|smallmatrix|array)\}(?:\{[^{}]*\})?(?P<body>.*)\\end\{(?P=name)\}(?P<tail>.*)",
    re.DOTALL,
)
_NUMERAL = re.compile(r"[({]?(-?[0-9A-Z]*\d[0-9A-Z]*(?:\.\d+)?)[)}]?_\{?\(?(?:base)?(\d+|[a-z]+)\)?\}?")
_FRENCH = re.compile(r"(?!\[.*\]$)([\[\]])([^\[\],;]*)[,;]([^\[\],;]*)([\[\]])")  # ]3, 4] excludes the 3
_IN_BASE = re.compile(
    rf"(?<=[0-9A-Z)}}])[\s({TEXT_OPEN}]*(?:(?:in )?(?:base|radix)[\s{TEXT_CLOSE}-]*(\d+|[a-z]+)|"
    rf"(binary|octal|decimal|hexadecimal))[\s){TEXT_CLOSE}]*$"
)
_BASES = {word: n for n, word in enumerate("two three four five six seven eight nine ten eleven twelve".split(), 2)}
_BASES |= {"sixteen": 16, "binary": 2, "octal": 8, "decimal": 10, "hexadecimal": 16}


def readings(text: str) -> list[Form]:
    """Returns the forms that clean text may have: a comma before three digits groups thousands, or else parts a list."""
    plain = _plain(text)
    if (match := COMPOUND.fullmatch(" ".join(plain.split()).rstrip(" ."))) and (values := compound(match)):
        return [Value(Quantity(str(value), (unit,))) for unit, value in values.items()]
    if choice := _CHOICE.match(plain):
        return [Words((choice[1] or choice[2]).lower()), *readings(_from(text, choice.end()))]
    grouped = _THOUSANDS.sub(lambda m: m.group() if _in_brackets(text[: m.start()]) else m.group().replace(",", ""), text)
    forms = [parse(grouped)]
    if grouped != text and isinstance(other := parse(text), Items):
        forms.append(other)
    return forms


def _in_brackets(before: str) -> bool:
    return any(before.count(opening) > before.count(closing) for opening, closing in (("(", ")"), ("[", "]"), ("\\{", "\\}")))


def parse(text: str, nesting: int = 0) -> Form:
    """Returns the form of clean text."""
    text = _trimmed(text)
    if nesting > MAX_NESTING:
        return Value(quantity(text))
    if preamble := _PREAMBLE.match(_plain(text)):
        text = _trimmed(_from(text, preamble.end()))
    if clock := _CLOCK.fullmatch(unmarked(text)):
        hours = int(clock[1] or 12) % 12 + 12 * ((clock[3] or clock[4][0]).lower() in "pn")
        return Clock(60 * hours + int(clock[2] or 0))
    if words := _TEXT_RUN.fullmatch(text):
        text = _trimmed(words.group(1))
        if re.match(r"[\s(]*[A-Za-z]", text) and not _JOINS.search(text):
            return _words(text)
    if french := _FRENCH.fullmatch(text):
        opening, low, high, closing = french.groups()
        ends = (parse(low, nesting + 1), parse(high, nesting + 1))
        return Brackets("[" if opening == "[" else "(", "]" if closing == "]" else ")", ends)
    text = re.sub(r"^(?:\\?[A-Za-z](?:_\w|_\{\w+\})?)\s*\\in\s*(?=\\\{)", "", text)  # before its plus-minus signs are taken apart
    parts, _ = split(_with_joins(text), _is_separator)
    parts = [part for part in (_trimmed(part) for part in parts) if part]
    parts = [part for part in parts if not _NUMBER_SETS.fullmatch(part)] or parts
    if not re.search(r"[<>]|\\(?:le|ge)(?![a-z])", parts[0] if parts else ""):  # n^2, n > 1
        parts = parts[:1] + [p for p in parts[1:] if not ((c := _CONDITION.fullmatch(p)) and c[1] in parts[0])]
    if len(parts) > 1:
        return _items([parse(part, nesting + 1) for part in parts], braces=False)
    text = parts[0] if parts else ""
    if re.search(r"\\(?:pm|mp)(?![A-Za-z])", text) and not _enclosed(text, "\\{", "\\}"):
        return _items([parse(branch, nesting + 1) for branch in _signs(text)], braces=False)
    return _single(text, nesting)


def _single(text: str, nesting: int) -> Form:
    """Returns the form of clean text that is neither a list nor ambiguous in a sign."""
    if canonical(text) in ("\\emptyset", "\\{\\}"):
        return Items((), braces=True)
    text = _CLAUSE.split(text)[0].strip() or text
    remark = _REMARK.search(text)
    if remark and _SAYS.search(remark[1]) and not re.search(r"\b(?:and|or)\b", remark[1]):
        text = text[: remark.start()].strip()
    sides, operators = split(text, lambda token: token in _RELATIONS or token in _APPROXIMATE or token == "\\in")
    if operators:
        return _relation([side.strip() for side in sides], operators, nesting)
    parts, joins = split(text, ("\\cup", "\\cap", "\\setminus").__contains__)
    if joins:
        return Sets(tuple(joins), tuple(parse(part, nesting + 1) for part in parts))
    if (found := _MATRIX.match(text)) and (matrix := _matrix(found, nesting + 1)):
        return matrix
    if inside := _enclosed(text, "\\{", "\\}"):
        return _set(inside[1], nesting)
    label = re.match(r"(?:[ABD-Z]|[a-z](?=[(\[][^()\[\]]*,[^()\[\]]*[\])]$))\s*(?=[(\[])", text)  # a point's name; a stray letter
    if brackets := _enclosed(text[label.end() :] if label else text, "( [", ") ]"):
        opening, inner, closing = brackets
        pieces, commas = split(inner, lambda token: token in ",;")
        if commas:
            return Brackets(opening, closing, tuple(parse(piece, nesting + 1) for piece in pieces))
        if opening + closing in ("()", "[]") and not label:
            return parse(inner, nesting + 1)
    numeral_text = _IN_BASE.sub(lambda m: f"_{{{m[1] or m[2]}}}", text)
    if numeral := _NUMERAL.fullmatch(canonical(numeral_text).removeprefix("\\overline")):
        base = _BASES.get(numeral[2]) or (int(numeral[2]) if numeral[2].isdigit() else 0)
        if 2 <= base <= 36:
            return Numeral(numeral[1], base)
    if (label := _LABEL.match(text)) and not re.search(r"\b(?:no|not|never|than|least|most|over|under|except)\b", label.group()):
        return parse(text[label.end() :], nesting + 1)
    return _words(text) if _EMPTY.fullmatch(text.lower()) else Value(quantity(text))


def _words(text: str) -> Form:
    words = plain_words(text)
    return Items((), braces=True) if _EMPTY.fullmatch(words) else Words(words)


def _plain(text: str) -> str:
    """Returns `text`, as long as it is, with spaces in place of the marks of prose."""
    return text.replace(TEXT_OPEN, " ").replace(TEXT_CLOSE, " ")


def _from(text: str, start: int) -> str:
    """Returns `text` from `start` on, which may lie within a run of prose."""
    rest = text[start:]
    closes = rest.find(TEXT_CLOSE)
    return TEXT_OPEN + rest if closes >= 0 and TEXT_OPEN not in rest[:closes] else rest


def plain_words(text: str) -> str:
    """Returns prose for comparison: lower case, letters and digits only, without "option", "choice" or a leading article."""
    words = re.findall(r"[a-z0-9]+", unmarked(text).lower())
    while len(words) > 1 and words[0] in _FILL:
        words = words[1:]
    return " ".join(words).removesuffix(" function")


#### Splitting


def split(text: str, is_separator: Callable[[str], bool]) -> tuple[list[str], list[str]]:
    """Returns the parts of `text` between its separators outside all brackets, and the separators."""
    parts, separators, depth = [[]], [], 0
    for token in _TOKEN.findall(text):
        bracket = token.split("{")[0] if token.startswith(("\\begin", "\\end")) else token
        depth = max(0, depth + _DEEPER.get(bracket, 0))
        if depth == 0 and is_separator(token):
            separators.append(token)
            parts.append([])
        else:
            parts[-1].append(token)
    return ["".join(part) for part in parts], separators


def _is_separator(token: str) -> bool:
    return token in (",", ";", ROW, "\\&") or token[0] == TEXT_OPEN and token[1:-1].strip(" ,;") in ("and", "or", "&", "")


def _with_joins(text: str) -> str:
    """Marks plain "and" and "or", and takes them out of longer runs of prose."""
    if TEXT_OPEN in text:
        return _TEXT_RUN.sub(lambda run: "".join(TEXT_OPEN + p + TEXT_CLOSE for p in _JOINS.split(run[1]) if p.strip()), text)
    return re.sub(r"(?<![A-Za-z\\])(and|or)(?![A-Za-z])", rf"{TEXT_OPEN}\1{TEXT_CLOSE}", text)


def _trimmed(text: str) -> str:
    """Returns `text` without outer white space, quotes, emphasis, closing punctuation and redundant braces."""
    while True:
        before = text
        text = text.lstrip(' :;,&"`*=' + ROW).rstrip(' .:;,&"`*' + ROW)
        text = text[1:-1] if len(text) > 1 and text[0] == text[-1] == "'" else text
        text = re.sub(r"(?<!\\)\\$", "", text)
        if "\\over" not in text and "\\choose" not in text and (inside := _enclosed(text, "{", "}")):
            text = inside[1]
        if text == before:
            return text


def _enclosed(text: str, opening: str, closing: str) -> tuple[str, str, str] | None:
    """Returns (opening, inside, closing) if one pair of such brackets, possibly unlike, encloses all of `text`.

    opening, closing: tokens, separated by spaces.
    """
    opening, closing, tokens, depth = opening.split(), closing.split(), _TOKEN.findall(text), 0
    if len(tokens) < 2 or tokens[0] not in opening or tokens[-1] not in closing:
        return None
    for index, token in enumerate(tokens):
        depth += (token in opening) - (token in closing)
        if depth == 0:
            return (tokens[0], "".join(tokens[1:-1]), token) if index == len(tokens) - 1 else None
    return None


#### Structures


def _items(parts: list[Form], braces: bool) -> Form:
    flat: list[Form] = []
    for part in parts:
        flat.extend(part.parts if isinstance(part, Items) and not part.braces else (part,))
    return flat[0] if len(flat) == 1 and not braces else Items(tuple(flat), braces)


def _signs(text: str) -> list[str]:
    """Returns `text` with every choice of its plus-minus signs; \\pm and \\mp are opposite, several \\pm are independent."""
    pieces = re.split(r"\\(pm|mp)(?![A-Za-z])", text)
    signs = pieces[1::2]
    choices: Iterable[Sequence[str]] = itertools.product("+-", repeat=len(signs))
    if "mp" in signs or len(signs) > 3:
        choices = (["+" if sign == plus else "-" for sign in signs] for plus in ("pm", "mp"))
    return ["".join(itertools.chain(*zip(pieces[::2], [*choice, ""], strict=True))) for choice in choices]


def _relation(sides: list[str], operators: list[str], nesting: int) -> Form:
    if "\\in" in operators:  # membership: what it is a member of
        at = operators.index("\\in")
        if NAME.fullmatch(canonical(sides[at])) or not sides[at]:
            return parse(sides[at + 1], nesting + 1)
        return Value(Quantity("\\in".join(sides)))
    if not sides[0]:
        if operators[0] not in _APPROXIMATE:  # "> 7" is not 7
            return Value(Quantity("".join(part + operator for part, operator in zip(sides, [*operators, ""], strict=True))))
        sides, operators = sides[1:], operators[1:]
    exact = list(itertools.takewhile(lambda operator: operator not in _APPROXIMATE, operators))
    if operators and not exact and NAME.fullmatch(canonical(sides[0])):  # x is about 6.4
        return parse(sides[1], nesting + 1)
    sides, operators = sides[: len(exact) + 1], exact  # the exact value stands before the approximation
    if not operators or not all(sides):
        return parse(next((side for side in sides if side), ""), nesting + 1)
    sides = [_QUANTIFIER.sub("", side) for side in sides]
    signs = [_RELATIONS[operator] for operator in operators]
    if all(sign in (">", ">=") for sign in signs):
        sides, signs = sides[::-1], [sign.replace(">", "<") for sign in signs[::-1]]
    return Relation(tuple(signs), tuple(_trimmed(side) for side in sides))


def _set(inside: str, nesting: int) -> Form:
    condition, bars = split(inside, lambda token: token in ("\\mid", "|", ":"))
    if len(bars) == 1 and re.fullmatch(r"\s*[A-Za-z]\s*(?:\\in.*)?", condition[0]):
        return parse(condition[1], nesting + 1)
    inner = parse(inside, nesting + 1)
    return Items(inner.parts if isinstance(inner, Items) and not inner.braces else (inner,), braces=True)


def _matrix(match: re.Match, nesting: int) -> Brackets | None:
    """Returns a matrix with the factor before or behind it multiplied in; None if something else stands there."""
    factor = unmarked(match["factor"]).strip()
    factor = factor[:-1].strip() if factor[-1:] in ("(", "[") else factor  # of \left( \begin{array}
    factor = {"": "", "-": "-1"}.get(factor, factor)
    tail = re.fullmatch(r"[)\]\s]*(?:(/|\\cdot|\\times|\*)\s*(\S.*))?", unmarked(match["tail"]))
    if tail is None or "\\begin" in match["tail"]:
        return None
    if tail[1]:
        factor = f"({factor or 1}){'/' if tail[1] == '/' else '*'}({tail[2]})"
    cell = f"({factor})*({{}})" if factor else "{}"
    rows = (row.split("&") for row in match["body"].split(ROW) if row.strip())
    cells = [tuple(parse(cell.replace("{}", text.strip()), nesting) for text in row) for row in rows]
    return Brackets(MATRIX, MATRIX, tuple(Brackets(MATRIX, MATRIX, row) for row in cells))
