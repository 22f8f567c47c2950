"""`calculator`: evaluates arithmetic with a parser. Text of a policy is never executed as code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Sequence

from zeroplay_jax.tools.base import Invocation, Tool, ToolResult, string_parameter

Number = int | float
_MAX_DIGITS = 100

# The allowed operators; all other expressions that Python can parse are refused.
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


def _round(value: Number, digits: Number = 0) -> Number:
    # round(5, -N) computes 10**N, which blocks the whole process for a large N.
    if isinstance(digits, int) and abs(digits) > _MAX_DIGITS:
        raise UnsupportedExpression(f'round takes at most {_MAX_DIGITS} digits')
    return round(value) if digits == 0 else round(value, digits)  # type: ignore[arg-type]


_FUNCTIONS: dict[str, Callable[..., Number]] = {
    'abs': abs,
    'ceil': math.ceil,
    'exp': math.exp,
    'floor': math.floor,
    'log': math.log,
    'max': max,
    'min': min,
    'round': _round,
    'sqrt': math.sqrt,
}
_SYMBOLS = {'×': '*', '÷': '/', '^': '**'}
_CONSTANTS = {'pi': math.pi, 'e': math.e}
# Bounds the length of an expression and thereby the depth of the recursion over it.
_MAX_CHARACTERS = 200
# Bounds the work of one operation: 9**9**9 would otherwise run for hours.
_MAX_BITS = 4096


class UnsupportedExpression(ValueError):
    """The expression is not arithmetic that `evaluate` supports, or its numbers grow too large."""


def evaluate(expression: str) -> Number:
    """Returns the value of an arithmetic expression: numbers, + - * / // % **, brackets, and a few functions.

    Raises:
      UnsupportedExpression: the text is not such an expression, or its numbers grow too large.
      ArithmeticError, ValueError: the value is undefined, such as that of a division by zero.
      TypeError: a function got a wrong number of arguments.
    """
    if len(expression) > _MAX_CHARACTERS:
        raise UnsupportedExpression(f'longer than {_MAX_CHARACTERS} characters')
    # In mathematical notation ^ is a power; in Python it would be an exclusive or.
    for symbol, operator_text in _SYMBOLS.items():
        expression = expression.replace(symbol, operator_text)
    try:
        tree = ast.parse(expression.strip(), mode='eval')
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # ValueError: characters that no source code can hold, such as half of a surrogate pair.
        raise UnsupportedExpression('not an arithmetic expression') from None
    return _value(tree.body)


def _value(node: ast.expr) -> Number:
    """Returns the value of a node of Python's syntax tree; raises as `evaluate` does."""
    # bool is a subclass of int, but True is not a number here.
    if isinstance(node, ast.Constant) and not isinstance(node.value, bool):
        if isinstance(node.value, int | float):
            return _bounded(node.value)
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        apply_unary = _UNARY[type(node.op)]
        return apply_unary(_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        apply_binary = _BINARY[type(node.op)]
        first_operand = _value(node.left)
        second_operand = _value(node.right)
        # Checked before the operation, because computing a huge power would block the process.
        if isinstance(node.op, ast.Pow):
            _check_power(first_operand, second_operand)
        return _bounded(apply_binary(first_operand, second_operand))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        function = _FUNCTIONS.get(node.func.id)
        # Keywords such as max(…, key=…) are not arithmetic.
        if function is not None and not node.keywords:
            arguments = [_value(argument) for argument in node.args]
            return _bounded(function(*arguments))
    raise UnsupportedExpression('not an arithmetic expression')


def _check_power(base: Number, exponent: Number) -> None:
    """Raises UnsupportedExpression if base ** exponent has too many bits."""
    # Only integers grow without bound; floats overflow with an error of their own.
    if not isinstance(base, int) or not isinstance(exponent, int):
        return
    if base.bit_length() * abs(exponent) > _MAX_BITS:
        raise UnsupportedExpression('the numbers grow too large')


def _bounded(value: Number) -> Number:
    """Returns the value unchanged, if it is real, finite and not too large.

    Raises:
      UnsupportedExpression: it is complex, or an integer of more than `_MAX_BITS` bits.
      OverflowError: it is infinite or NaN; the tool reports it as 'undefined'.
    """
    # A negative number to a fractional power is complex in Python.
    if isinstance(value, complex):
        raise UnsupportedExpression('no real result')
    if isinstance(value, int):
        if value.bit_length() > _MAX_BITS:
            raise UnsupportedExpression('the numbers grow too large')
        return value
    if not math.isfinite(value):
        raise OverflowError('no finite value')
    return value


def as_text(value: Number) -> str:
    """Returns a number as text: whole numbers without a fraction, others with 12 digits."""
    # Larger floats keep their exponent, because the last digits of the integer would be rounding errors.
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    if isinstance(value, int):
        return str(value)
    # 12 of 16 digits hide the rounding of binary fractions: 0.1 + 0.2 reads as 0.3.
    return f'{value:.12g}'


class CalculatorTool(Tool):
    """Arithmetic expressions."""

    name = 'calculator'
    description = 'the value of an arithmetic expression'
    purpose = 'To calculate'
    argument_hint = 'an expression such as (1998 - 1934) / 4'
    parameters = string_parameter('expression', argument_hint)
    errors = {'undefined': 'The expression has no value.'}

    def run(self, calls: Sequence[Invocation]) -> list[ToolResult]:
        """Returns the values as text; a result with an error code for an expression without a value."""
        return [self._result(call.arguments['expression']) for call in calls]

    def _result(self, expression: str) -> ToolResult:
        """Returns the value as text; 'invalid_arguments' if it is no arithmetic, 'undefined' without a value."""
        try:
            return ToolResult(text=as_text(evaluate(expression)))
        except UnsupportedExpression as error:
            # The text names the fault in the expression, which the reason code does not.
            code = 'invalid_arguments'
            return ToolResult(text=self.error_text(code, str(error)), error=code)
        except (ArithmeticError, ValueError, TypeError):
            return ToolResult(error='undefined')
