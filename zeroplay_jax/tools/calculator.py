"""`calculator`: arithmetic, by a parser. Nothing that a policy writes is ever executed as code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Sequence

from zeroplay_jax.tools.base import Invocation, Tool, ToolResult, string_parameter

Number = int | float

_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_FUNCTIONS: dict[str, Callable[..., Number]] = {
    'abs': abs,
    'ceil': math.ceil,
    'exp': math.exp,
    'floor': math.floor,
    'log': math.log,
    'max': max,
    'min': min,
    'round': round,
    'sqrt': math.sqrt,
}
_CONSTANTS = {'pi': math.pi, 'e': math.e}
_MAX_CHARACTERS = 200
# Bounds the work of one operation: 9**9**9 would otherwise run for hours.
_MAX_BITS = 4096


class ArithmeticSyntaxError(ValueError):
    """The expression is not arithmetic that `evaluate` knows."""


def evaluate(expression: str) -> Number:
    """Value of an arithmetic expression: numbers, + - * / // % **, brackets, and a few functions.

    Raises:
      ArithmeticSyntaxError: not such an expression, or one whose numbers grow too large.
      ArithmeticError, ValueError: no value is defined, such as a division by zero.
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ArithmeticSyntaxError(f'longer than {_MAX_CHARACTERS} characters')
    readable = expression.replace('×', '*').replace('÷', '/').replace('^', '**')
    try:
        tree = ast.parse(readable.strip(), mode='eval')
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # ValueError: characters that no source code can hold, such as half of a surrogate pair.
        raise ArithmeticSyntaxError('not an arithmetic expression') from None
    return _value(tree.body)


def _value(node: ast.expr) -> Number:
    # bool is a subclass of int, but True is no number.
    if isinstance(node, ast.Constant) and not isinstance(node.value, bool):
        if isinstance(node.value, int | float):
            return _bounded(node.value)
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left = _value(node.left)
        right = _value(node.right)
        if isinstance(node.op, ast.Pow):
            _check_power(left, right)
        return _bounded(_BINARY[type(node.op)](left, right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        function = _FUNCTIONS.get(node.func.id)
        if function is not None:
            arguments = [_value(argument) for argument in node.args]
            return _bounded(function(*arguments))
    raise ArithmeticSyntaxError('not an arithmetic expression')


def _check_power(base: Number, exponent: Number) -> None:
    # Only integers grow without bound; floats overflow with an error of their own.
    if not isinstance(base, int) or not isinstance(exponent, int):
        return
    if base.bit_length() * abs(exponent) > _MAX_BITS:
        raise ArithmeticSyntaxError('the numbers grow too large')


def _bounded(value: Number) -> Number:
    if isinstance(value, complex):
        raise ArithmeticSyntaxError('no real result')
    if isinstance(value, int):
        if value.bit_length() > _MAX_BITS:
            raise ArithmeticSyntaxError('the numbers grow too large')
        return value
    if not math.isfinite(value):
        raise OverflowError('no finite value')
    return value


def as_text(value: Number) -> str:
    """A number as people write it: whole numbers without a fraction, others with 12 digits."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value) if isinstance(value, int) else f'{value:.12g}'


class CalculatorTool(Tool):
    """Arithmetic expressions."""

    name = 'calculator'
    description = 'the value of an arithmetic expression'
    purpose = 'To calculate'
    argument_hint = 'an expression such as (1998 - 1934) / 4'
    parameters = string_parameter('expression', argument_hint)
    errors = {'undefined': 'The expression has no value.'}

    def run(self, calls: Sequence[Invocation]) -> list[ToolResult]:
        return [self._result(call.arguments['expression']) for call in calls]

    def _result(self, expression: str) -> ToolResult:
        try:
            return ToolResult(text=as_text(evaluate(expression)))
        except ArithmeticSyntaxError as error:
            return ToolResult(
                text=self.error_text('invalid_arguments', str(error)), error='invalid_arguments'
            )
        except (ArithmeticError, ValueError, TypeError):
            return ToolResult(error='undefined')
