"""Whether an answer says the same as a key: typed comparison of their forms.

Within a type by value; between types only along a short list of edges: a value and the right side of an equation, a list and
a set, an interval and an inequality, a percentage and a number, a numeral and its bare digits, words and letters.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence

import mpmath

from deepgrpo.rewards import expression
from deepgrpo.rewards.expression import ParseError, TooComplex
from deepgrpo.rewards.forms import (
    NAME,
    Brackets,
    Clock,
    Form,
    Items,
    Matrix,
    Numeral,
    Relation,
    Sets,
    Value,
    Words,
    parse,
    plain_words,
    readings,
)
from deepgrpo.rewards.latex import canonical, clean, quantity, unmarked

MAX_CLEAN = 1000  # characters of a cleaned answer, or twice its key's
MAX_ITEMS = 40  # of an unordered comparison


@dataclasses.dataclass(frozen=True)
class Rules:
    """What a source or a question allows.

    measured: keys written with a decimal point or a power of ten match within half a unit of their last digit.
    free_constant: the name of the constant of integration, c or C, is free.
    bases: a numeral with a base may answer a key without one.
    fallback: decides two leaves (as clean text) whose key the expression parser doesn't know.
    """

    measured: bool = False
    free_constant: bool = False
    bases: bool = False
    fallback: Callable[[str, str], bool] = lambda key, answer: False


def same(key: str, answer: str, rules: Rules) -> bool:
    """Whether raw LaTeX `answer` says the same as `key`.

    Raises:
      TooComplex: the answer is too long or holds too large a number to be compared.
    """
    key, answer = clean(key), _shortened(clean(answer))
    if canonical(key) == canonical(answer):
        return bool(canonical(key))
    if len(answer) > max(MAX_CLEAN, 2 * len(key)):
        raise TooComplex(f"{len(answer)} characters")
    return any(_match(k, a, rules) for k in readings(key) for a in readings(answer))


def _shortened(text: str) -> str:
    """Takes long runs of leading zeros and of outer brackets off, which are harmless."""
    text = re.sub(r"(?<![\d.])0{5,}(?=\d)", "", text)
    outer = min(len(text) - len(text.lstrip("(")), len(text) - len(text.rstrip(")")))
    return text[outer : len(text) - outer] if outer > 3 and outer == text.count("(") == text.count(")") else text


def _match(key: Form, answer: Form, rules: Rules) -> bool:
    key, answer = _unwrapped(key, rules, repeats=False), _unwrapped(answer, rules)
    if isinstance(key, Clock) or isinstance(answer, Clock):
        return not _minutes(key).isdisjoint(_minutes(answer))
    if isinstance(key, Items) and isinstance(answer, Items) and _match_items(key.parts, answer.parts, rules):
        return True
    if isinstance(key, Relation) or isinstance(answer, Relation):
        alike = isinstance(key, Relation) and isinstance(answer, Relation)  # then the variable counts, not only its range
        return _match_relation(key, answer, rules) or (not alike and _same_set(key, answer))
    if isinstance(key, Brackets) and isinstance(answer, Brackets | Items):
        tuple_alike = isinstance(answer, Items) and not answer.braces and key.opening + key.closing == "()"
        alike = isinstance(answer, Brackets) and (key.opening, key.closing) == (answer.opening, answer.closing)
        if (alike or tuple_alike) and _match_all(key.parts, answer.parts, rules):
            return True
    if isinstance(key, Items) and isinstance(answer, Brackets) and answer.opening + answer.closing == "()":  # x=2, y=3 as (2,3)
        return all(isinstance(part, Relation) for part in key.parts) and _match_all(key.parts, answer.parts, rules)
    if isinstance(key, Sets | Items) and isinstance(answer, Sets | Items) and _unites(key) and _unites(answer):
        if _match_items(_members(key), _members(answer), rules):
            return True
    if isinstance(key, Matrix) or isinstance(answer, Matrix):
        return isinstance(key, Matrix) and isinstance(answer, Matrix) and _match_matrix(key, answer)
    if isinstance(key, Value | Words | Numeral) and isinstance(answer, Value | Words | Numeral):
        return _match_leaf(key, answer, rules)
    return _same_set(key, answer)


def _unites(form: Form) -> bool:
    return isinstance(form, Items) or set(form.operators) == {"\\cup"}


def _members(form: Form) -> list[Form]:
    """What a list, a set or a union of sets consists of: points and intervals."""
    united = isinstance(form, Sets)
    return [m for part in form.parts for m in (part.parts if united and isinstance(part, Items) and part.braces else (part,))]


def _minutes(form: Form) -> set[int]:
    """The times of day that a form may mean."""
    if isinstance(form, Clock):
        return {form.minutes}
    digits = re.fullmatch(r"(\d{1,2})(?::(\d\d))?", form.quantity.body.strip()) if isinstance(form, Value) else None
    if digits is None:
        return set()
    hours, minutes = int(digits[1]), int(digits[2] or 0)
    return {60 * h + minutes for h in ((hours % 12, hours % 12 + 12) if hours <= 12 else (hours,))}


def _unwrapped(form: Form, rules: Rules, repeats: bool = True) -> Form:
    """A list or set of one answer is that answer; with `repeats`, also of one answer repeated. A set of a set is another one."""
    if isinstance(form, Items) and 0 < len(form.parts) <= (MAX_ITEMS if repeats else 1):
        first, *others = form.parts
        if form.braces and isinstance(first, Items) and first.braces:
            return form
        if all(other == first or _match(first, other, dataclasses.replace(rules, measured=False)) for other in others):
            return first
    return form


def _match_all(key: Sequence[Form], answer: Sequence[Form], rules: Rules) -> bool:
    return len(key) == len(answer) and all(_match(k, a, rules) for k, a in zip(key, answer, strict=True))


def _match_items(key: Sequence[Form], answer: Sequence[Form], rules: Rules) -> bool:
    """Whether two unordered collections pair up; what only the answer repeats counts once."""
    if len(key) > MAX_ITEMS or len(answer) > MAX_ITEMS:
        return len(key) == len(answer) and all(k == a for k, a in zip(key, answer, strict=True))
    named = [part for part in key if isinstance(part, Relation)]
    if len(named) == len(key) and len({part.sides[0] for part in named}) > 1 and not any(isinstance(a, Relation) for a in answer):
        return _match_all(key, answer, rules)  # different quantities, and the answer doesn't say which is which
    if len(_distinct(key, rules)) == len(key):
        answer = _distinct(answer, rules)
    left = list(answer)
    for part in key:
        partner = next((i for i, other in enumerate(left) if _match(part, other, rules)), None)
        if partner is None:
            return False
        left.pop(partner)
    return not left


def _distinct(parts: Sequence[Form], rules: Rules) -> list[Form]:
    strict = dataclasses.replace(rules, measured=False)
    kept: list[Form] = []
    for part in parts:
        if not any(part == other or type(part) is type(other) and _match(other, part, strict) for other in kept):
            kept.append(part)
    return kept


def _match_matrix(key: Matrix, answer: Matrix) -> bool:
    if [len(row) for row in key.rows] != [len(row) for row in answer.rows]:
        return False
    cells = zip((c for row in key.rows for c in row), (c for row in answer.rows for c in row), strict=True)
    return all(_equal_text(k, a) for k, a in cells)


def _equal_text(key: str, answer: str) -> bool:
    """Whether two pieces of clean text are expressions of the same value."""
    if canonical(key) == canonical(answer):
        return True
    try:
        return expression.equal(expression.parse(unmarked(key)), expression.parse(unmarked(answer)))
    except ParseError:
        return False


#### Leaves


_NUMERALS = {
    word: str(number) for number, word in enumerate("zero one two three four five six seven eight nine ten eleven twelve".split())
}


def _match_leaf(key: Value | Words | Numeral, answer: Value | Words | Numeral, rules: Rules) -> bool:
    if isinstance(key, Numeral) or isinstance(answer, Numeral):
        return _match_numeral(key, answer, rules)
    if isinstance(key, Words) or isinstance(answer, Words):
        left, right = (_NUMERALS.get(text, text) for text in (_words(key), _words(answer)))
        return left == right != ""
    k, a = key.quantity, answer.quantity
    if k.unit and a.unit and not _same_unit(k.unit, a.unit):
        return False
    if a.percent and k.unit:
        return False
    left, right = unmarked(k.body), unmarked(a.body)
    if re.fullmatch(r"[A-Za-z]{4,}", left) and left.lower() == right.lower():
        return True  # a word without its \text
    if k.percent == a.percent and k.scale == a.scale and canonical(left) == canonical(right) != "":
        return True
    try:
        tree = expression.parse(left)
    except ParseError:
        return k.percent == a.percent and rules.fallback(left, right)
    try:
        return _match_value(_scaled(tree, k.scale), _scaled(expression.parse(right), a.scale), k.percent, a.percent, left, rules)
    except ParseError:
        return False


_PRIMES = {"'": ("minute", "foot", "arcmin"), "''": ("second", "inch", "arcsec")}


def _same_unit(key: tuple[str, ...], answer: tuple[str, ...]) -> bool:
    """The same unit; one side may leave out what it is counted per (cents, cents per ounce) or write it as primes."""
    if ("per" in key) != ("per" in answer):
        key, answer = (unit[: unit.index("per")] if "per" in unit[1:] else unit for unit in (key, answer))
    return key == answer or any(a in _PRIMES and b[0] in _PRIMES[a] for (a, *_), b in ((key, answer), (answer, key)))


def _words(form: Value | Words) -> str:
    return form.text if isinstance(form, Words) else plain_words(form.quantity.body)


def _match_value(key, answer, key_percent: bool, answer_percent: bool, key_text: str, rules: Rules) -> bool:
    if _equal(key, answer, key_text, rules):
        return True
    if key_percent and not answer_percent:
        return _equal(("div", key, ("num", expression.Fraction(100))), answer, "", rules)
    if answer_percent and not key_percent:
        return _equal(key, ("div", answer, ("num", expression.Fraction(100))), "", rules)
    return False


def _equal(key, answer, key_text: str, rules: Rules) -> bool:
    if expression.equal(key, answer):
        return True
    if rules.measured and (margin := _half_unit(key_text)) is not None and not expression.symbols(answer):
        left, right = expression.exact(key), expression.exact(answer)
        return left is not None and right is not None and abs(left - right) <= margin
    if rules.free_constant and len(constant := {"c", "C"} & expression.symbols(key)) == 1:
        new = (expression.symbols(answer) - expression.symbols(key)) & _CONSTANTS
        if len(new) == 1 and not constant & expression.symbols(answer):
            return expression.equal(key, _renamed(answer, *new, *constant))
    return False


def _scaled(tree, scale: int):
    return tree if scale == 1 else ("mul", tree, ("num", expression.Fraction(scale)))


_CONSTANTS = frozenset(("c", "C", "c_1", "C_1", "C_0", "c_0", "k", "K", "A", "B"))


def _renamed(tree, old: str, new: str):
    if tree == ("sym", old):
        return ("sym", new)
    return tuple(_renamed(child, old, new) if isinstance(child, tuple) else child for child in tree)


_MEASURED = re.compile(
    r"[-+]?(?P<number>\d+\.\d*|\.\d+|\d+)(?:(?:\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{?\s*|[eE])(?P<exponent>[-+]?\s*\d{1,3})\s*\}?)?"
)


def _half_unit(text: str) -> expression.Fraction | None:
    """Half a unit of the last digit of a measured number; None for integers, which are exact, and for anything else."""
    match = _MEASURED.fullmatch(text.strip())
    if match is None or ("." not in match["number"] and match["exponent"] is None):
        return None
    decimals = len(match["number"].partition(".")[2])
    exponent = int((match["exponent"] or "0").replace(" ", ""))
    return expression.Fraction(10) ** (exponent - decimals) / 2


def _match_numeral(key: Value | Words | Numeral, answer: Value | Words | Numeral, rules: Rules) -> bool:
    if isinstance(key, Numeral) and isinstance(answer, Numeral):
        return key.digits.lstrip("0") == answer.digits.lstrip("0") and key.base == answer.base
    numeral, other = (key, answer) if isinstance(key, Numeral) else (answer, key)
    if numeral is answer and numeral.base == 10:
        return _match_leaf(key, Value(quantity(numeral.digits)), rules)
    bare = canonical(other.quantity.body).strip("()") if isinstance(other, Value) else ""
    return numeral.digits.lstrip("0") == bare.lstrip("0") and (numeral is key or rules.bases)


#### Relations


def _match_relation(key: Form, answer: Form, rules: Rules) -> bool:
    if isinstance(key, Relation) and isinstance(answer, Relation):
        if set(key.operators) == set(answer.operators) == {"="}:
            return _match_equations(key, answer, rules)
        same_sides = len(key.sides) == len(answer.sides) and key.operators == answer.operators
        return same_sides and all(_equal_side(k, a) for k, a in zip(key.sides, answer.sides, strict=True))
    if isinstance(key, Relation):
        named = set(key.operators) == {"="} and NAME.fullmatch(canonical(key.sides[0]))
        return bool(named) and _match(parse(key.sides[-1]), answer, rules)
    assert isinstance(answer, Relation)
    if set(answer.operators) != {"="} or not _consistent(answer.sides) or re.match(r"-\s*\\?[A-Za-z]+\s*$", answer.sides[0]):
        return False  # -x = 5 says that x is -5
    first, last = answer.sides[0], answer.sides[-1]
    if "0" in (first, last) and not (NAME.fullmatch(canonical(first)) or NAME.fullmatch(canonical(last))):
        return False  # an equation in its normal form, not the value 0
    return any(_match(key, parse(side), rules) for side in (last, first))


def _equal_side(key: str, answer: str) -> bool:
    k, a = quantity(key), quantity(answer)
    same_unit = k.unit is None or a.unit is None or _same_unit(k.unit, a.unit)
    return _equal_text(key, answer) or (same_unit and _equal_text(k.body, a.body))


def _match_equations(key: Relation, answer: Relation, rules: Rules) -> bool:
    if canonical(key.sides[0]) == canonical(answer.sides[0]):
        return _match(parse(key.sides[-1]), parse(answer.sides[-1]), rules)
    names = [canonical(relation.sides[0]) for relation in (key, answer)]
    if "y" in names and any(re.fullmatch(r"[a-z]\(x\)", name) for name in names):  # a function and its graph
        return _match(parse(key.sides[-1]), parse(answer.sides[-1]), rules)
    if all(re.fullmatch(r"\\?[A-Za-z]+(?:_\w+)?", name) for name in names) and not _letters(key.sides[-1]):
        return False  # the same value for another variable
    try:
        left, right = (_difference(relation) for relation in (key, answer))
    except ParseError:
        return rules.fallback("=".join(key.sides), "=".join(answer.sides))
    return expression.equal(left, right) or expression.equal(left, ("neg", right))


def _letters(text: str) -> bool:
    try:
        return bool(expression.symbols(expression.parse(unmarked(text))))
    except ParseError:
        return True


def _difference(relation: Relation):
    first, last = (expression.parse(unmarked(quantity(side).body)) for side in (relation.sides[0], relation.sides[-1]))
    return ("add", first, ("neg", last))


def _consistent(sides: Sequence[str]) -> bool:
    """Whether the sides of an equation that are numbers agree: `109 + 33 = 142` may stand for 142, `5 = 6` for nothing."""
    values = []
    for side in sides:
        try:
            values.append(expression.exact(expression.parse(unmarked(quantity(side).body))))
        except ParseError:
            continue
    known = {value for value in values if value is not None}
    return len(known) <= 1


#### Sets of real numbers


@dataclasses.dataclass(frozen=True)
class _RealSet:
    """A set by its boundary points and its membership test."""

    ends: tuple[mpmath.mpf, ...]
    has: Callable[[mpmath.mpf], bool]


def _same_set(key: Form, answer: Form) -> bool:
    """Whether both are sets of real numbers, written in whatever way, with the same members."""
    with mpmath.workdps(expression.DIGITS):
        left, right = _real_set(key), _real_set(answer)
        if left is None or right is None:
            return False
        ends = sorted({end for end in (*left.ends, *right.ends) if mpmath.isfinite(end)}) or [mpmath.mpf(0)]
        between = [(a + b) / 2 for a, b in zip(ends, ends[1:], strict=False) if not expression.close(a, b)]
        return all(left.has(x) == right.has(x) for x in (*ends, *between, ends[0] - 1, ends[-1] + 1))


def _real_set(form: Form) -> _RealSet | None:
    if isinstance(form, Brackets) and len(form.parts) == 2:
        low, high = (_real(part) for part in form.parts)
        if low is None or high is None or low > high or (low == high and form.opening + form.closing != "[]"):
            return None
        if (mpmath.isinf(low) and form.opening == "[") or (mpmath.isinf(high) and form.closing == "]"):
            return None
        return _interval(low, form.opening == "[", high, form.closing == "]")
    if isinstance(form, Value) and canonical(form.quantity.body) in ("\\mathbbR", "\\mathbb{R}"):
        return _RealSet((), lambda x: True)
    if isinstance(form, Relation):
        return _inequality(form)
    if isinstance(form, Items):
        points = [_real(part) for part in form.parts]
        if form.braces and points and None not in points:
            return _RealSet(tuple(points), lambda x: any(expression.close(x, point) for point in points))
        return _alternatives(form.parts) if all(isinstance(part, Relation) for part in form.parts) else None
    return _joined(form.parts, form.operators) if isinstance(form, Sets) else None


def _alternatives(parts: Sequence[Relation]) -> _RealSet | None:
    """Listed inequalities: their union, or what they have in common where the union would be everything (x > 3, x <= 4)."""
    points = [_inequality(part, point=True) for part in parts]
    names = {canonical(side) for part in parts for side in part.sides if _real(parse(side)) is None}
    if any(point is None for point in points) or len(names) != 1:
        return None
    ends = sorted(end for point in points for end in point.ends if mpmath.isfinite(end))
    probes = [*ends, *((a + b) / 2 for a, b in zip(ends, ends[1:], strict=False)), ends[0] - 1, ends[-1] + 1]
    quantifier = all if all(any(point.has(x) for point in points) for x in probes) else any
    return _RealSet(tuple(ends), lambda x: quantifier(point.has(x) for point in points))


def _joined(parts: Sequence[Form], operators: Sequence[str]) -> _RealSet | None:
    sets = [_real_set(part) for part in parts]
    if any(s is None for s in sets):
        return None

    def has(x: mpmath.mpf) -> bool:
        inside = sets[0].has(x)
        for operator, other in zip(operators, sets[1:], strict=True):
            member = other.has(x)
            inside = inside or member if operator == "\\cup" else inside and member == (operator == "\\cap")
        return inside

    return _RealSet(tuple(end for s in sets for end in s.ends), has)


def _inequality(relation: Relation, point: bool = False) -> _RealSet | None:
    """The set that an inequality describes; with `point`, also an equation's."""
    values = [_real(parse(side)) for side in relation.sides]
    unknown = [i for i, value in enumerate(values) if value is None]
    name = canonical(relation.sides[unknown[0]]) if len(unknown) == 1 else ""
    if len(name) > 2 and name[0] == name[-1] == "|":  # |a| >= 1/2
        sides = [name[1:-1] if i == unknown[0] else side for i, side in enumerate(relation.sides)]
        inner = _inequality(dataclasses.replace(relation, sides=tuple(sides)), point)
        return inner and _RealSet((*inner.ends, *(-end for end in inner.ends)), lambda x: inner.has(abs(x)))
    if not NAME.fullmatch(name):
        return None
    at = unknown[0]
    if point and relation.operators == ("=",):
        return _RealSet((values[1 - at],), lambda x: expression.close(x, values[1 - at]))
    if relation.operators == ("!=",):
        return _RealSet((values[1 - at],), lambda x: not expression.close(x, values[1 - at]))
    if any(operator not in ("<", "<=") for operator in relation.operators) or len(values) > 3 or (len(values) == 3 and at != 1):
        return None
    last = len(values) - 1
    low, low_closed = (values[at - 1], relation.operators[at - 1] == "<=") if at else (-mpmath.inf, False)
    high, high_closed = (values[at + 1], relation.operators[at] == "<=") if at < last else (mpmath.inf, False)
    return _interval(low, low_closed, high, high_closed)


def _interval(low: mpmath.mpf, low_closed: bool, high: mpmath.mpf, high_closed: bool) -> _RealSet:
    def has(x: mpmath.mpf) -> bool:
        at_low, at_high = expression.close(x, low), expression.close(x, high)
        return (low_closed if at_low else x > low) and (high_closed if at_high else x < high)

    return _RealSet((low, high), has)


def _real(form: Form) -> mpmath.mpf | None:
    """The value of a form that is one real number, else None."""
    if not isinstance(form, Value):
        return None
    try:
        tree = expression.parse(unmarked(form.quantity.body))
        value = expression.numeric(tree, {}) if not expression.symbols(tree) else mpmath.j
    except (ParseError, ArithmeticError, ValueError):
        return None
    return mpmath.re(value) if mpmath.im(value) == 0 else None
