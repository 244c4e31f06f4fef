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
}  # name -> argument


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
    """The value of code that `stringify_expr` made.

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
        case ast.Call(func=function, args=args, keywords=keywords):
            return _called(function, [_value(arg) for arg in args], keywords)
    raise Refused(f"{type(node).__name__} is not arithmetic")


def _called(function: ast.expr, args: list, keywords: list[ast.keyword]) -> Any:
    import sympy

    match function, keywords:
        case ast.Name(id="factorial"), _ if args and args[0].is_number and abs(args[0]) > MAX_FACTORIAL:
            raise Refused(f"a factorial above {MAX_FACTORIAL}!")
        case ast.Name(id=name), [] if name in FUNCTIONS:
            return getattr(sympy, name)(*args)
        case ast.Name(id=name), [ast.keyword(arg="evaluate", value=ast.Constant(value=False))] if name in FUNCTIONS:
            return getattr(sympy, name)(*args, evaluate=False)
        case ast.Call(func=ast.Name(id="Function")), []:
            return _value(function)(*args)
    raise Refused("a call of something that is no known function")


def _power(base: Any, exponent: Any) -> Any:
    import sympy

    base, exponent = sympy.sympify(base, strict=True), sympy.sympify(exponent, strict=True)
    if base.is_Rational and exponent.is_Rational:
        bits = max(abs(int(base.p)).bit_length(), int(base.q).bit_length())
        if bits * abs(exponent) > MAX_BITS:
            raise Refused("a power too large to be written out")
    return base**exponent
