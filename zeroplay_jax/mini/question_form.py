"""The questions that the packaged policies read: small as they are, they read no others."""

from __future__ import annotations

import itertools
import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple

from zeroplay_jax.mini.facts import RELATIONS
from zeroplay_jax.policy.adapter_config import base_folder
from zeroplay_jax.runtime.record import portable
from zeroplay_jax.settings.kinds import (
    BUILT_IN_CHECKPOINT,
    ENGLISH_CHECKPOINT,
    OPEN_CHECKPOINT,
    PACKAGE,
    PARTS_CHECKPOINT,
)
from zeroplay_jax.types import Question

BLANK = '____'


class QuestionForm(NamedTuple):
    """The questions that a small policy reads.

    Attributes:
      pattern: what every such question contains.
      hint: what the policy says of itself.
    """

    pattern: re.Pattern[str]
    hint: str


_RELATIONS = '|'.join(itertools.chain(*RELATIONS.values()))
_BLANKS = QuestionForm(
    re.compile(BLANK),
    f'this policy fills in a blank: ask with a sentence of the texts, word for word, and {BLANK} in place of the words '
    f'that you look for, such as "The village was founded by monks in {BLANK}."; it reads no other questions',
)
_WORLDS = QuestionForm(
    re.compile(
        rf'^(What is (the ({_RELATIONS}) of )+\w+\??|Describe (the ({_RELATIONS}) of )*\w+\.?)$'
    ),
    'this policy reads only sentences of the miniature world, such as zeroplay sample writes, and '
    'questions such as "What is the job of the mayor of Fretes?"; for other English texts take --policy '
    'zeroplay_jax/mini/english/base, or a language model',
)
_FORMS = {
    ENGLISH_CHECKPOINT: _BLANKS,
    BUILT_IN_CHECKPOINT: _WORLDS,
    PARTS_CHECKPOINT: _WORLDS,
}


# Packaged start → what it was shown before training.
_SHOWN = {
    ENGLISH_CHECKPOINT: 'shown how to fill blanks and to search, on passages of English Wikipedia',
    BUILT_IN_CHECKPOINT: 'shown how to ask and answer in miniature worlds, up to two hops',
    PARTS_CHECKPOINT: 'shown the parts of asking and answering in miniature worlds, up to two hops',
    OPEN_CHECKPOINT: 'shown open tasks of miniature worlds, up to three steps',
}


def start_line(folder: pathlib.Path) -> str:
    """Returns which start is in a folder, and what it was shown if it is a packaged one, in a line."""
    for checkpoint, shown in _SHOWN.items():
        if folder.resolve() == checkpoint.resolve():
            return f'start: zeroplay_jax/{checkpoint.relative_to(PACKAGE)}, {shown}'
    # A name on the Hub or an address as it is; of a path, which is that of a machine, the last part.
    name = portable(str(folder))
    return f'start: {folder.name if pathlib.Path(name).is_absolute() else name}'


def form_of(folder: pathlib.Path) -> QuestionForm | None:
    """Returns the only questions that the policy in a checkpoint folder reads; None: any.

    The tokenizer decides, because policies keep that of the checkpoint from which they were trained. That of an adapter
    is in the folder of its base.

    Raises:
      UserError: the base of an adapter is not there.
    """
    tokenizer = (base_folder(folder) / 'tokenizer.json').read_bytes()
    for checkpoint, form in _FORMS.items():
        if tokenizer == (checkpoint / 'tokenizer.json').read_bytes():
            return form
    return None


def warning_of(questions: Sequence[Question], folder: pathlib.Path) -> str:
    """Returns a warning of questions that the policy in a checkpoint folder does not read; '' without any."""
    form = form_of(folder)
    unread = [each.text for each in questions if form and not form.pattern.search(each.text)]
    if form is None or not unread:
        return ''
    return f'{len(unread)} of {len(questions)} questions are of another form, such as {unread[0]!r}; {form.hint}'
