"""Bounded arithmetic on LaTeX expressions: parse into a tree, evaluate exactly or numerically, decide equality.

Nothing here can run away: the parser is linear with a depth limit, exact numbers have a size limit, and two expressions with
variables are compared by their values at fixed pseudo-random points with 60 digits, not by open-ended simplification.
"""

import math
import re
import zlib
from fractions import Fraction

import mpmath

MAX_DEPTH = 50  # nested groups
MAX_TOKENS = 2500
MAX_DIGITS = 4000  # of a literal number (Python itself refuses 4,301)
MAX_BITS = 60_000  # of an exact numerator or denominator
MAX_EXPONENT = 10**9  # of a numeric power
DIGITS = 60  # of numeric evaluation
TOLERANCE = mpmath.mpf(10) ** -40  # relative, between two numeric values
NOISE = (mpmath.mpf(10) ** -80, mpmath.mpf(10) ** -45)  # sizes of what cancellation leaves of zero at that precision

FUNCTIONS = {
    **{name: getattr(mpmath, name) for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth", "exp")},
    **{"arc" + name: getattr(mpmath, "a" + name) for name in ("sin", "cos", "tan", "cot", "sec", "csc")},
    "ln": mpmath.log,
    "log": mpmath.log,
    "lg": mpmath.log10,
}
CONSTANTS = {"\\pi": "pi", "e": "e", "i": "i", "\\infty": "inf", "\\degree": "degree"}
_CONSTANTS = {"pi": mpmath.pi, "e": mpmath.e, "i": mpmath.j, "inf": mpmath.inf, "degree": mpmath.degree}
_ARITHMETIC = {"add": mpmath.fsum, "mul": mpmath.fprod, "neg": lambda v: -v[0], "div": lambda v: v[0] / v[1]}
ACCENTS = {"\\" + name for name in "dot ddot bar hat vec tilde overline widehat overrightarrow mathbb mathcal".split()}
GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau upsilon "
    "phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell hbar"
)
SYMBOLS = {"\\" + name for name in GREEK.split()} | {"\\emptyset", "\\varnothing", "\\triangle", "\\angle"}
TIMES, OVER = {"*", "\\cdot", "\\times"}, {"/", "\\div", ":"}
CLOSING = {"(": ")", "[": "]", "{": "}", "|": "|", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_PLAIN = "|".join(sorted(FUNCTIONS, key=len, reverse=True)) + "|sqrt|pi|infty"  # names that count without their backslash
_TOKEN = re.compile(rf"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|\\[A-Za-z]+|\\.|\*\*|(?:{_PLAIN})(?![a-z])|\S")

Node = tuple  # ("num", Fraction), ("sym" or "const", name), or (operation, *Nodes)


class ParseError(ValueError):
    """The text isn't an expression that this parser knows."""


class TooComplex(Exception):
    """A size limit was met: the expression is refused, whatever its value may be."""


#### Parser


def parse(text: str) -> Node:
    """Returns the tree of a LaTeX or plain-text expression.

    Raises:
      ParseError: unknown notation. TooComplex: too long or too deep.
    """
    parser = _Parser(text)
    node = parser.sum()
    if parser.peek():
        raise ParseError(f"unexpected {parser.peek()}")
    return node


class _Parser:
    """Recursive descent over a token list; `at` is the index of the next token."""

    def __init__(self, text: str):
        tokens = _TOKEN.findall(text)
        if len(tokens) > MAX_TOKENS:
            raise TooComplex(f"more than {MAX_TOKENS} tokens")
        self.tokens = ["\\" + t if t.isalpha() and len(t) > 1 else t for t in tokens]
        self.at = self.depth = self.bars = 0

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, expected: str = "") -> str:
        token = self.peek()
        if not token or (expected and token != expected):
            raise ParseError(f"expected {expected or 'more'}, found {token or 'the end'}")
        self.at += 1
        return token

    def accept(self, *tokens: str) -> str:
        """Takes the next token if it is one of `tokens`; otherwise returns ""."""
        return self.take() if self.peek() in tokens else ""

    def negative(self) -> bool:
        """Takes a run of signs and returns whether it is negative."""
        negative = False
        while sign := self.accept("+", "-"):
            negative ^= sign == "-"
        return negative

    def group(self, opening: str) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooComplex(f"more than {MAX_DEPTH} nested groups")
        bars, self.bars = self.bars, int(opening == "|")  # inside |..| the next bar closes
        node = self.sum()
        if opening == "{" and (kind := self.accept("\\over", "\\choose")):
            node = ("div", node, self.sum()) if kind == "\\over" else ("binom", node, self.sum())
        self.take(CLOSING[opening])
        self.depth, self.bars = self.depth - 1, bars
        return node

    def sum(self) -> Node:
        terms: list[Node] = []
        while not terms or self.peek() in ("+", "-"):
            terms.append(("neg", self.product()) if self.negative() else self.product())
        return terms[0] if len(terms) == 1 else ("add", *terms)

    def product(self) -> Node:
        factors = [self.power()]
        while True:
            token = self.peek()
            if self.accept(*TIMES, *OVER):
                factor = ("neg", self.power()) if self.negative() else self.power()
                factors.append(("div", ("num", Fraction(1)), factor) if token in OVER else factor)
            elif self.starts_factor(token):
                bare_number = self.tokens[self.at - 1][-1].isdigit() and factors[-1][0] == "num"
                factor = self.power()
                mixed = bare_number and token == "\\frac" and factor[0] == "div" and factor[1][0] == factor[2][0] == "num"
                if mixed and factors[-1][1].denominator == 1 and 0 < factor[1][1] < factor[2][1]:
                    factors[-1] = ("add", factors[-1], factor)  # a mixed number: 4\frac{2}{3}
                elif bare_number and token[0].isdigit():
                    raise ParseError("two numbers side by side")
                else:
                    factors.append(factor)
            else:
                return factors[0] if len(factors) == 1 else ("mul", *factors)

    def starts_factor(self, token: str) -> bool:
        if token == "|":
            return not self.bars
        known = token in CONSTANTS or token in SYMBOLS or token in ACCENTS or token[1:] in FUNCTIONS or token in CLOSING
        return known or token in ("\\frac", "\\sqrt", "\\binom") or token[:1].isalnum() or token[:1] == "."

    def power(self) -> Node:
        node = self.atom()
        while token := self.accept("^", "**", "!", "\\degree"):
            if token == "!":
                node = ("factorial", node)
            else:
                node = ("mul", node, ("const", "degree")) if token == "\\degree" else ("pow", node, self.exponent())
        return node

    def exponent(self) -> Node:
        if sign := self.accept("-", "+"):
            return ("neg", self.exponent()) if sign == "-" else self.exponent()
        if opening := self.accept("(", "{"):
            return self.group(opening)
        node = self.atom()
        return ("pow", node, self.exponent()) if self.accept("^", "**") else node

    def argument(self) -> Node:
        """Reads a TeX argument: a group, or else one digit, letter or command."""
        if self.accept("{"):
            return self.group("{")
        token = self.peek()
        if token[:1].isdigit() and len(token) > 1:
            self.tokens[self.at : self.at + 1] = [token[0], token[1:]]
        return self.atom()

    def atom(self) -> Node:
        token = self.take()
        if token[0].isdigit() or token[0] == "." and len(token) > 1:
            return ("num", _number(token))
        if token in CLOSING:
            node = self.group(token)
            return node if token in "([{" else ({"|": "abs", "\\lfloor": "floor", "\\lceil": "ceil"}[token], node)
        if token == "\\frac":
            return ("div", self.argument(), self.argument())
        if token == "\\binom":
            return ("binom", self.argument(), self.argument())
        if token == "\\sqrt":
            index = self.group("[") if self.accept("[") else ("num", Fraction(2))
            bare = self.peek()[:1].isdigit()  # \sqrt17 is meant as it looks
            radicand = self.group("(") if self.accept("(") else self.atom() if bare else self.argument()
            return ("pow", radicand, ("div", ("num", Fraction(1)), index))
        if token[1:] in FUNCTIONS:
            return self.function(token[1:])
        if token == "C" and self.peek() == "(" and "," in self.tokens[self.at :]:  # C(n, k)
            self.take("(")
            n = self.sum()
            self.take(",")
            node = ("binom", n, self.sum())
            self.take(")")
            return node
        if token in CONSTANTS and self.peek() != "_":
            return ("const", CONSTANTS[token])
        return ("sym", self.name(token))

    def function(self, name: str) -> Node:
        exponent = base = None
        while mark := self.accept("^", "_"):
            if mark == "^":
                exponent = self.exponent()
            else:
                base = self.argument()
        if opening := self.accept("(", "{", "["):
            operand = self.group(opening)
        else:  # \cos 2t: an implicit product, up to the next function or operator
            factors = [self.power()]
            while self.starts_factor(self.peek()) and self.peek()[1:] not in FUNCTIONS:
                factors.append(self.power())
            operand = ("mul", *factors)
        if exponent == ("neg", ("num", Fraction(1))) and "arc" + name in FUNCTIONS:
            return ("arc" + name, operand)
        node: Node = (name, operand)
        if base is not None:
            node = ("div", ("ln", operand), ("ln", base))
        return node if exponent is None else ("pow", node, exponent)

    def name(self, token: str) -> str:
        """Reads a variable's name with accent, subscript and primes; also I(0), which is no product."""
        if token in ACCENTS:
            token += self.braced()
        elif not (token.isalpha() or token in SYMBOLS | CONSTANTS.keys()):
            raise ParseError(f"unexpected {token}")
        if self.accept("_"):
            token += "_" + self.braced()
        while self.accept("'"):
            token += "'"
        argument = "".join(self.tokens[self.at : self.at + 3])
        if re.fullmatch(r"\(\d+\)", argument):
            self.at += 3
            token += argument
        return token

    def braced(self) -> str:
        """Reads a token or a group as text."""
        if not self.accept("{"):
            return self.take()
        inner = ""
        while self.peek() != "}":
            inner += self.take()
        self.take("}")
        return inner


