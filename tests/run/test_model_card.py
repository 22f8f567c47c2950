"""The files beside exported weights: what they say, and that other programs then stop where a turn ends."""

import json

import pytest

from zeroplay_jax.configs import common
from zeroplay_jax.policy import adapters, hf
from zeroplay_jax.rollout import prompts
from zeroplay_jax.rollout.tokens import open_codec
from zeroplay_jax.run.policies import describe, write_adapter
from zeroplay_jax.selfplay.context import Role
from zeroplay_jax.selfplay.library import SearchableCorpus
from zeroplay_jax.selfplay.recipe import RoleSpec
from zeroplay_jax.selfplay.role_environment import role_environment
from zeroplay_jax.settings.kinds import BUILT_IN_CHECKPOINT
from zeroplay_jax.settings.schema import LINEARS
from zeroplay_jax.tools.registry import build_tools

BASE = BUILT_IN_CHECKPOINT
TEMPLATES = prompts.select('mini')


def exported(config, kind, folder, start=BASE):
    """A folder with the weights of `BASE`, or an adapter that changes nothing, as a run from `start` exports them."""
    tools = build_tools(config, SearchableCorpus(None, 3, 200))
    specification, codec = RoleSpec('solver', 'solver'), open_codec(start)
    environment, limit = role_environment(config, specification, codec, tools)
    role = Role('solver', 'solver', 'solver', environment, prompt_tokens=limit)
    texts = describe(config, start, [role], 'solver', TEMPLATES)['solver'][kind]
    model = hf.read_config(BASE)
    params = hf.load(BASE, model)
    if kind == 'whole':
        hf.save(folder, model, params, like=start, texts=texts)
    else:
        adapter = adapters.init(params, LINEARS, 2, 0, 'solver')
        write_adapter(config, start, model, adapter, folder, texts)
    return folder


@pytest.mark.parametrize('kind', ['whole', 'adapter'])
def test_the_code_on_the_card_generates_a_turn(kind, tmp_path, capsys, monkeypatch):
    pytest.importorskip('peft')
    config = common.get_config()
    config.policy.adapters.rank = 2
    folder = exported(config, kind, tmp_path / 'solver')
    text = (folder / 'README.md').read_text()
    for part in ('base_model: "zeroplay_jax/mini/base"', 'Question: {question}'):
        assert part in text
    code = text.split('```python\n')[1].split('```')[0].replace('BASE', repr(str(BASE)))
    if kind == 'whole':
        # The end tokens of the folder stop there as well.
        code = code.replace(', stop_strings=stops', '')
    question = 'What is the teacher of the founder of Mimi?'
    prompt = TEMPLATES['solver'].user.replace('{question}', question)
    monkeypatch.chdir(folder)
    exec(code.replace('PROMPT', repr(prompt)), {})
    turn = capsys.readouterr().out.strip()
    assert turn.endswith('</search>') and '<information>' not in turn


def test_this_package_reads_the_end_tokens_that_a_turn_had_before(tmp_path):
    config = common.get_config()
    folder = exported(config, 'whole', tmp_path / 'solver')
    name = 'generation_config.json'
    written = (folder / name).read_text()
    assert open_codec(folder).eos_ids == open_codec(BASE).eos_ids
    assert set(json.loads(written)['eos_token_id']) > set(open_codec(BASE).eos_ids)
    # Exported again from an export, the file is the same.
    assert (exported(config, 'whole', tmp_path / 'again', folder) / name).read_text() == written
