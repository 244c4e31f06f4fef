"""Bounded arithmetic on LaTeX expressions: parse into a tree, evaluate exactly or numerically, decide equality.

Nothing here can run away: the parser is linear with a depth limit, exact numbers have a size limit, and two expressions with
variables are compared by their values at fixed pseudo-random points with 60 digits, not by open-ended simplification.
"""

import functools
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

Node = tuple  # (kind, *arguments); arguments are Nodes, except for "num" (Fraction), "sym", "const" (str) and "call" (str first)


class ParseError(ValueError):
    """The text isn't an expression that this parser knows."""


class TooComplex(ValueError):
    """A size limit was met: the expression is refused, whatever its value may be."""


class _Inexact(Exception):
    """The value isn't a rational number, or isn't known to be."""


#### Parser


def parse(text: str) -> Node:
    """The tree of a LaTeX or plain-text expression.

    Raises:
      ParseError: unknown notation. TooComplex: too long or too deep.
    """
    return _Parser(text).whole()


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

    def whole(self) -> Node:
        node = self.sum()
        if self.peek():
            raise ParseError(f"unexpected {self.peek()}")
        return node

    def group(self, opening: str) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooComplex(f"more than {MAX_DEPTH} nested groups")
        bars, self.bars = self.bars, int(opening == "|")  # inside |..| the next bar closes
        node = self.sum()
        if opening == "{" and self.peek() in ("\\over", "\\choose"):
            kind = self.take()
            node = ("div", node, self.sum()) if kind == "\\over" else ("call", "binom", node, self.sum())
        self.take(CLOSING[opening])
        self.depth, self.bars = self.depth - 1, bars
        return node

    def sum(self) -> Node:
        terms = []
        while True:
            negative = False
            while self.peek() in ("+", "-"):
                negative ^= self.take() == "-"
            term = self.product()
            terms.append(("neg", term) if negative else term)
            if self.peek() not in ("+", "-"):
                return terms[0] if len(terms) == 1 else ("add", *terms)

    def product(self) -> Node:
        factors = [self.power()]
        while True:
            token = self.peek()
            if token in TIMES | OVER:
                self.take()
                negative = self.peek() in ("+", "-") and self.take() == "-"
                factor = self.power()
                factor = ("neg", factor) if negative else factor
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
        known = token in CONSTANTS or token in SYMBOLS or token in ACCENTS or token[1:] in FUNCTIONS
        return known or token in CLOSING or token in ("\\frac", "\\sqrt", "\\binom") or token[:1].isalnum() or token[:1] == "."

    def power(self) -> Node:
        node = self.atom()
        while True:
            token = self.peek()
            if token in ("^", "**"):
                self.take()
                node = ("pow", node, self.exponent())
            elif token == "!":
                self.take()
                node = ("call", "factorial", node)
            elif token == "\\degree":
                self.take()
                node = ("mul", node, ("const", "degree"))
            else:
                return node

    def exponent(self) -> Node:
        if self.peek() in ("-", "+"):
            return ("neg", self.exponent()) if self.take() == "-" else self.exponent()
        if self.peek() in ("(", "{"):
            return self.group(self.take())
        node = self.atom()
        return ("pow", node, self.exponent()) if self.peek() in ("^", "**") and self.take() else node

    def argument(self) -> Node:
        """A TeX argument: a group, else one digit, letter or command."""
        token = self.peek()
        if token == "{":
            return self.group(self.take())
        if token[:1].isdigit() and len(token) > 1:
            self.tokens[self.at : self.at + 1] = [token[0], token[1:]]
        return self.atom()

    def atom(self) -> Node:
        token = self.take()
        if token[0].isdigit() or token[0] == "." and len(token) > 1:
            return ("num", _number(token))
        if token in CLOSING:
            node = self.group(token)
            return node if token in "([{" else ("call", {"|": "abs", "\\lfloor": "floor", "\\lceil": "ceil"}[token], node)
        if token == "\\frac":
            return ("div", self.argument(), self.argument())
        if token == "\\binom":
            return ("call", "binom", self.argument(), self.argument())
        if token == "\\sqrt":
            return self.root()
        if token[1:] in FUNCTIONS:
            return self.function(token[1:])
        if token == "C" and self.peek() == "(" and "," in self.tokens[self.at :]:
            return self.choose()
        if token in CONSTANTS and self.peek() != "_":
            return ("const", CONSTANTS[token])
        return ("sym", self.name(token))

    def root(self) -> Node:
        index: Node = ("num", Fraction(2))
        if self.peek() == "[":
            index = self.group(self.take())
        bare = self.peek()[:1].isdigit()  # \sqrt17 is meant as it looks
        radicand = self.group(self.take()) if self.peek() == "(" else self.atom() if bare else self.argument()
        return ("pow", radicand, ("div", ("num", Fraction(1)), index))

    def function(self, name: str) -> Node:
        exponent = base = None
        while self.peek() in ("^", "_"):
            if self.take() == "^":
                exponent = self.exponent()
            else:
                base = self.argument()
        if self.peek() in ("(", "{", "["):
            operand = self.group(self.take())
        else:  # \cos 2t: an implicit product, up to the next function or operator
            factors = [self.power()]
            while self.starts_factor(self.peek()) and self.peek()[1:] not in FUNCTIONS:
                factors.append(self.power())
            operand = ("mul", *factors)
        if exponent == ("neg", ("num", Fraction(1))) and "arc" + name in FUNCTIONS:
            return ("call", "arc" + name, operand)
        node: Node = ("call", name, operand)
        if base is not None:
            node = ("div", ("call", "ln", operand), ("call", "ln", base))
        return node if exponent is None else ("pow", node, exponent)

    def choose(self) -> Node:
        self.take("(")
        n = self.sum()
        self.take(",")
        k = self.sum()
        self.take(")")
        return ("call", "binom", n, k)

    def name(self, token: str) -> str:
        """A variable's name: accent, letter, subscript and primes."""
        if token in ACCENTS:
            braced = self.peek() == "{" and self.take() == "{"
            token += self.take()
            while braced and self.peek() != "}":
                token += self.take()
            if braced:
                self.take("}")
        elif not (token.isalpha() or token in SYMBOLS | CONSTANTS.keys()):
            raise ParseError(f"unexpected {token}")
        if self.peek() == "_":
            self.take()
            inner = self.take()
            if inner == "{":
                inner = ""
                while self.peek() != "}":
                    inner += self.take()
                self.take("}")
            token += "_" + inner
        while self.peek() == "'":
            token += self.take()
        argument = self.tokens[self.at : self.at + 3]
        if len(argument) == 3 and argument[0] == "(" and argument[1].isdigit() and argument[2] == ")":  # I(0) is no product
            self.at += 3
            token += "".join(argument)
        return token


