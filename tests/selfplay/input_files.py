"""Files of questions, answers and documents, and a library that nobody searches."""

import json

from zeroplay_jax.selfplay.library import Library


def library(documents=(), worlds=None):
    return Library(None, None, documents, (), worlds=worlds)


def write(path, *lines):
    """Writes records, or lines as they are; returns the name of the file."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text('\n'.join(texts))
    return str(path)
