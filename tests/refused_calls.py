"""Tables of calls in text files: a line with an expression, and below it what it gives or the one line that refuses it.

With REWRITE_TABLES=1 in the environment, tests write their tables again.
"""

import difflib
import os
import re

import numpy as np
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


def answer(call, names, error):
    """What a call returns, as a text, or the one line that it is refused with."""
    try:
        return str(eval(call, dict(names)))
    except error as refusal:
        text = str(refusal)
        assert '\n' not in text, text
        return text


def check_table(path, names, folder='FOLDER', error=UserError):
    """Evaluates the calls of a table with these names; FOLDER in its lines stands for `folder`, # begins a comment."""
    names = {'rounded': rounded, **names}
    check_answers(path, lambda call: answer(call, names, error), folder)


def check_answers(path, answer_of, folder, prompt=PROMPT):
    """Compares a table with what a function answers to its calls."""
    blocks, comment = [], ''
    for line in path.read_text(encoding='utf-8').splitlines():
        if line.startswith('# '):
            comment += f'{line}\n'
        elif line.startswith(prompt):
            text = answer_of(line.removeprefix(prompt))
            text = re.sub(r' at 0x\w+', '', text.replace(str(folder), 'FOLDER'))
            blocks.append(f'{comment}{line}\n{text}\n')
            comment = ''
    written = '\n'.join(blocks)
    if os.environ.get('REWRITE_TABLES'):
        path.write_text(written, encoding='utf-8')
    expected = path.read_text(encoding='utf-8')
    changes = difflib.unified_diff(expected.splitlines(), written.splitlines(), lineterm='', n=2)
    remedy = f'REWRITE_TABLES=1 .venv/bin/python -m pytest -q on this test writes {path.name} again'
    assert written == expected, '\n'.join([remedy, *changes])


def rounded(values, digits=4):
    """Numbers as a table shows them."""
    return ' '.join(f'{float(value):.{digits}f}' for value in np.ravel(values))


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
