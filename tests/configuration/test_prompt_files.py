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
from zeroplay_jax.settings.kinds import prompts_name

EXAMPLE = pathlib.Path(__file__).parents[2] / 'configs' / 'drzero_prompts.toml'
SOLVER = '[solver]\nuser = "Please: {question}"\n'


def test_prompts_are_those_of_the_table_or_refused_in_one_line(tmp_path):
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

    names = vars(prompts) | dict(of=of, named=named, SOLVER=SOLVER, EXAMPLE=EXAMPLE)
    names |= dict(ssp=ssp, scope=scope, folder=str(tmp_path))
    check_table(pathlib.Path(__file__).parent / 'prompt_files.txt', names, tmp_path)


@pytest.mark.parametrize('text', [None, SOLVER, SOLVER.replace('Please', 'Now')])
def test_a_resumed_run_keeps_its_prompts_and_says_so(tmp_path, capsys, text):
    path, workdir = tmp_path / 'my.toml', tmp_path / 'run'
    workdir.mkdir()
    config = drzero.get_config('mini')
    config.prompts = SOLVER
    record.write(workdir, record.Record(record.plain_config(fields.frozen(config).to_dict())))
    # The file has gone, is the same, or has changed.
    if text:
        path.write_text(text)
    config.prompts = str(path)
    places.keep_prompts(config, workdir)
    (note,) = capsys.readouterr().err.splitlines()
    assert config.prompts == SOLVER
    assert f'with which {workdir} began ({prompts_name(SOLVER)})' in note and str(path) in note
    fields.check(workdir, config)
    # Another set is another run; a command that evaluates takes the prompts of the policy's run.
    config.prompts = 'mini'
    places.keep_prompts(config, workdir)
    with pytest.raises(record.WorkdirError) as caught:
        fields.check(workdir, config)
    assert f'prompts (there {prompts_name(SOLVER)}, now mini)' in str(caught.value)
    places.keep_prompts(config, workdir, keeps_sets=False)
    assert config.prompts == SOLVER


def test_records_and_results_name_prompts_by_their_hash(tmp_path):
    path = tmp_path / 'my.toml'
    path.write_text(SOLVER)
    config = drzero.get_config('mini')
    config.prompts = str(path)
    rules.check(config)
    settings = answering.result_settings(fields.frozen(config), 'p', 'r', {})
    assert hashlib.sha256(path.read_bytes()).hexdigest()[:16] in settings['prompts']