def _number(token: str) -> Fraction:
    mantissa, _, exponent = token.lower().partition("e")
    if len(mantissa) > MAX_DIGITS or len(exponent) > 5:
        raise TooComplex("a number with too many digits")
    return Fraction(mantissa.rstrip(".") if "." in mantissa else mantissa) * Fraction(10) ** _bounded(int(exponent or 0), 4)


def _bounded(exponent: int, bits: int) -> int:
    if abs(exponent) * bits > MAX_BITS:
        raise TooComplex(f"exponent {exponent}")
    return exponent


#### Evaluation


def symbols(node: Node) -> frozenset[str]:
    """Names of the variables in a tree."""
    found, stack = set(), [node]
    while stack:
        kind, *rest = stack.pop()
        if kind == "sym":
            found.add(rest[0])
        stack.extend(child for child in rest if isinstance(child, tuple))
    return frozenset(found)


def exact(node: Node) -> Fraction | None:
    """The rational value of a tree, or None where it has none, or none that a bounded calculation shows."""
    try:
        return _exact(node)
    except (_Inexact, TooComplex, ZeroDivisionError):
        return None


def _exact(node: Node) -> Fraction:
    kind, *rest = node
    if kind == "num":
        return rest[0]
    if kind in ("sym", "const"):
        raise _Inexact
    values = [_exact(child) for child in rest if isinstance(child, tuple)]
    if kind == "add":
        value = sum(values, Fraction(0))
    elif kind == "mul":
        value = Fraction(1)
        for factor in values:
            value = _small(value * factor)
    elif kind == "neg":
        value = -values[0]
    elif kind == "div":
        value = values[0] / values[1]
    elif kind == "pow":
        value = _exact_power(*values)
    else:
        value = _exact_call(rest[0], values)
    return _small(value)


