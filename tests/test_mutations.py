"""The table of mutations (tests/mutate.py runs them), and the promises of docs/guarantees.md, each of which has one."""

import ast
import functools
import re

import mutate
import pytest
from removed_extras import has_left


@functools.cache
def names_of_tests(file):
    """The names of the test functions in a file."""
    nodes = ast.walk(ast.parse((mutate.ROOT / file).read_text(encoding='utf-8')))
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    return {name for name in names if name.startswith('test_')}


def is_a_test(written):
    file, _, name = written.partition('::')
    return has_left(file) or (mutate.ROOT / file).is_file() and name in names_of_tests(file)


@pytest.mark.parametrize('row', mutate.mutations(), ids=lambda row: row['promise'])
def test_a_mutation_changes_one_place_and_names_one_test(row):
    if has_left(row['file']):
        return
    # What cannot be read would be noticed by any test.
    original = ast.parse((mutate.ROOT / row['file']).read_text(encoding='utf-8'))
    assert ast.dump(ast.parse(mutate.mutated(row))) != ast.dump(original)
    assert is_a_test(row['test'])


def test_every_guarantee_names_tests_one_of_which_catches_a_mutation():
    lines = (mutate.ROOT / 'docs' / 'guarantees.md').read_text(encoding='utf-8').splitlines()
    rows = [line for line in lines if line.startswith('| ') and line != '| promise | test |']
    assert len(rows) > 30
    with_mutation = {row['test'] for row in mutate.mutations()}
    for row in rows:
        tests = [f'tests/{test}' for test in re.findall(r'`([^`]+\.py::[^`]+)`', row)]
        assert all(map(is_a_test, tests)), row
        assert with_mutation.intersection(tests), row
