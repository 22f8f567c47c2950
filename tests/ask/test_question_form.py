"""A policy that reads questions of one form says so when it is asked another one."""

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

CLOZE = 'The village was founded by monks in ____.'


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

    def open_one(as_json=False, folder=ENGLISH_CHECKPOINT):
        one = object.__new__(session.Session)
        fields = dict(folder=folder, printer=Printer(False), as_json=as_json, _index=index)
        fields |= dict(_form=form_of(folder), _form_was_noted=False, _question_count=0)
        vars(one).update(fields)
        return one

    return open_one


def test_a_question_without_a_blank_gets_a_note_before_and_after(open_session, capsys):
    asked = open_session()
    asked.answer('Who founded the village?')
    before, after = capsys.readouterr().out.splitlines()
    assert 'this policy fills in a blank: ask with a sentence of the texts' in before
    assert '____' in before and 'such as "The village was founded' in before
    assert 'called a tool in its last turn' in after and 'the question has another form' in after
    # The whole note comes once.
    asked.answer('Who?')
    assert capsys.readouterr().out.count('\n') == 1
    asked.answer(CLOZE)
    (line,) = capsys.readouterr().out.splitlines()
    assert 'no answer: ' in line and 'this policy' not in line


def test_json_has_the_note_on_stderr(open_session, capsys):
    asked = open_session(as_json=True)
    asked.answer('Who?')
    asked.answer('Who?')
    out, err = capsys.readouterr()
    assert 'fills in a blank' not in out and err.count('fills in a blank') == 1


def test_the_greeting_says_which_questions_the_policy_reads(open_session, capsys):
    open_session().greet()
    assert 'asks      this policy fills in a blank' in capsys.readouterr().out


@pytest.mark.parametrize('folder', [BUILT_IN_CHECKPOINT, PARTS_CHECKPOINT, OPEN_CHECKPOINT])
def test_a_policy_of_miniature_worlds_says_what_it_reads(open_session, folder, capsys):
    asked = open_session(folder=folder)
    for question in ('What is the job of the mayor of Fretes?', 'Describe the mayor of Fretes.'):
        assert asked._form.pattern.search(question)
    asked.answer('Who was Ada Lovelace?')
    before, _ = capsys.readouterr().out.splitlines()
    assert 'this policy reads only sentences of the miniature world' in before


def test_policies_trained_from_a_checkpoint_keep_its_form():
    clean = form_of(ENGLISH_CHECKPOINT.parent / 'clean')
    assert clean is form_of(ENGLISH_CHECKPOINT) is not form_of(BUILT_IN_CHECKPOINT)


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
