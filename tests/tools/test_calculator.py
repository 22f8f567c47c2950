"""The calculator: arithmetic and nothing else, whatever a policy writes."""

import builtins
import os
import pathlib
import time

import pytest
from refused_calls import check_table

from zeroplay_jax.tools.base import InvalidArguments, Invocation
from zeroplay_jax.tools.calculator import CalculatorTool, UnsupportedExpression, evaluate

TOOL = CalculatorTool()
ERRORS = {None: '', 'invalid_arguments': 'refused: ', 'undefined': 'has no value'}


def calculate(expression):
    started = time.monotonic()
    (result,) = TOOL.run([Invocation({'expression': expression})])
    assert time.monotonic() - started < 1
    return ERRORS[result.error] + (result.text or '').encode(errors='backslashreplace').decode()


def test_values_and_refusals():
    assert TOOL.validated({'expression': '1'}) == {'expression': '1'}
    assert TOOL.error_text('undefined') == 'The expression has no value.'
    names = {'calculate': calculate, 'TOOL': TOOL}
    table = pathlib.Path(__file__).parent / 'calculator.txt'
    check_table(table, names, error=InvalidArguments)


def test_nothing_is_executed(monkeypatch):
    def never(*_, **__):
        raise AssertionError('something was executed')

    for module, name in ((builtins, 'eval'), (builtins, 'exec'), (os, 'system')):
        monkeypatch.setattr(module, name, never)
    assert evaluate('1 + 1') == 2
    with pytest.raises(UnsupportedExpression):
        evaluate('__import__("os").system("true")')
