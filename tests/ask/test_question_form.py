"""The packaged policies read questions of one form, whichever folder has their tokenizer."""

import json
import types

import pytest

from zeroplay_jax import session
from zeroplay_jax.evaluation.render import Printer
from zeroplay_jax.mini.question_form import form_of
from zeroplay_jax.settings.kinds import (
    BUILT_IN_CHECKPOINT,
    ENGLISH_CHECKPOINT,
    OPEN_CHECKPOINT,
    PARTS_CHECKPOINT,
)
from zeroplay_jax.types import UserError

CLOZE = 'The village was founded by monks in ____.'
WORLD = 'What is the job of the mayor of Fretes?'


@pytest.fixture
def open_session(monkeypatch):
    """Returns a session of the policy that reads English, whose rollouts end without an answer: it calls a tool."""
    client = types.SimpleNamespace(
        check_failure_rate=lambda: None, metrics=lambda: {'search/answered': 0, 'search/empty': 0}
    )
    index = types.SimpleNamespace(
        corpus=types.SimpleNamespace(client=client), about='c', questions=()
    )
    trajectory = types.SimpleNamespace(finish='turns')
    methods = {'_checked': lambda self, text: text, '_ask': lambda self, *_: trajectory}
    methods['_record'] = lambda self, *_: {'answer': None}
    for name, method in methods.items():
        monkeypatch.setattr(session.Session, name, method)

    def open_one(folder=ENGLISH_CHECKPOINT):
        one = object.__new__(session.Session)
        fields = dict(folder=folder, printer=Printer(False), as_json=False, _index=index)
        fields |= dict(_form=form_of(folder), _question_count=0)
        vars(one).update(fields)
        return one

    return open_one


def test_a_question_without_a_blank_gets_the_form_that_works(open_session, capsys):
    asked = open_session()
    asked.answer(CLOZE)
    assert 'called a tool in its last turn' in capsys.readouterr().out
    asked.greet()
    for question in ('Who founded the village?', 'Who?'):
        with pytest.raises(UserError, match='this policy fills in a blank: ask with a sentence'):
            asked.answer(question)
    assert 'asks      this policy fills in a blank' in capsys.readouterr().out


@pytest.mark.parametrize('folder', [BUILT_IN_CHECKPOINT, PARTS_CHECKPOINT, OPEN_CHECKPOINT])
def test_a_policy_of_miniature_worlds_says_what_it_reads(open_session, folder):
    asked = open_session(folder=folder)
    for question in ('What is the job of the mayor of Fretes?', 'Describe the mayor of Fretes.'):
        assert asked._form.pattern.search(question)
    with pytest.raises(UserError, match='this policy reads only sentences of the miniature world'):
        asked.answer('Who was Ada Lovelace?')


@pytest.mark.parametrize('base', [ENGLISH_CHECKPOINT, BUILT_IN_CHECKPOINT])
def test_an_adapter_has_the_form_of_its_base(tmp_path, base):
    fields = {
        'peft_type': 'LORA',
        'r': 4,
        'lora_alpha': 4,
        'target_modules': ['q_proj'],
        'base_model_name_or_path': str(base),
    }
    (tmp_path / 'adapter_config.json').write_text(json.dumps(fields))
    assert form_of(tmp_path) is form_of(base)
