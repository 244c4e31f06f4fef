"""Whether an answer says the same as a key: typed comparison of their forms.

Within a type by value; between types only along a short list of edges: a value and the right side of an equation, a list and
a set, an interval and an inequality, a percentage and a number, a numeral and its bare digits, words and letters.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

import mpmath

from deepgrpo.rewards import expression
from deepgrpo.rewards.expression import Node, ParseError, TooComplex
from deepgrpo.rewards.forms import (
    NAME,
    Brackets,
    Clock,
    Form,
    Items,
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
    fallback: decides two leaves (as clean text) whose key the expression parser does not know.
    """

    measured: bool = False
    free_constant: bool = False
    bases: bool = False
    fallback: Callable[[str, str], bool] = lambda key, answer: False


def same(key: str, answer: str, rules: Rules) -> bool:
    """Returns whether raw LaTeX `answer` says the same as `key`.

    Raises:
      TooComplex: the answer is too long or holds too large a number to be compared.
    """
    key, answer = clean(key), re.sub(r"(?<![\d.])0{5,}(?=\d)", "", clean(answer))
    outer = min(len(answer) - len(answer.lstrip("(")), len(answer) - len(answer.rstrip(")")))
    if outer > 3 and outer == answer.count("(") == answer.count(")"):  # harmless, but deeper than the parsers go
        answer = answer[outer:-outer]
    if canonical(key) == canonical(answer):
        return bool(canonical(key))
    if len(answer) > max(MAX_CLEAN, 2 * len(key)):
        raise TooComplex(f"{len(answer)} characters")
    return any(_match(k, a, rules) for k in readings(key) for a in readings(answer))


def _match(key: Form, answer: Form, rules: Rules) -> bool:
    key, answer = _unwrapped(key, rules, 1), _unwrapped(answer, rules, MAX_ITEMS)
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
    if isinstance(key, Value | Words | Numeral) and isinstance(answer, Value | Words | Numeral):
        return _match_leaf(key, answer, rules)
    return _same_set(key, answer)


def _unites(form: Form) -> bool:
    return isinstance(form, Items) or set(form.operators) == {"\\cup"}


def _members(form: Form) -> list[Form]:
    """Returns what a list, a set or a union of sets consists of: points and intervals."""
    united = isinstance(form, Sets)
    return [m for part in form.parts for m in (part.parts if united and isinstance(part, Items) and part.braces else (part,))]


def _minutes(form: Form) -> set[int]:
    """Returns the times of day that a form may mean."""
    if isinstance(form, Clock):
        return {form.minutes}
    digits = re.fullmatch(r"(\d{1,2})(?::(\d\d))?", form.quantity.body.strip()) if isinstance(form, Value) else None
    if digits is None:
        return set()
    hours, minutes = int(digits[1]), int(digits[2] or 0)
    return {60 * h + minutes for h in ((hours % 12, hours % 12 + 12) if hours <= 12 else (hours,))}


def _unwrapped(form: Form, rules: Rules, most: int) -> Form:
    """Returns the answer itself for a list or set that only repeats one answer, up to `most` times. A set of a set stays."""
    if isinstance(form, Items) and 0 < len(form.parts) <= most:
        first, *others = form.parts
        if form.braces and isinstance(first, Items) and first.braces:
            return form
        if all(other == first or _match(first, other, dataclasses.replace(rules, measured=False)) for other in others):
            return first
    return form


def _match_all(key: Sequence[Form], answer: Sequence[Form], rules: Rules) -> bool:
    return len(key) == len(answer) and all(_match(k, a, rules) for k, a in zip(key, answer, strict=True))


def _match_items(key: Sequence[Form], answer: Sequence[Form], rules: Rules) -> bool:
    """Returns whether two unordered collections pair up; what only the answer repeats counts once."""
    if len(key) > MAX_ITEMS or len(answer) > MAX_ITEMS:
        return list(key) == list(answer)
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


def _tree(text: str) -> Node | None:
    """Returns the expression that clean text is; None if the parser does not know it."""
    try:
        return expression.parse(unmarked(text))
    except ParseError:
        return None


def _equal_text(key: str, answer: str) -> bool:
    """Returns whether two pieces of clean text are expressions of the same value."""
    if canonical(key) == canonical(answer):
        return True
    left = _tree(key)
    right = None if left is None else _tree(answer)
    return right is not None and expression.equal(left, right)


#### Leaves


_NUMERALS = {
    word: str(number) for number, word in enumerate("zero one two three four five six seven eight nine ten eleven twelve".split())
}
_PRIMES = {"'": ("minute", "foot", "arcmin"), "''": ("second", "inch", "arcsec")}
_CONSTANTS = frozenset(("c", "C", "c_1", "C_1", "C_0", "c_0", "k", "K", "A", "B"))
_MEASURED = re.compile(
    r"[-+]?(?P<number>\d+\.\d*|\.\d+|\d+)(?:(?:\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{?\s*|[eE])(?P<exponent>[-+]?\s*\d{1,3})\s*\}?)?"
)


