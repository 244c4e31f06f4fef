"""Sympy reads text without Python's `eval`.

`sympy.parse_expr` (and with it `sympify` of a text, and math-verify) turns text into Python code and evaluates that, so that an
answer could call any function. `install` replaces this one step, for the whole process, by an interpreter of arithmetic: numbers,
symbols, + - * / ** and a fixed list of names. Everything else that Python's grammar knows is refused.
"""

import ast
import functools
import operator
from typing import Any

MAX_BITS = 10**6  # of a power of two numbers
MAX_FACTORIAL = 10**4
OPERATORS = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv},
    **{ast.UAdd: operator.pos, ast.USub: operator.neg},
}
CONSTANTS = ("pi", "E", "I", "oo", "zoo", "nan")
FUNCTIONS = ("sqrt", "frac", "re", "im", "ln", "log", "exp", "sin", "cos", "tan", "Abs", "factorial", "Add", "Mul", "Pow")
LITERALS = {
    "Integer": int,
    "Float": (str, int, float),
    "Rational": (str, int),
    "Symbol": str,
    "Function": str,
}  # type of argument


class Refused(ValueError):
    """The text says something other than arithmetic, or is too large to be calculated."""


@functools.cache
def install() -> Any:
    """Makes every reader of sympy in this process use `evaluate`; returns `sympy.parsing.sympy_parser`."""
    from sympy.parsing import sympy_parser

    sympy_parser.eval_expr = evaluate
    sympy_parser.compile = lambda tree, *_: tree  # what parse_expr(evaluate=False) would hand to eval
    return sympy_parser


def evaluate(code: str | ast.Expression, _local_dict: object = None, _global_dict: object = None) -> Any:
    """Returns the value of code that `stringify_expr` made.

    Raises:
      Refused, SyntaxError, TypeError: it is not the code of an arithmetic expression.
    """
    tree = ast.parse(code.strip(), mode="eval") if isinstance(code, str) else code
    return _value(tree.body)


def _value(node: ast.expr) -> Any:
    import sympy

    match node:
        case ast.Constant(value=bool() | int() | float()):
            return node.value
        case ast.Name(id=name) if name in CONSTANTS:
            return getattr(sympy, name)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=value)], keywords=[]) if name in LITERALS:
            if isinstance(value, LITERALS[name]):
                return getattr(sympy, name)(value)
        case ast.Call(func=ast.Call(func=ast.Name(id="Function")) as function, args=args, keywords=[]):
            return _value(function)(*map(_value, args))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name in FUNCTIONS:
            values = [_value(arg) for arg in args]
            if name == "factorial" and any(value.is_number and abs(value) > MAX_FACTORIAL for value in values):
                raise Refused(f"a factorial above {MAX_FACTORIAL}!")
            match keywords:
                case []:
                    return getattr(sympy, name)(*values)
                case [ast.keyword(arg="evaluate", value=ast.Constant(value=False))]:
                    return getattr(sympy, name)(*values, evaluate=False)
    raise Refused(f"{type(node).__name__} is not arithmetic")


def _power(base: Any, exponent: Any) -> Any:
    import sympy

    base, exponent = sympy.sympify(base, strict=True), sympy.sympify(exponent, strict=True)
    if base.is_Rational and exponent.is_Rational:
        bits = max(abs(int(base.p)).bit_length(), int(base.q).bit_length())
        if bits * abs(exponent) > MAX_BITS:
            raise Refused("a power too large to be written out")
    return base**exponent
