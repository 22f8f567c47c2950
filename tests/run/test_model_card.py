"""The files beside exported weights: what they say, and that other programs then stop where a turn ends."""

import json

import pytest
import run_library

from zeroplay_jax.rollout import prompts
from zeroplay_jax.rollout.tokens import open_codec
from zeroplay_jax.settings.kinds import BUILT_IN_CHECKPOINT

BASE = BUILT_IN_CHECKPOINT


@pytest.mark.parametrize('name', ['solver-merged', 'solver'])
def test_the_code_on_the_card_generates_a_turn(name, tmp_path_factory, capsys, monkeypatch):
    """Of whole weights, and of an adapter."""
    pytest.importorskip('peft')
    folder = run_library.whole('piplay', tmp_path_factory) / 'policy' / name
    text = (folder / 'README.md').read_text()
    for part in ('base_model: "zeroplay_jax/mini/base"', 'Question: {question}'):
        assert part in text
    code = text.split('```python\n')[1].split('```')[0].replace('BASE', repr(str(BASE)))
    if name == 'solver-merged':
        # The end tokens of the folder stop there as well.
        code = code.replace(', stop_strings=stops', '')
    question = 'What is the teacher of the founder of Mimi?'
    prompt = prompts.select('mini')['solver'].user.replace('{question}', question)
    monkeypatch.chdir(folder)
    exec(code.replace('PROMPT', repr(prompt)), {})
    turn = capsys.readouterr().out.strip()
    assert turn.endswith(('</search>', '</answer>')) and '<information>' not in turn


def test_this_package_reads_the_end_tokens_that_a_turn_had_before(tmp_path_factory):
    folder = run_library.whole('piplay', tmp_path_factory) / 'policy' / 'solver-merged'
    written = json.loads((folder / 'generation_config.json').read_text())
    ends = open_codec(folder).eos_ids
    assert ends == open_codec(BASE).eos_ids and {*written['eos_token_id']} > {*ends}
