"""Formats one rollout as a few lines for the terminal; its texts cannot control the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.cells import set_cell_size
from rich.console import Console
from rich.text import Text

from zeroplay_jax.evaluation.render import one_line
from zeroplay_jax.selfplay.records import step_name
from zeroplay_jax.selfplay.schedule import Step
from zeroplay_jax.types import Row, ToolCall

COLUMNS = 80
_LABEL_COLUMNS = 10
# Largest number of lines of one labelled text (`_labelled`); the rest is cut.
_MAX_LINES = 3
# Largest number of calls that are shown; a policy may make dozens.
_MAX_CALLS = 5
# `Text.wrap` asks for one, and takes nothing from it.
_CONSOLE = Console()


def wrapped(text: str, columns: int, max_lines: int = 0) -> list[str]:
    """Returns the lines of a text, of at most `columns` columns, broken at blanks where there are any.

    Args:
      max_lines: further text is left out, and the last line ends with '…'; 0: no limit.
    """
    words = Text(' '.join(text.split()))
    lines = [line.plain.strip() for line in words.wrap(_CONSOLE, columns) if line.plain]
    if max_lines and len(lines) > max_lines:
        lines = lines[:max_lines]
        lines[-1] = set_cell_size(lines[-1], columns - 1).rstrip() + '…'
    return lines


def evaluation_text(step: Step, metrics: Mapping[str, float]) -> str:
    """Returns one line with an evaluation's exact match, also by hops where there are several, and rubric score."""
    line = f'{step_name(step)}: exact match {metrics["em/mean"]:.3f}'
    by_hops = []
    for name, share in sorted(metrics.items()):
        if name.startswith('em/hop'):
            by_hops.append(f'{name.removeprefix("em/hop")}: {share:.3f}')
    if len(by_hops) > 1:
        line += f' (by hops {", ".join(by_hops)})'
    if 'rubrics/mean' in metrics:
        line += f', rubrics {metrics["rubrics/mean"]:.3f}'
    return line


def rollout_text(step: Step, row: Row) -> str:
    """Returns the text of one rollout of a step: question, calls, answer and reward, in 80 columns."""
    question = row.info.question
    lines = [f'── {step_name(step)}, a rollout of role {row.role} '.ljust(COLUMNS, '─')]
    # A proposal's question is its result, so it follows the searches.
    is_proposal = row.info.is_proposal
    question_lines: list[str] = []
    if question is not None:
        question_lines = _labelled('task' if question.is_open_task else 'question', question.text)
    if not is_proposal:
        lines += question_lines
    calls = row.trajectory.calls
    for call in calls[:_MAX_CALLS]:
        lines += _call_lines(call)
    if len(calls) > _MAX_CALLS:
        lines += _labelled('', f'… and {len(calls) - _MAX_CALLS} further calls')
    accepted = ' | '.join(question.answers) if question is not None else ''
    if is_proposal:
        lines += question_lines
        lines += _labelled('answer', accepted)
    else:
        expected = f'   (expected: {accepted})' if accepted else ''
        lines += _labelled('answer', (row.info.answer or 'none') + expected)
    reason = row.drop or row.info.rejected
    lines += _labelled('reward', f'{row.reward:.2f}' + (f'   ({reason})' if reason else ''))
    return '\n'.join(lines)


def _call_lines(call: ToolCall) -> list[str]:
    """Returns the lines of a call: its queries or arguments, then its error, its passages' titles, or its text."""
    titles = []
    for passages in call.documents:
        for passage in passages:
            titles.append(str(passage.get('title') or passage.get('id', '')))
    # Titles are shown and not texts, because passages would fill the screen.
    result = call.error or '; '.join(titles) or call.text
    asked = ' | '.join(call.queries) or ' '.join(map(str, (call.arguments or {}).values()))
    return _labelled(call.tool or 'call', f'{asked} → {result}')


def _labelled(label: str, text: str) -> list[str]:
    """Returns the lines of a text behind a label; further lines are indented."""
    lines = wrapped(one_line(text), COLUMNS - _LABEL_COLUMNS, _MAX_LINES) or ['–']
    # The name of a tool comes from the policy as well.
    first_label = set_cell_size(one_line(label), _LABEL_COLUMNS - 1) + ' '
    labels = [first_label] + [' ' * _LABEL_COLUMNS] * (len(lines) - 1)
    return list(map(str.__add__, labels, lines))