def _number(token: str) -> Fraction:
    mantissa, _, exponent = token.lower().partition("e")
    if len(mantissa) > MAX_DIGITS or len(exponent) > 5 or abs(int(exponent or 0)) * 4 > MAX_BITS:
        raise TooComplex("a number with too many digits")
    return Fraction(mantissa.rstrip(".")) * Fraction(10) ** int(exponent or 0)


#### Evaluation


def symbols(node: Node) -> frozenset[str]:
    """Returns the names of the variables in a tree."""
    found, stack = set(), [node]
    while stack:
        kind, *rest = stack.pop()
        if kind == "sym":
            found.add(rest[0])
        stack.extend(child for child in rest if isinstance(child, tuple))
    return frozenset(found)


def exact(node: Node) -> Fraction | None:
    """Returns the rational value of a tree, or None where it has none, or none that a bounded calculation shows."""
    try:
        found = value(node, {}) if not symbols(node) else None
    except (TooComplex, ArithmeticError, ValueError):
        return None
    return found if isinstance(found, Fraction) else None


def value(node: Node, point: dict[str, mpmath.mpf]) -> Fraction | mpmath.mpf | mpmath.mpc:
    """Returns the value at `point`: exact while it is rational and small enough, else with the caller's mpmath precision.

    Raises:
      TooComplex: a power too large to be calculated. ArithmeticError, ValueError: undefined at this point.
    """
    kind, *rest = node
    if kind == "num":
        return rest[0]
    if kind == "sym":
        return point[rest[0]]
    if kind == "const":
        return +_CONSTANTS[rest[0]]
    values = [value(child, point) for child in rest]
    if all(isinstance(v, Fraction) for v in values):
        found = _exact(kind, values)
        if found is not None and _bits(found) <= MAX_BITS:
            return found
    return _numeric(kind, [as_mpmath(v) for v in values])


