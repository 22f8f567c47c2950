"""Tables of wrong calls in text files: a line with an expression, and below it the one line that refuses it.

With REWRITE_TABLES=1 in the environment, tests write their tables again.
"""

import os
import re

import pytest

from zeroplay_jax.types import UserError

PROMPT = '>>> '


def row(key, sent, *values):
    """A row of a table of inputs that others reported, for `python -m benchmarks.faults`."""
    return pytest.param(*values, id=sent.replace(' ', '-'), marks=pytest.mark.fault(key, sent))


def refused(call, *args, error=UserError):
    """The line that a call is refused with."""
    with pytest.raises(error) as caught:
        call(*args)
    text = str(caught.value)
    assert '\n' not in text, text
    return text


def check_table(path, names, folder, error=UserError):
    """Evaluates the calls of a table with these names; FOLDER in its lines stands for `folder`."""
    blocks = []
    for line in path.read_text(encoding='utf-8').splitlines():
        if line.startswith(PROMPT):
            text = refused(eval, line.removeprefix(PROMPT), dict(names), error=error)
            text = re.sub(r' at 0x\w+', '', text.replace(str(folder), 'FOLDER'))
            blocks.append(f'{line}\n{text}\n')
    written = '\n'.join(blocks)
    if os.environ.get('REWRITE_TABLES'):
        path.write_text(written, encoding='utf-8')
    assert written == path.read_text(encoding='utf-8')


def check_values(path, names):
    """Evaluates a file's lines `call == value`, where `#` begins a comment; the assertion lists all that are wrong."""
    wrong = []
    for line in path.read_text(encoding='utf-8').splitlines():
        if line and not line.startswith('#'):
            call, value = line.rsplit(' == ', 1)
            given = eval(call, dict(names))
            if given != eval(value, dict(names)):
                wrong.append(f'{line}, not {given!r}')
    assert not wrong, '\n'.join(wrong)