def _small(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise TooComplex("an exact number is too large")
    return value


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise _Inexact
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    return base ** _bounded(exponent.numerator, 0 if base in (0, 1, -1) else bits)


def _exact_call(name: str, values: list[Fraction]) -> Fraction:
    if name == "abs":
        return abs(values[0])
    if name in ("floor", "ceil"):
        return Fraction(values[0].__floor__() if name == "floor" else values[0].__ceil__())
    if any(v.denominator != 1 or not 0 <= v <= 3000 for v in values):
        raise _Inexact
    if name == "factorial":
        return Fraction(_factorial(int(values[0])))
    if name == "binom":
        n, k = map(int, values)
        return Fraction(_factorial(n), _factorial(k) * _factorial(n - k)) if k <= n else Fraction(0)
    raise _Inexact


@functools.cache
def _factorial(n: int) -> int:  # n <= 3000
    return math.factorial(n)


def numeric(node: Node, point: dict[str, mpmath.mpf]) -> mpmath.mpf | mpmath.mpc:
    """The value at `point`, with the working precision of the caller's mpmath context.

    Raises:
      TooComplex: a power too large to be calculated. ArithmeticError, ValueError: undefined at this point.
    """
    kind, *rest = node
    if kind == "num":
        return mpmath.mpf(rest[0].numerator) / rest[0].denominator
    if kind == "sym":
        return point[rest[0]]
    if kind == "const":
        return {"pi": mpmath.pi, "e": mpmath.e, "i": mpmath.j, "inf": mpmath.inf, "degree": mpmath.pi / 180}[rest[0]] * 1
    values = [numeric(child, point) for child in rest if isinstance(child, tuple)]
    if kind == "add":
        return mpmath.fsum(values)
    if kind == "mul":
        return mpmath.fprod(values)
    if kind == "neg":
        return -values[0]
    if kind == "div":
        return values[0] / values[1]
    if kind == "pow":
        return _numeric_power(*values)
    return _numeric_call(rest[0], values)


def _numeric_power(base, exponent):
    if abs(exponent) > MAX_EXPONENT and base not in (0, 1, -1):
        raise TooComplex("a power is too large")
    if mpmath.im(base) == 0 and mpmath.re(base) < 0 and mpmath.im(exponent) == 0:
        inverse = 1 / exponent if exponent else mpmath.mpf(0)
        odd = mpmath.nint(inverse)
        if abs(inverse) > 1 and abs(inverse - odd) < TOLERANCE and int(odd) % 2:  # the real odd root, as schools have it
            return -((-base) ** exponent)
    return base**exponent


def _numeric_call(name: str, values):
    if name == "abs":
        return abs(values[0])
    if any(abs(v) > mpmath.mpf(10) ** 12 for v in values):
        raise TooComplex(f"argument of {name} is too large")
    if name in ("floor", "ceil"):
        if mpmath.im(values[0]):
            raise ValueError(f"{name} of a complex number")
        return getattr(mpmath, name)(values[0])
    if name == "factorial":
        return mpmath.gamma(values[0] + 1)
    if name == "binom":
        return mpmath.binomial(*values)
    return FUNCTIONS[name](values[0])


#### Equality


def equal(key: Node, answer: Node) -> bool:
    """Whether two trees have the same value, wherever the key has a real one.

    Raises:
      TooComplex: a number is too large to be compared.
    """
    if not symbols(key) | symbols(answer):
        left, right = exact(key), exact(answer)
        if left is not None and right is not None:
            return left == right
    with mpmath.workdps(DIGITS):
        names = sorted(symbols(key) | symbols(answer))
        stretch, trials = (20, 40) if _rounds(key) or _rounds(answer) else (1, 6)  # floor(n/3), floor(n/4) part seldom
        agreed = 0
        for trial in range(trials if names else 1):
            point = {name: stretch * _coordinate(name, trial, signed=2 * trial >= trials) for name in names}
            try:
                left, right = numeric(key, point), numeric(answer, point)
            except (ArithmeticError, ValueError) as error:
                if isinstance(error, TooComplex):
                    raise
                continue  # undefined here: the other points decide
            if 2 * trial >= trials and abs(mpmath.im(left)) > TOLERANCE * abs(left):
                continue  # sqrt(a^2 b) with a negative b: the key's own domain ends here
            if not close(left, right):
                return False
            agreed += 1
    return agreed >= (2 if names else 1)


def _rounds(node: Node) -> bool:
    return node[:2] in (("call", "floor"), ("call", "ceil")) or any(_rounds(child) for child in node if isinstance(child, tuple))


def close(left, right) -> bool:
    """Whether two numeric values agree within TOLERANCE, relative to the larger; or both are rounding noise around zero."""
    if mpmath.isnan(left) or mpmath.isnan(right):
        return False
    if mpmath.isinf(left) or mpmath.isinf(right):
        return left == right
    if abs(left - right) <= TOLERANCE * max(abs(left), abs(right)):
        return True
    return all(value == 0 or NOISE[0] < abs(value) < NOISE[1] for value in (left, right))


def _coordinate(name: str, trial: int, signed: bool) -> mpmath.mpf:
    """A fixed point for a variable: between 0.3 and 2.7, of either sign if `signed`; the same on every machine."""
    noise = zlib.crc32(f"{name}:{trial}".encode())
    value = mpmath.mpf(3) / 10 + mpmath.mpf(24 * (noise >> 1)) / (10 * 2**31)
    return -value if signed and noise & 1 else value
