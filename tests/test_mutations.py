"""The table of mutations (tests/mutate.py runs them), and the promises of docs/guarantees.md, each of which has one."""

import ast
import functools
import re

import mutate
import pytest


@functools.cache
def text_of(file):
    return (mutate.ROOT / file).read_text(encoding='utf-8')


def is_a_test(written):
    file, _, name = written.partition('::')
    return f'\ndef {name}(' in text_of(file)


@pytest.mark.parametrize('row', mutate.mutations(), ids=lambda row: row['promise'])
def test_a_mutation_changes_one_place_and_names_one_test(row):
    # What cannot be read would be noticed by any test.
    original, mutated = map(ast.parse, (text_of(row['file']), mutate.mutated(row)))
    assert ast.dump(mutated) != ast.dump(original)
    assert is_a_test(row['test'])


def test_every_guarantee_names_tests_one_of_which_catches_a_mutation():
    rows = re.findall(r'^\| (?!promise).*', text_of('docs/guarantees.md'), re.M)
    assert len(rows) > 30
    with_mutation = {row['test'] for row in mutate.mutations()}
    for row in rows:
        tests = [f'tests/{test}' for test in re.findall(r'`([^`]+\.py::[^`]+)`', row)]
        assert all(map(is_a_test, tests)), row
        assert with_mutation.intersection(tests), row
