"""A tool of one's own: arithmetic. The text of a policy is parsed and never executed."""

import ast
import operator

from zeroplay_jax.tools.base import Tool, ToolResult, string_parameter

OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
MAX_CHARACTERS = 200  # bounds the depth of an expression


class Calculator(Tool):
    """Values of expressions of numbers, + - * / and brackets."""

    name = 'calculator'
    description = 'the value of an arithmetic expression'
    parameters = string_parameter('expression', 'an expression such as (1998 - 1934) / 4')
    errors = {'no_value': 'The expression has no value. Write numbers, + - * / and brackets.'}

    def run(self, calls):
        """Returns a result for each call."""
        return [self._result(call.arguments['expression']) for call in calls]

    def _result(self, expression):
        if len(expression) > MAX_CHARACTERS:
            return ToolResult(error='no_value')
        try:
            tree = ast.parse(expression.strip(), mode='eval')
            return ToolResult(text=f'{self._value(tree.body):.12g}')
        except (ArithmeticError, KeyError, SyntaxError, ValueError):
            return ToolResult(error='no_value')

    def _value(self, node):
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            # Floats do not grow: no product takes long.
            return float(node.value)
        if isinstance(node, ast.UnaryOp):
            return OPERATIONS[type(node.op)](self._value(node.operand))
        if isinstance(node, ast.BinOp):
            return OPERATIONS[type(node.op)](self._value(node.left), self._value(node.right))
        raise ValueError('no arithmetic')
