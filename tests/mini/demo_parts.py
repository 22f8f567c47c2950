"""The parts of a demonstration."""

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
