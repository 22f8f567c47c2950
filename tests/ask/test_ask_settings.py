"""How `zeroplay ask` asks a policy, and when it is called wrongly."""

import json
import pathlib
import shutil
import types

import pytest
import tiny
from ask_cases import BASE, NO_CORPUS, main, refused
from refused_calls import check_table
from run_records import change_record, stored_config

from zeroplay_jax import api, ask, session
from zeroplay_jax.configuration import fields, places, rules
from zeroplay_jax.evaluation.answering import check_prompt
from zeroplay_jax.policy.adapter_config import CONFIG_FILE, AdapterConfig
from zeroplay_jax.run import build, policy_settings
from zeroplay_jax.selfplay.answers import prompt_fields
from zeroplay_jax.selfplay.recipe import recipe_class
from zeroplay_jax.settings.kinds import ENGLISH_CHECKPOINT
from zeroplay_jax.types import Question


@pytest.fixture
def stored(exported):
    """The config of the policy's run; `save` writes it."""
    run = exported.parents[1]
    fields = stored_config(run)
    save = lambda: change_record(run, config=fields)
    return types.SimpleNamespace(path=run / 'run.json', fields=fields, save=save)


def prompt_of(config, folder, question):
    """The text of the prompt in which the policy in a folder is asked."""
    config = session._settings(config)
    config.policy.path = str(folder)
    context = session.open_roles(config, build.open_policy(config), NO_CORPUS)
    role = recipe_class(config.recipe).evaluated_role
    rubrics = ({'text': 'x'},) if recipe_class(config.recipe).has_open_tasks else ()
    asked = Question(question, rubrics=rubrics)
    check_prompt(context, role, asked)
    assert list(context.roles[role].env.tools) == ['search']
    ids = context.prompt_ids(role, **prompt_fields(context, role, asked))
    return context.roles[role].env.codec.decode(ids)


def test_a_policy_in_its_run_is_asked_as_it_was_trained(exported):
    config = policy_settings.settings(exported)
    assert (config.recipe, config.rollout.max_turns, config.world.train) == ('scope', 3, (1, 2))
    prompt = prompt_of(config, exported, 'Describe Lomi.')
    assert prompt.count('Task: Describe Lomi.') == 1


def test_the_settings_of_a_policy_are_those_of_whole_weights(exported, stored, tmp_path):
    adapters = {'rank': 8, 'alpha': 4.0, 'quantize': 'int8', 'merge': True}
    stored.fields['policy']['adapters'] = adapters
    stored.fields['solver']['adapter'] = '/some/adapter'
    stored.save()
    # A merged policy, an adapter of the run, and an adapter from elsewhere.
    folders = [exported, exported.parent / 'solver-adapter', tmp_path / 'elsewhere' / 'adapter']
    for folder in folders[1:]:
        folder.mkdir(parents=True)
        config = AdapterConfig(4, 2.0, ('k', 'q'), exported)
        (folder / CONFIG_FILE).write_text(json.dumps(config.fields()))
    for folder in folders:
        config = policy_settings.settings(folder)
        assert config.policy.adapters == fields.default_config().policy.adapters
        assert config.solver.adapter == ''
        # As load_policy gives it back, to train on.
        config.policy.path = str(folder)
        frozen, recipe = fields.frozen(config), recipe_class(config.recipe)
        assert not [*rules.adapters(frozen, recipe), *places.policy_folder(frozen, recipe)]