def as_mpmath(number: Fraction | mpmath.mpf | mpmath.mpc) -> mpmath.mpf | mpmath.mpc:
    return mpmath.mpf(number.numerator) / number.denominator if isinstance(number, Fraction) else number


def _bits(number: Fraction) -> int:
    return max(number.numerator.bit_length(), number.denominator.bit_length())


def _exact(name: str, values: list[Fraction]) -> Fraction | None:
    """Returns the rational value of one operation, or None where it has none that is small enough."""
    first, *others = values
    match name, others:
        case "add", _:
            return sum(values, Fraction(0))
        case "mul", _:
            return math.prod(values) if sum(map(_bits, values)) <= 2 * MAX_BITS else None
        case "neg", _:
            return -first
        case "div", [below]:
            return first / below
        case "pow", [exponent] if exponent.denominator == 1:
            small = first in (0, 1, -1) or abs(exponent) * _bits(first) <= MAX_BITS
            return first**exponent.numerator if small else None
        case (("abs" | "floor" | "ceil"), _):
            return Fraction({"abs": abs, "floor": math.floor, "ceil": math.ceil}[name](first))
        case (("factorial" | "binom"), _) if all(v.denominator == 1 and 0 <= v <= 3000 for v in values):
            return Fraction(math.factorial(int(first)) if name == "factorial" else math.comb(*map(int, values)))
    return None


