"""Files of prompts: what is wrong in one is a line before anything is loaded; what is right stands where ours did."""

import hashlib
import pathlib

import pytest
from refused_calls import check_table

from zeroplay_jax.configs import drzero, scope, ssp
from zeroplay_jax.configuration import fields, places, rules
from zeroplay_jax.evaluation import answering
from zeroplay_jax.rollout import prompts
from zeroplay_jax.runtime import record
from zeroplay_jax.settings.kinds import PACKAGE, PROMPT_SETS, prompts_name, prompts_text
from zeroplay_jax.settings.schema import Config

EXAMPLE = pathlib.Path(__file__).parents[2] / 'configs' / 'drzero_prompts.toml'
SOLVER = '[solver]\nuser = "Please: {question}"\n'


def test_what_is_wrong_in_a_file_is_one_line(tmp_path):
    path = tmp_path / 'my.toml'

    def of(*lines, config=drzero, encoding='utf-8', **fields):
        path.write_bytes('\n'.join(lines).encode(encoding))
        config = config.get_config('mini')
        config.update_from_flattened_dict({'prompts': str(path), **fields})
        rules.check(config)
        ours, own = prompts.select('full'), prompts.select(config.prompts)
        return [name for name in own if own[name] != ours[name]]

    def named(value):
        config = drzero.get_config('mini')
        config.prompts = value
        rules.check(config)

    names = dict(of=of, named=named, SOLVER=SOLVER, ssp=ssp, scope=scope, folder=str(tmp_path))
    check_table(pathlib.Path(__file__).parent / 'prompt_files.txt', names, tmp_path)


def test_a_set_lies_over_another_and_a_recipe_has_texts_for_the_sets_that_it_names():
    assert {path.stem for path in (PACKAGE / 'prompts').iterdir()} == set(PROMPT_SETS)
    assert prompts.sets_under('numbered') == ('full', 'mini', 'numbered')
    declared = {'critic': {'mini': 'short', 'full': 'long'}, 'solver': {'numbered': 'first'}}
    numbered = prompts.select('numbered', declared)
    assert (numbered['critic'].user, numbered['solver'].user) == ('short', 'first')
    assert prompts.select('full', {'critic': declared['critic']})['critic'].user == 'long'
    with pytest.raises(KeyError):
        prompts.select('mini', declared)


def test_prompts_of_a_file_stand_where_ours_did_and_the_others_stay():
    ours, own = prompts.select('full'), prompts.select(str(EXAMPLE))
    assert list(own) == list(ours)
    changed = {name for name in ours if own[name] != ours[name]}
    assert changed == {'solver', 'solver.teacher', 'proposer', 'proposer.without_document'}
    # Recipes of other packages declare texts, of which a file may change some.
    declared = {
        'critic': 'Is it clear? {question}',
        'solver': {'mini': 'x', 'full': 'y {question}'},
    }
    text = '[critic]\nuser = "{question}?"\n'
    selected = prompts.select(text, declared)
    assert selected['critic'].user == '{question}?' and selected['solver'].user == 'y {question}'
    assert prompts.select('mini', declared)['solver'].user == 'x'


def test_messages_of_a_prompt():
    prompt = prompts.Prompt('{{x}} {question}', system='{tools} {question}')
    system, user = prompts.fill(prompt, ['<search>', ' x'], question='{tools}')
    assert system == {'role': 'system', 'content': ['', '<search>', ' x', ' ', '{tools}', '']}
    assert ''.join(user['content']) == '{x} {tools}' and user['role'] == 'user'
    untrusted = [part for part in user['content'] if isinstance(part, prompts.Untrusted)]
    assert untrusted == ['{tools}'] and prompt.inputs == ('question',)


def stored(workdir, text):
    config = drzero.get_config('mini')
    config.prompts = text
    workdir.mkdir(parents=True)
    run = record.Record(record.plain_config(fields.frozen(config).to_dict()))
    record.write(workdir, run)


@pytest.mark.parametrize('change', ['gone', 'changed', 'same'])
def test_a_resumed_run_keeps_its_prompts_and_says_so(tmp_path, capsys, change):
    path, workdir = tmp_path / 'my.toml', tmp_path / 'run'
    path.write_text(SOLVER)
    stored(workdir, SOLVER)
    config = drzero.get_config('mini')
    config.prompts = str(path)
    if change == 'gone':
        path.unlink()
    elif change == 'changed':
        path.write_text(SOLVER.replace('Please', 'Now'))
    places.keep_prompts(config, workdir)
    (note,) = capsys.readouterr().err.splitlines()
    assert config.prompts == SOLVER
    assert f'with which {workdir} began ({prompts_name(SOLVER)})' in note and str(path) in note
    rules.check(config)
    fields.check(workdir, config)
    # Another set is another run; a command that evaluates takes the prompts of the policy's run.
    config.prompts = 'mini'
    places.keep_prompts(config, workdir)
    assert config.prompts == 'mini'
    with pytest.raises(record.WorkdirError) as caught:
        fields.check(workdir, config)
    assert f'prompts (there {prompts_name(SOLVER)}, now mini)' in str(caught.value)
    places.keep_prompts(config, workdir, keeps_sets=False)
    assert config.prompts == SOLVER and fields.read_stored_config(workdir).prompts == SOLVER


def test_records_and_results_name_prompts_by_their_hash(tmp_path):
    path = tmp_path / 'my.toml'
    path.write_text(SOLVER)
    config = drzero.get_config('mini')
    config.prompts = str(path)
    rules.check(config)
    run: Config = fields.frozen(config)
    assert run.prompts == SOLVER == prompts_text(str(path))
    settings = answering.result_settings(run, 'p', 'r', {})
    assert settings['context'] == run.sampler.context
    assert settings['prompts'] == prompts_name(SOLVER)
    assert hashlib.sha256(path.read_bytes()).hexdigest()[:16] in settings['prompts']