def test_prompts_flags_and_other_versions(exported, stored, index, tmp_path):
    stored.fields['retrieval'] |= {'kind': 'folder', 'path': str(index)}
    stored.save()

    def asked(recipe_name, own_prompts=()):
        """The end of the prompt in which a question is put to the role of a recipe with these prompts."""
        config = policy_settings.settings(exported)
        config.recipe = recipe_name
        fields.fit_to_recipe(config)
        recipe = recipe_class(recipe_name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recipe, 'prompts', {**recipe.prompts, **dict(own_prompts)})
            prompt = prompt_of(config, exported, 'Lomi?')
        (line,) = [line for line in prompt.splitlines() if 'Lomi?' in line]
        return line.partition('<|im_end|>')[0]

    def flags(*words):
        config = with_flags(exported, *words)
        tools, retrieval = config.tools, config.retrieval
        place = {'http': retrieval.url, 'folder': retrieval.path}[retrieval.kind]
        room = f'results {config.rollout.observation_tokens}, context {config.sampler.context}'
        return f'{tools.names} {tools.mcp_servers}; {place.replace(str(index), "INDEX")}; {room}'

    def settings_with(**changes):
        change_record(stored.path.parent, config=stored.fields | changes)
        return policy_settings.settings(exported).recipe

    names = dict(asked=asked, flags=flags, settings_with=settings_with)
    check_table(pathlib.Path(__file__).parent / 'ask_settings.txt', names, tmp_path)


def with_flags(policy, *flags):
    config = policy_settings.settings(policy)
    ask._apply_flags(config, policy, ask._arguments([*flags, 'q']))
    return config


def test_any_folder_of_a_family_is_asked(index, tmp_path, capsys):
    folder = tiny.make_folder(tmp_path / 'random', max_position_embeddings=1100)
    assert policy_settings.settings(folder).sampler.context == 1100
    flags = (
        f'--policy {folder} --index {index} --json --config.rollout.max_turns=1 --temperature=1 ab'
    )
    assert main(flags.split()) == 0
    record = json.loads(capsys.readouterr().out)
    prompt, policy = record['segments']
    assert (prompt['source'], policy['source']) == ('prompt', 'policy')
    assert '<tool_call>' in prompt['text'] and 'Question: ab' in prompt['text']
    assert 0 < len(policy['tokens']) <= 256
    assert policy['text'].startswith(record['turns'][0]['text'])


def test_what_cannot_be_used_is_said_before_the_weights_are_read(
    capsys, monkeypatch, tmp_path, index
):
    monkeypatch.setattr(session.hf, 'load', None)
    broken = shutil.copytree(BASE, tmp_path / 'broken')
    (broken / 'tokenizer.json').write_text('{')
    assert 'its tokenizer cannot be used' in refused(capsys, '--policy', broken, 'q')
    monkeypatch.setattr('sys.stdin.isatty', lambda: True, raising=False)
    assert '--json without a question' in refused(capsys, '--json')
    assert 'the question is too long' in refused(capsys, '--index', index, 'word ' * 100)
    monkeypatch.setattr(api, 'READY_SECONDS', 0.0)
    assert 'zeroplay serve' in refused(capsys, '--index', 'http://127.0.0.1:9', 'q')


def test_two_policies_share_the_index_of_the_run_and_a_lacking_one_is_named(
    tmp_path, monkeypatch, capsys
):
    runs = {'trained': '', 'start': ''}
    settings_of = policy_settings.settings

    def settings(folder):
        config = settings_of(ENGLISH_CHECKPOINT)
        config.retrieval.path = runs[folder.name]
        return config

    monkeypatch.setattr(policy_settings, 'settings', settings)
    monkeypatch.setattr(ask, '_policy_folder', pathlib.Path)
    monkeypatch.setattr(ask.places, 'index_folder', lambda *_: ())
    monkeypatch.setattr(ask.places, 'fetch', lambda *_, **__: None)
    asked = {}
    monkeypatch.setattr(ask, '_load', lambda _, configs: asked.update(configs) or [])
    words = ('--policy', 'start', '--policy', 'trained', 'A ____.')
    assert 'start: this policy searches no built-in corpus' in refused(capsys, *words)
    runs['trained'] = str(tmp_path)
    assert main(words) == 0
    assert [config.retrieval.path for config in asked.values()] == [str(tmp_path)] * 2
