"""Tables of calls in text files: a line with an expression, and below it what it gives or the one line that refuses it.

With REWRITE_TABLES=1 in the environment, tests write their tables again.
"""

import os
import re

import pytest

from zeroplay_jax.types import UserError

PROMPT = '>>> '


def refused(call, *args, error=UserError):
    """The line that a call is refused with."""
    with pytest.raises(error) as caught:
        call(*args)
    text = str(caught.value)
    assert '\n' not in text, text
    return text


def check_table(path, names, folder='FOLDER', error=UserError):
    """Evaluates the calls of a table with these names; FOLDER in its lines stands for `folder`, # begins a heading."""
    blocks = []
    for line in path.read_text(encoding='utf-8').splitlines():
        if line.startswith('# '):
            blocks.append(f'{line}\n')
        elif line.startswith(PROMPT):
            text = _outcome(line.removeprefix(PROMPT), names, error)
            text = re.sub(r' at 0x\w+', '', text.replace(str(folder), 'FOLDER'))
            blocks.append(f'{line}\n{text}\n')
    written = '\n'.join(blocks)
    if os.environ.get('REWRITE_TABLES'):
        path.write_text(written, encoding='utf-8')
    assert written == path.read_text(encoding='utf-8')


def _outcome(expression, names, error):
    """The value of an expression, or the line that refuses it."""
    try:
        value = eval(expression, dict(names))
    except error as refusal:
        value = str(refusal)
        assert '\n' not in value, value
    return value if isinstance(value, str) else repr(value)


def fault_rows(key, table):
    """Rows of {name: values} for `pytest.mark.parametrize`; each is a fault that was reported under this key."""
    rows = []
    for name, values in table.items():
        rows.append(pytest.param(*values, id=name, marks=pytest.mark.fault(key, name)))
    return rows