def _match_leaf(key: Value | Words | Numeral, answer: Value | Words | Numeral, rules: Rules) -> bool:
    if isinstance(key, Numeral) or isinstance(answer, Numeral):
        return _match_numeral(key, answer, rules)
    if isinstance(key, Words) or isinstance(answer, Words):
        texts = (form.text if isinstance(form, Words) else plain_words(form.quantity.body) for form in (key, answer))
        left, right = (_NUMERALS.get(text, text) for text in texts)
        return left == right != ""
    k, a = key.quantity, answer.quantity
    if k.unit and (a.percent or a.unit and not _same_unit(k.unit, a.unit)):
        return False
    left, right = unmarked(k.body), unmarked(a.body)
    if re.fullmatch(r"[A-Za-z]{4,}", left) and left.lower() == right.lower():
        return True  # a word without its \text
    if k.percent == a.percent and k.scale == a.scale and canonical(left) == canonical(right) != "":
        return True
    if (key_tree := _tree(left)) is None:
        return k.percent == a.percent and rules.fallback(left, right)
    if (answer_tree := _tree(right)) is None:
        return False
    key_tree, answer_tree = _times(key_tree, k.scale), _times(answer_tree, a.scale)
    if _equal(key_tree, answer_tree, left, rules):
        return True
    hundredths = [_times(tree, Fraction(1, 100 if q.percent else 1)) for tree, q in ((key_tree, k), (answer_tree, a))]
    return k.percent != a.percent and _equal(*hundredths, "", rules)


def _times(tree: Node, factor: Fraction | int) -> Node:
    return tree if factor == 1 else ("mul", tree, ("num", Fraction(factor)))


def _same_unit(key: tuple[str, ...], answer: tuple[str, ...]) -> bool:
    """Returns the same unit; one side may leave out what it is counted per (cents, cents per ounce) or write it as primes."""
    if ("per" in key) != ("per" in answer):
        key, answer = (unit[: unit.index("per")] if "per" in unit[1:] else unit for unit in (key, answer))
    return key == answer or any(a in _PRIMES and b[0] in _PRIMES[a] for (a, *_), b in ((key, answer), (answer, key)))


def _equal(key: Node, answer: Node, key_text: str, rules: Rules) -> bool:
    if expression.equal(key, answer):
        return True
    unknowns, found = expression.symbols(key), expression.symbols(answer)
    if rules.measured and (margin := _half_unit(key_text)) is not None and not found:
        left, right = expression.exact(key), expression.exact(answer)
        return left is not None and right is not None and abs(left - right) <= margin
    new, constant = (found - unknowns) & _CONSTANTS, {"c", "C"} & unknowns
    if rules.free_constant and len(constant) == len(new) == 1 and not constant & found:
        return expression.equal(key, _renamed(answer, *new, *constant))
    return False


def _renamed(tree: Node, old: str, new: str) -> Node:
    if tree == ("sym", old):
        return ("sym", new)
    return tuple(_renamed(child, old, new) if isinstance(child, tuple) else child for child in tree)


def _half_unit(text: str) -> Fraction | None:
    """Returns half a unit of the last digit of a measured number; None for integers, which are exact, and for anything else."""
    match = _MEASURED.fullmatch(text.strip())
    if match is None or ("." not in match["number"] and match["exponent"] is None):
        return None
    exponent = int((match["exponent"] or "0").replace(" ", ""))
    return Fraction(10) ** (exponent - len(match["number"].partition(".")[2])) / 2


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
        return key.operators == answer.operators and all(map(_equal_side, key.sides, answer.sides))
    if isinstance(key, Relation):
        named = set(key.operators) == {"="} and NAME.fullmatch(canonical(key.sides[0]))
        return bool(named) and _match(parse(key.sides[-1]), answer, rules)
    if set(answer.operators) != {"="} or re.match(r"-\s*\\?[A-Za-z]+\s*$", answer.sides[0]):
        return False  # -x = 5 says that x is -5
    values = {expression.exact(tree) for side in answer.sides if (tree := _tree(quantity(side).body)) is not None}
    if len(values - {None}) > 1:
        return False  # 109 + 33 = 142 may stand for 142, 5 = 6 for nothing
    first, last = answer.sides[0], answer.sides[-1]
    if "0" in (first, last) and not (NAME.fullmatch(canonical(first)) or NAME.fullmatch(canonical(last))):
        return False  # an equation in its normal form, not the value 0
    return any(_match(key, parse(side), rules) for side in (last, first))


def _equal_side(key: str, answer: str) -> bool:
    k, a = quantity(key), quantity(answer)
    same_unit = k.unit is None or a.unit is None or _same_unit(k.unit, a.unit)
    return _equal_text(key, answer) or (same_unit and _equal_text(k.body, a.body))


