"""The parts of a demonstration, and the answers that a world gives."""

import re

from zeroplay_jax.types import ENV, POLICY


def said(demo):
    """The turns of the policy."""
    return [part.content for part in demo.parts if part.source == POLICY]


def shown(demo):
    """The documents that each search finds."""
    return [part.content for part in demo.parts if part.source == ENV]


def tag(text, name):
    """The content of the last tag of a name, or None."""
    before, _, after = text.rpartition(f'<{name}>')
    content, is_closed, _ = after.partition(f'</{name}>')
    return content.strip() if is_closed else None


def resolve(world, text):
    """(answer, hops) of a question in the world's form; None without a fact, (None, 0) for a text of another form."""
    match = re.fullmatch(r'What is ((?:the \w+ of )+)(\w+)\?', text.strip())
    if not match:
        return None, 0
    relations = re.findall(r'the (\w+) of', match[1])
    value = match[2]
    # The relation next to the entity is applied first.
    for relation in reversed(relations):
        value = value and world.value(value, relation)
    return value, len(relations)
