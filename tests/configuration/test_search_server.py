"""A search server alone is enough where no documents are read; elsewhere the line names the folder and its flag."""

import pytest
from config_checks import message

from zeroplay_jax.configs import drzero, dspo, scope
from zeroplay_jax.configuration import command_line, fields, rules
from zeroplay_jax.selfplay.library import NoDocuments
from zeroplay_jax.types import UserError


@pytest.fixture
def served(tmp_path):
    """Returns a config of a page with --index=http://…, as the README has it."""
    questions = tmp_path / 'questions.jsonl'
    questions.write_text('{"question": "Where?", "answer": "Lomi"}\n')

    def make(page, variant='mini'):
        config = page.get_config(variant)
        fields.fit_to_recipe(config)
        config.eval.file = str(questions)
        config.retrieval.path = 'indexes/nowhere'
        for flag in command_line.index_fields('http://127.0.0.1:8000'):
            name, _, value = flag.removeprefix('--config.').partition('=')
            config.update_from_flattened_dict({name: value})
        if config.judge.kind == 'rule':
            config.judge.update(kind='policy', tokens=16)
        return config, str(questions)

    return make


@pytest.mark.fault('F5', 'dspo with questions and --index=http://…')
def test_given_questions_need_no_folder(served):
    config, questions = served(dspo)
    config.inputs.questions = questions
    rules.check(config)


@pytest.mark.fault('F', 'evaluate --index=http://…')
@pytest.mark.parametrize('page', [drzero, scope])
def test_an_evaluation_needs_no_folder(served, page):
    config, _ = served(page)
    rules.check(config, is_training=False)


@pytest.mark.fault('F', 'drzero --index=http://… without a folder')
def test_a_recipe_that_reads_documents_names_folder_and_flag(served):
    config, _ = served(drzero)
    line = message(config)
    assert 'http://127.0.0.1:8000 answers searches' in line
    assert '--config.retrieval.path=FOLDER' in line and '--config.inputs.documents=FILE' in line


@pytest.mark.fault('kin-folder', 'retrieval.held_out over a server without a folder')
def test_held_out_passages_need_the_folder(served, tmp_path):
    config, questions = served(dspo)
    config.inputs.questions = questions
    (tmp_path / 'held_out.jsonl').write_text('{"document_id": "7", "title": "Lomi"}\n')
    config.retrieval.held_out = str(tmp_path / 'held_out.jsonl')
    line = message(config)
    assert 'retrieval.held_out is compared from a folder' in line


def test_a_recipe_that_reads_documents_undeclared_reads_the_same_advice():
    with pytest.raises(UserError, match=r'--config\.retrieval\.path=FOLDER'):
        NoDocuments()[0]
