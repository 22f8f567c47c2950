"""The calculator of the examples: arithmetic and nothing else, whatever a policy writes."""

import builtins
import os
import time

import pytest

from examples.calculator.tool import Calculator
from zeroplay_jax.tools.base import Invocation

VALUES = {
    '1 + 2 * 3': '7',
    ' (1998 - 1934) / 4 ': '16',
    '-3 + 0.1 + 0.2': '-2.7',
    '1 / 3': '0.333333333333',
    '-' * 199 + '1': '-1',
    '1e300 * 10': '1e+301',
}
NO_VALUES = (
    '', '1 / 0', '9 ** 9 ** 9', '+1', 'x', 'True', '"a" * 3', 'abs(1)', '1 if 1 else 2', '[1]', '1,2', '1; 2', '1 < 2',
    '(' * 199, '1' * 200 + '*' + '1' * 200, '9' * 201, '1\0', '\ud800', 'import os', '__import__("os").system("true")',
)  # fmt: skip


def calculate(expression):
    started = time.monotonic()
    (result,) = Calculator().run([Invocation({'expression': expression})])
    assert time.monotonic() - started < 1
    return result


def test_values():
    Calculator().check()
    assert {expression: calculate(expression).text for expression in VALUES} == VALUES


@pytest.mark.parametrize('expression', NO_VALUES)
def test_nothing_is_executed(monkeypatch, expression):
    def never(*_, **__):
        raise AssertionError('something was executed')

    for module, name in ((builtins, 'eval'), (builtins, 'exec'), (os, 'system')):
        monkeypatch.setattr(module, name, never)
    assert calculate(expression).error == 'no_value'