def _numeric(name: str, values: list):
    if name in _ARITHMETIC:
        return _ARITHMETIC[name](values)
    if name == "pow":
        return _power(*values)
    if name == "abs":
        return abs(values[0])
    if any(abs(v) > mpmath.mpf(10) ** 12 for v in values):
        raise TooComplex(f"argument of {name} is too large")
    if name in ("floor", "ceil") and mpmath.im(values[0]):
        raise ValueError(f"{name} of a complex number")
    return (FUNCTIONS.get(name) or getattr(mpmath, {"binom": "binomial"}.get(name, name)))(*values)


def _power(base, exponent):
    if abs(exponent) > MAX_EXPONENT and base not in (0, 1, -1):
        raise TooComplex("a power is too large")
    if mpmath.im(base) == 0 and mpmath.re(base) < 0 and mpmath.im(exponent) == 0:
        inverse = 1 / exponent if exponent else mpmath.mpf(0)
        odd = mpmath.nint(inverse)
        if abs(inverse) > 1 and abs(inverse - odd) < TOLERANCE and int(odd) % 2:  # the real odd root, as schools have it
            return -((-base) ** exponent)
    return base**exponent


#### Equality


def equal(key: Node, answer: Node) -> bool:
    """Returns whether two trees have the same value, wherever the key has a real one.

    Raises:
      TooComplex: a number is too large to be compared.
    """
    with mpmath.workdps(DIGITS):
        names = sorted(symbols(key) | symbols(answer))
        stretch, trials = (20, 40) if _rounds(key) or _rounds(answer) else (1, 6)  # floor(n/3), floor(n/4) part seldom
        agreed = 0
        for trial in range(trials if names else 1):
            point = {name: stretch * _coordinate(name, trial, signed=2 * trial >= trials) for name in names}
            try:
                left, right = value(key, point), value(answer, point)
            except (ArithmeticError, ValueError):
                continue  # undefined here: the other points decide
            if isinstance(left, Fraction) and isinstance(right, Fraction) and not names:
                return left == right
            left, right = as_mpmath(left), as_mpmath(right)
            if 2 * trial >= trials and abs(mpmath.im(left)) > TOLERANCE * abs(left):
                continue  # sqrt(a^2 b) with a negative b: the key's own domain ends here
            if not close(left, right):
                return False
            agreed += 1
    return agreed >= (2 if names else 1)


def _rounds(node: Node) -> bool:
    return node[0] in ("floor", "ceil") or any(_rounds(child) for child in node if isinstance(child, tuple))


def close(left, right) -> bool:
    """Returns whether two numbers agree within TOLERANCE of the larger, or are both rounding noise around zero."""
    if mpmath.isnan(left) or mpmath.isnan(right):
        return False
    if mpmath.isinf(left) or mpmath.isinf(right):
        return left == right
    if abs(left - right) <= TOLERANCE * max(abs(left), abs(right)):
        return True
    return all(value == 0 or NOISE[0] < abs(value) < NOISE[1] for value in (left, right))


def _coordinate(name: str, trial: int, signed: bool) -> mpmath.mpf:
    """Returns a fixed value for a variable, between 0.3 and 2.7, of either sign if `signed`; it is the same on every machine."""
    noise = zlib.crc32(f"{name}:{trial}".encode())
    value = mpmath.mpf(3) / 10 + mpmath.mpf(24 * (noise >> 1)) / (10 * 2**31)
    return -value if signed and noise & 1 else value
