"""The files beside exported weights: what they say, and that other programs then stop where a turn ends."""

import json

import pytest

from zeroplay_jax.configs import common
from zeroplay_jax.policy import adapters, hf
from zeroplay_jax.rollout import prompts
from zeroplay_jax.rollout.tokens import open_codec
from zeroplay_jax.run.policies import describe, model_card, write_adapter
from zeroplay_jax.selfplay.context import Role
from zeroplay_jax.selfplay.library import SearchableCorpus
from zeroplay_jax.selfplay.recipe import RoleSpec
from zeroplay_jax.selfplay.role_environment import role_environment
from zeroplay_jax.settings.kinds import BUILT_IN_CHECKPOINT
from zeroplay_jax.settings.schema import LINEARS
from zeroplay_jax.tools.registry import build_tools

BASE = BUILT_IN_CHECKPOINT
QUESTION = 'What is the teacher of the founder of Mimi?'


def solver(config, codec):
    tools = build_tools(config, SearchableCorpus(None, 3, 200))
    specification = RoleSpec('solver', 'solver')
    environment, limit = role_environment(config, specification, codec, tools)
    return Role('solver', 'solver', 'solver', environment, prompt_tokens=limit)


@pytest.fixture(scope='module')
def export(tmp_path_factory):
    """The miniature's export: its folder, the role that it plays, and the templates of its prompts."""
    folder = tmp_path_factory.mktemp('export') / 'solver'
    model = hf.read_config(BASE)
    config = common.get_config()
    templates = prompts.select('mini')
    role = solver(config, open_codec(BASE))
    texts = describe(config, BASE, [role], 'solver', templates)['solver']['whole']
    hf.save(folder, model, hf.load(BASE, model), like=BASE, texts=texts)
    return folder, role, templates


def test_generate_stops_behind_the_call_and_writes_no_result_of_its_own(export):
    torch = pytest.importorskip('torch', reason='PyTorch is not installed')
    import transformers

    folder, role, templates = export
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    text = templates['solver'].user.replace('{question}', QUESTION)
    ids = tokenizer.apply_chat_template(
        [{'role': 'user', 'content': text}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors='pt',
    )
    options = dict(max_new_tokens=96, do_sample=False)

    def written(**more):
        out = model.generate(**ids, **options, **more)
        return tokenizer.decode(out[0, ids['input_ids'].shape[1] :])

    assert written().endswith('</search>') and '<information>' not in written()
    stops = dict(stop_strings=list(role.env.stops), tokenizer=tokenizer)
    assert written(**stops) == written()
    # The files of the checkpoint itself do not stop there.
    model.generation_config.eos_token_id = list(role.env.codec.eos_ids)
    assert '<information>' in written()
    del torch


def test_this_package_reads_the_end_tokens_that_a_turn_had_before(export):
    folder, role, _ = export
    fields = json.loads((folder / 'generation_config.json').read_text())
    assert open_codec(folder).eos_ids == open_codec(BASE).eos_ids
    assert set(fields['eos_token_id']) > set(open_codec(BASE).eos_ids)
    # Exported again from an export, the file is the same.
    config = common.get_config()
    roles, templates = [solver(config, open_codec(folder))], prompts.select('mini')
    again = describe(config, folder, roles, 'solver', templates)['solver']['whole']
    assert json.loads(again['generation_config.json']) == fields


def test_the_card_names_base_recipe_roles_prompt_and_stop_strings(export):
    folder, _, _ = export
    header, text = (folder / 'README.md').read_text().split('---\n')[1:]
    for part in ('base_model: "zeroplay_jax/mini/base"', 'library_name: transformers'):
        assert part in header
    parts = ('`drzero`, seed 0', 'solver', '`search_r1`', 'Question: {question}')
    for part in (*parts, '["</search>", "</answer>"]', 'between `<answer>` and `</answer>`'):
        assert part in text
    assert str(folder.parent) not in text


def test_the_code_on_the_card_of_an_adapter_generates_a_turn(export, tmp_path, capsys, monkeypatch):
    pytest.importorskip('peft')
    _, role, templates = export
    config = common.get_config()
    config.policy.adapters.rank = 2
    text = model_card(config, BASE, [role], templates, 'solver', is_adapter=True)
    assert 'library_name: peft' in text and 'LoRA of rank 2, alpha 32, on q, k' in text
    model = hf.read_config(BASE)
    # A fresh adapter is the base.
    adapter = adapters.init(hf.load(BASE, model), LINEARS, 2, 0, 'solver')
    write_adapter(config, BASE, model, adapter, tmp_path / 'solver', {'README.md': text})
    monkeypatch.chdir(tmp_path / 'solver')
    code = text.split('```python\n')[1].split('```')[0].replace('BASE', repr(str(BASE)))
    prompt = templates['solver'].user.replace('{question}', QUESTION)
    exec(code.replace('PROMPT', repr(prompt)), {})
    turn = capsys.readouterr().out.strip()
    assert turn.endswith('</search>') and '<information>' not in turn
