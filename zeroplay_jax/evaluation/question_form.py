"""The form of question that the built-in policies for texts read; imports nothing heavy."""

from __future__ import annotations

import dataclasses
import pathlib

from zeroplay_jax.mini.cloze import BLANK
from zeroplay_jax.policy.adapter_config import base_folder
from zeroplay_jax.settings.paths import ENGLISH_CHECKPOINT


@dataclasses.dataclass(frozen=True)
class QuestionForm:
    """The only form of question that a small policy was trained on.

    Attributes:
      mark: a text that every such question contains.
      hint: a sentence about the form, with an example.
    """

    mark: str
    hint: str

    def fits(self, question: str) -> bool:
        """Returns whether a question has the form."""
        return self.mark in question


_CLOZE = QuestionForm(
    BLANK,
    f'this policy fills in a blank: ask with a sentence of the texts, word for word, and {BLANK} in place of the words '
    f'that you look for, such as "The village was founded by monks in {BLANK}."; it reads no other questions',
)


def question_form(folder: pathlib.Path) -> QuestionForm | None:
    """Returns the form of question that the policy in a checkpoint folder reads; None: any.

    The tokenizer decides, because policies that were trained from the English checkpoint keep it. That of an adapter is
    in the folder of its base.

    Raises:
      UserError: the base of an adapter is not there.
    """
    tokenizer = (base_folder(folder) / 'tokenizer.json').read_bytes()
    if tokenizer == (ENGLISH_CHECKPOINT / 'tokenizer.json').read_bytes():
        return _CLOZE
    return None
