"""What was chosen for the chat template of a checkpoint: said on stderr, and recorded with runs and evaluations."""

from __future__ import annotations

import sys

from zeroplay_jax.rollout.call_syntax import syntax_of
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.settings.schema import Config


def record(config: Config, codec: Codec) -> dict[str, str]:
    """Returns what was chosen for a chat template and changes prompts: 'date', 'role of results'; {} if nothing was."""
    choices = {}
    if codec.date:
        choices['date'] = codec.date
    role = codec.template.tool_role
    if syntax_of(config.tools.syntax).writes_messages and role not in ('', 'tool'):
        choices['role of results'] = role
    return choices


def notes(config: Config, codec: Codec) -> list[str]:
    """Returns what a user should know about tokenizer and chat template, a line each."""
    template = codec.template
    lines = [*codec.notes, *template.notes]
    if not syntax_of(config.tools.syntax).writes_messages:
        return lines
    role = record(config, codec).get('role of results')
    if role:
        lines.append(
            f"{codec.folder}: its chat template cannot write messages of role 'tool'; the results of calls are "
            f'messages of role {role!r}'
        )
    if not template.keeps_thoughts() and not config.rollout.drop_thinking:
        lines.append(
            f'{codec.folder}: its chat template drops the thoughts of turns before the result of a call, and here they '
            'are kept; set config.rollout.drop_thinking=True to drop them too'
        )
    return lines


def print_notes(config: Config, codec: Codec, prefix: str = '') -> None:
    """Prints `notes` on stderr."""
    for line in notes(config, codec):
        print(f'{prefix}note: {line}', file=sys.stderr)
