"""A run with prompts of a user: its rollouts begin with them, and so does what goes on, asks and exports."""

import run_library
from run_files import lines

from zeroplay_jax.export import export
from zeroplay_jax.run import policy_settings
from zeroplay_jax.runtime import record
from zeroplay_jax.settings.kinds import prompts_name

TEXT = run_library.PROMPTS.read_text()


def test_rollouts_records_and_exports_have_them(tmp_path, tmp_path_factory):
    whole = run_library.whole('prompts', tmp_path_factory)
    run = record.read(whole)
    assert run.config['prompts'] == TEXT
    assert run.inputs['prompts'] == {prompts_name(TEXT): {}}
    opening = {}
    for line in lines(whole, 'trajectories.jsonl'):
        opening[line['role']] = line['segments'][0]['text']
    assert opening['proposer'].startswith('<|im_start|>system\nYou write quiz questions')
    assert 'Write {a question} between' in opening['proposer']
    assert 'You may search 1 times.' in opening['solver']
    assert policy_settings.settings(whole / 'policy' / 'solver').prompts == TEXT
    for folder in export(whole, tmp_path / 'out'):
        card = (folder / 'README.md').read_text()
        assert f'| prompts | {prompts_name(TEXT)} |' in card
        assert ('You may search 1 times.' in card) == (folder.name == 'solver')
