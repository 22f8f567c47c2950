"""Single mutations of a Python source text, found by `ast` and made in the text, so that all else stays as it is."""

from __future__ import annotations

import ast
import copy
import random
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_FUNCTIONS = {'min': 'max', 'max': 'min', 'minimum': 'maximum', 'maximum': 'minimum'}
_FUNCTIONS |= {'any': 'all', 'all': 'any'}
# Error messages are texts, and annotations are not executed in most files.
_NOT_ENTERED = (ast.Raise, ast.JoinedStr)
_ANNOTATIONS = ('annotation', 'returns')


class Mutation(NamedTuple):
    """A mutated source text.

    Attributes:
      line, column: place of the mutated expression, from 1 and 0.
      text: what was changed.
      source: the whole text with the mutation.
    """

    line: int
    column: int
    text: str
    source: str


class Key(NamedTuple):
    """A mutation in the table of results."""

    file: str
    line: str
    column: str
    mutation: str


def chosen(sources: Mapping[str, str], count: int, seed: int) -> list[tuple[Key, str]]:
    """Returns (key, text of the mutated file) of `count` mutations, spread evenly over the files.

    Args:
      sources: file → its text.
      count: number of mutations of all files together; fewer if there are no more.
      seed: two runs with the same seed and sources choose the same.
    """
    queues = []
    for file, source in sources.items():
        texts = {}
        for mutation in mutations(source):
            key = Key(file, str(mutation.line), str(mutation.column), mutation.text)
            texts[key] = mutation.source
        queue = list(texts.items())
        random.Random(f'{seed} {file}').shuffle(queue)
        queues.append(queue)
    chosen_mutations = []
    # One of every file in turn, so that a campaign that is stopped is even as well.
    while len(chosen_mutations) < count and any(queues):
        for queue in queues:
            if queue:
                chosen_mutations.append(queue.pop())
    return chosen_mutations[:count]


def mutations(source: str) -> Iterator[Mutation]:
    """Yields all mutations of a source text, in the order of the syntax tree."""
    for node in _nodes(ast.parse(source)):
        for name, replaced, mutated in _mutated(node):
            original_text = ast.unparse(replaced)
            mutated_text = ast.unparse(mutated)
            if original_text == mutated_text:
                continue
            if isinstance(mutated, ast.expr):
                mutated_text = f'({mutated_text})'
            text = f'{name}: {textwrap.shorten(original_text, 90, placeholder="…")}'
            mutated_source = _spliced(source, replaced, mutated_text)
            yield Mutation(replaced.lineno, replaced.col_offset, text, mutated_source)


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes that are executed and are no parts of error messages."""
    yield node
    for field, value in ast.iter_fields(node):
        if field in _ANNOTATIONS:
            continue
        children = value if isinstance(value, list) else [value]
        for child in children:
            if isinstance(child, ast.AST) and not isinstance(child, _NOT_ENTERED):
                yield from _nodes(child)


def _mutated(node: Any) -> Iterator[tuple[str, Any, ast.AST]]:
    """Yields (name of the operator, node to replace, its replacement), for one node of the tree."""
    other: Any = copy.deepcopy(node)
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _ARITHMETIC:
        other.op = _ARITHMETIC[type(node.op)]()
        yield 'arithmetic', node, other
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        other.ops = [_COMPARISONS[type(node.ops[0])]()]
        yield 'comparison', node, other
    elif isinstance(node, ast.BoolOp):
        other.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield 'and/or', node, other
    elif isinstance(node, ast.UnaryOp):
        yield f'without {type(node.op).__name__}', node, node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield 'other constant', node, ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield 'constant + 1', node, ast.Constant(node.value + 1)
    elif isinstance(node, ast.Call):
        yield from _mutated_calls(node)
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        yield 'negated condition', node.test, ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield 'without the call', node, ast.Pass()
    elif isinstance(node, ast.Return) and isinstance(node.value, ast.Name | ast.Attribute):
        yield 'returns None', node, ast.Return()


def _mutated_calls(node: ast.Call) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """Yields the mutations of a call: another function, swapped arguments."""
    function = node.func
    field = 'attr' if isinstance(function, ast.Attribute) else 'id'
    name = getattr(function, field, '')
    if name in _FUNCTIONS:
        other = copy.deepcopy(node)
        setattr(other.func, field, _FUNCTIONS[name])
        yield 'function', node, other
    if len(node.args) > 1:
        other = copy.deepcopy(node)
        other.args[:2] = reversed(other.args[:2])
        yield 'swapped arguments', node, other


def _spliced(source: str, node: Any, text: str) -> str:
    """Returns the source with the text of a node replaced."""
    # Columns count bytes.
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    start = starts[node.lineno - 1] + node.col_offset
    end = starts[node.end_lineno - 1] + node.end_col_offset
    content = source.encode()
    return (content[:start] + text.encode() + content[end:]).decode()