def _match_equations(key: Relation, answer: Relation, rules: Rules) -> bool:
    names = [canonical(relation.sides[0]) for relation in (key, answer)]
    graph = "y" in names and any(re.fullmatch(r"[a-z]\(x\)", name) for name in names)  # a function and its graph
    if names[0] == names[1] or graph:
        return _match(parse(key.sides[-1]), parse(answer.sides[-1]), rules)
    last = _tree(key.sides[-1])
    if all(re.fullmatch(r"\\?[A-Za-z]+(?:_\w+)?", name) for name in names) and last is not None and not expression.symbols(last):
        return False  # the same value for another variable
    trees = [[_tree(quantity(side).body) for side in (r.sides[0], r.sides[-1])] for r in (key, answer)]
    if None in trees[0] + trees[1]:
        return rules.fallback("=".join(key.sides), "=".join(answer.sides))
    left, right = (("add", first, ("neg", last)) for first, last in trees)
    return expression.equal(left, right) or expression.equal(left, ("neg", right))


#### Sets of real numbers


@dataclasses.dataclass(frozen=True)
class _RealSet:
    """A set by its boundary points and its membership test."""

    ends: tuple[mpmath.mpf, ...]
    has: Callable[[mpmath.mpf], bool]


def _same_set(key: Form, answer: Form) -> bool:
    """Returns whether both are sets of real numbers, written in whatever way, with the same members."""
    with mpmath.workdps(expression.DIGITS):
        left, right = _real_set(key), _real_set(answer)
        if left is None or right is None:
            return False
        return all(left.has(x) == right.has(x) for x in _probes(*left.ends, *right.ends))


def _probes(*ends: mpmath.mpf) -> list[mpmath.mpf]:
    """Returns numbers among which two sets with these boundary points differ, if they differ at all."""
    known = sorted({end for end in ends if mpmath.isfinite(end)}) or [mpmath.mpf(0)]
    between = [(a + b) / 2 for a, b in zip(known, known[1:], strict=False) if not expression.close(a, b)]
    return [*known, *between, known[0] - 1, known[-1] + 1]


def _real_set(form: Form) -> _RealSet | None:
    if isinstance(form, Brackets) and len(form.parts) == 2:
        low, high = (_real(part) for part in form.parts)
        if low is None or high is None or low > high or (low == high and form.opening + form.closing != "[]"):
            return None
        if (mpmath.isinf(low) and form.opening == "[") or (mpmath.isinf(high) and form.closing == "]"):
            return None
        return _chain((low, None, high), ("<=" if form.opening == "[" else "<", "<=" if form.closing == "]" else "<"))
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
    """Returns the union of listed inequalities, or their intersection if the union is everything (x > 3, x <= 4)."""
    sets = [_inequality(part) for part in parts]
    names = {canonical(side) for part in parts for side in part.sides if _real(parse(side)) is None}
    if None in sets or len(names) != 1:
        return None
    ends = tuple(end for one in sets for end in one.ends)
    quantifier = all if all(any(one.has(x) for one in sets) for x in _probes(*ends)) else any
    return _RealSet(ends, lambda x: quantifier(one.has(x) for one in sets))


def _joined(parts: Sequence[Form], operators: Sequence[str]) -> _RealSet | None:
    sets = [_real_set(part) for part in parts]
    if None in sets:
        return None

    def has(x: mpmath.mpf) -> bool:
        inside = sets[0].has(x)
        for operator, other in zip(operators, sets[1:], strict=True):
            member = other.has(x)
            inside = inside or member if operator == "\\cup" else inside and member == (operator == "\\cap")
        return inside

    return _RealSet(tuple(end for s in sets for end in s.ends), has)


def _inequality(relation: Relation) -> _RealSet | None:
    """Returns the set that comparisons with one variable, or with its absolute value, describe."""
    sides = [_real(parse(side)) for side in relation.sides]
    if sides.count(None) != 1:
        return None
    name = canonical(relation.sides[sides.index(None)])
    absolute = len(name) > 2 and name[0] == name[-1] == "|"  # |a| >= 1/2
    return _chain(sides, relation.operators, absolute) if NAME.fullmatch(name.strip("|") if absolute else name) else None


def _chain(sides: Sequence[mpmath.mpf | None], operators: Sequence[str], absolute: bool = False) -> _RealSet:
    """Returns the numbers for which a chain of comparisons holds, in which None stands for the number."""
    known = [side for side in sides if side is not None]

    def has(x: mpmath.mpf) -> bool:
        filled = [(abs(x) if absolute else x) if side is None else side for side in sides]
        return all(map(_holds, operators, filled, filled[1:]))

    return _RealSet((*known, *(-end for end in known if absolute)), has)


def _holds(operator: str, left: mpmath.mpf, right: mpmath.mpf) -> bool:
    equal = expression.close(left, right)
    if operator in ("=", "!="):
        return equal == (operator == "=")
    return operator.endswith("=") if equal else (left < right) == (operator[0] == "<")


def _real(form: Form) -> mpmath.mpf | None:
    """Returns the value of a form that is one real number, else None."""
    tree = _tree(form.quantity.body) if isinstance(form, Value) else None
    if tree is None or expression.symbols(tree):
        return None
    try:
        value = expression.as_mpmath(expression.value(tree, {}))
    except (ArithmeticError, ValueError, TooComplex):
        return None
    return mpmath.re(value) if mpmath.im(value) == 0 else None
