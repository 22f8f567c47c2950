"""The packaged policies read questions of one form, whichever folder has their tokenizer."""

import json

import pytest

from zeroplay_jax import session
from zeroplay_jax.mini.question_form import form_of, warning_of
from zeroplay_jax.policy.adapter_config import CONFIG_FILE, AdapterConfig
from zeroplay_jax.settings.kinds import (
    BUILT_IN_CHECKPOINT,
    ENGLISH_CHECKPOINT,
    OPEN_CHECKPOINT,
    PARTS_CHECKPOINT,
)
from zeroplay_jax.types import Question, UserError


def open_session(folder):
    """A session of a packaged policy, which refuses questions of another form before it asks."""
    opened = object.__new__(session.Session)
    opened._form, opened._question_count = form_of(folder), 0
    opened._checked = lambda text: text
    return opened


def test_a_question_without_a_blank_gets_the_form_that_works():
    asked = open_session(ENGLISH_CHECKPOINT)
    assert asked._form.pattern.search('The village was founded by monks in ____.')
    for question in ('Who founded the village?', 'Who?'):
        with pytest.raises(UserError, match='this policy fills in a blank: ask with a sentence'):
            asked.answer(question)


def test_a_warning_counts_the_questions_of_another_form():
    questions = [Question('It lies on the ____.'), Question('Who?')]
    warning = warning_of(questions, ENGLISH_CHECKPOINT)
    assert warning.startswith(
        "1 of 2 questions are of another form, such as 'Who?'; this policy fills in a blank"
    )
    assert not warning_of(questions[:1], ENGLISH_CHECKPOINT)


@pytest.mark.parametrize('folder', [BUILT_IN_CHECKPOINT, PARTS_CHECKPOINT, OPEN_CHECKPOINT])
def test_a_policy_of_miniature_worlds_says_what_it_reads(folder):
    asked = open_session(folder)
    for question in ('What is the job of the mayor of Fretes?', 'Describe the mayor of Fretes.'):
        assert asked._form.pattern.search(question)
    with pytest.raises(UserError, match='this policy reads only sentences of the miniature world'):
        asked.answer('Who was Ada Lovelace?')


@pytest.mark.parametrize('base', [ENGLISH_CHECKPOINT, BUILT_IN_CHECKPOINT])
def test_an_adapter_has_the_form_of_its_base(tmp_path, base):
    config = AdapterConfig(4, 4.0, ('q',), base)
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config.fields()))
    assert form_of(tmp_path) is form_of(base)
