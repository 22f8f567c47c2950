"""Prompts of the real inputs are measured before a run: most too long refuses it, some warn, few are fine."""

import dataclasses
import re

import pytest
import scripted

from zeroplay_jax.configs import drzero, dspo, ssp
from zeroplay_jax.configuration.fields import frozen
from zeroplay_jax.policy import hf
from zeroplay_jax.rollout import prompts
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.selfplay import library_builder, prompt_check
from zeroplay_jax.selfplay.context import Role, RolloutContext
from zeroplay_jax.selfplay.library import Document, SearchableCorpus
from zeroplay_jax.selfplay.recipe import recipe_class
from zeroplay_jax.selfplay.role_environment import role_environment
from zeroplay_jax.settings.kinds import BUILT_IN_CHECKPOINT, ConfigError
from zeroplay_jax.tools.registry import build_tools
from zeroplay_jax.training import build
from zeroplay_jax.types import Question

SHORT = Document('Gumu', 'Gumu lies in Lomi.')
# Real English, of which the built-in tokenizer spells out every word.
LONG = Document('Photosynthesis', 'Chlorophyll absorbs electromagnetic radiation. ' * 5)


def measure(config, documents=(), questions=(), worlds=None):
    """Checks the prompts of a recipe without loading any weights."""
    recipe_type = recipe_class(config.recipe)
    codec = Codec(BUILT_IN_CHECKPOINT)
    tools = build_tools(config, SearchableCorpus(None, 3, 200))
    roles = {}
    for specification in recipe_type.roles(config):
        env, prompt_tokens = role_environment(config, specification, codec, tools)
        name = specification.name
        roles[name] = Role(name, 'w', specification.prompt, env, prompt_tokens=prompt_tokens)
    templates = prompts.select(config.prompts, recipe_type.prompts)
    context = RolloutContext(None, roles, templates)
    library = scripted.library(tuple(documents), worlds)
    recipe = recipe_type(config, library)
    return prompt_check.check_prompts(frozen(config), recipe, context, questions)


def documents(long_share, count=40):
    long_count = round(long_share * count)
    return [
        dataclasses.replace(LONG if number < long_count else SHORT, id=str(number))
        for number in range(count)
    ]


def apply_flags(config, text):
    """Sets what a message asks for; returns the names."""
    words = text.replace(',', ' ').split()
    flags = [word.removeprefix('--config.') for word in words if word.startswith('--config.')]
    for flag in flags:
        name, value = flag.split('=')
        config.update_from_flattened_dict({name: int(value)})
    return {flag.partition('=')[0] for flag in flags}


def test_documents_that_are_too_long_are_refused_with_the_length_they_need():
    config = drzero.get_config('mini')
    with pytest.raises(ConfigError) as caught:
        measure(config, documents(1.0))
    message = str(caught.value)
    assert message.startswith('config.rollout.prompt_tokens=96: too short for 100 % of ')
    assert 'role proposer' in message and '\n' not in message and 'config.policy.path' in message
    # With what the line says the run can start.
    apply_flags(config, message)
    assert config.rollout.prompt_tokens > 96
    turns = config.rollout.max_turns * config.rollout.turn_tokens
    assert config.micro.tokens >= config.sampler.context >= config.rollout.prompt_tokens + turns
    assert measure(config, documents(1.0)) == []


def test_the_limit_of_one_role_is_the_field_that_a_refusal_names():
    config = drzero.get_config('mini')
    config.proposer.prompt_tokens = 32
    with pytest.raises(ConfigError) as caught:
        measure(config, documents(0.0))
    message = str(caught.value)
    assert message.startswith('config.proposer.prompt_tokens=32: too short for ')
    assert apply_flags(config, message) == {'proposer.prompt_tokens'}
    # The solver keeps the limit of all roles, as before.
    assert measure(config, documents(0.0), [Question('Who is it?')]) == []


def test_some_long_documents_are_warned_about_and_few_are_fine():
    config = drzero.get_config('mini')
    config.proposer.batch = 40
    (warning,) = measure(config, documents(0.3))
    assert re.search('too short for (2|3)[0-9] % of .*--config.rollout.prompt_tokens=', warning)
    assert measure(config, documents(0.05)) == []


def test_every_evaluation_question_has_to_fit():
    config = drzero.get_config('mini')
    questions = [Question('Who is it?'), Question('Who is it? ' * 60)]
    with pytest.raises(ConfigError, match='50 % of the evaluation questions'):
        measure(config, documents(0.0), questions)
    assert measure(config, documents(0.0), questions[:1]) == []


def test_given_questions_and_answers_are_measured():
    long = 'Which phenomenon did the investigators hypothesise? ' * 6
    config = dspo.get_config('mini')
    material = scripted.Material(questions=[Question(long, ('it',))])
    with pytest.raises(ConfigError, match='role solver'):
        measure(config, worlds=material)
    config = ssp.get_config('mini')
    with pytest.raises(ConfigError, match='role proposer'):
        measure(config, worlds=scripted.Material(answers=[long]))
    assert measure(config, worlds=scripted.Material(answers=['Lomi'])) == []


def test_the_instructions_of_a_role_without_inputs_have_to_fit_into_the_context():
    config = ssp.get_config('mini')
    config.prompts = 'paper'
    config.rollout.prompt_tokens = 4000
    # The checker has no tools: its prompt and one reply share the slot.
    config.sampler.context = config.micro.tokens = 100
    with pytest.raises(ConfigError, match='instructions of role checker') as caught:
        measure(config, worlds=scripted.Material(answers=['Lomi']))
    assert str(caught.value).startswith('config.sampler.context=100: ')


def test_all_fields_that_are_too_small_are_part_of_one_line():
    config = ssp.get_config('mini')
    config.prompts = 'paper'
    config.rollout.prompt_tokens = 10
    config.sampler.context = config.micro.tokens = 100
    material = scripted.Material(answers=['Lomi'])
    with pytest.raises(ConfigError) as caught:
        measure(config, worlds=material)
    message = str(caught.value)
    assert 'role proposer' in message and 'role checker' in message and '\n' not in message
    names = apply_flags(config, message)
    assert {'rollout.prompt_tokens', 'sampler.context', 'micro.tokens'} <= names
    assert measure(config, worlds=material) == []


def test_a_run_is_refused_before_its_weights_are_loaded(monkeypatch):
    config = drzero.get_config('mini')
    config.world.update(train=(0, 2), evaluation=(0, 1))
    world = library_builder.build_library(config)
    library = dataclasses.replace(world, documents=tuple(documents(1.0)))
    monkeypatch.setattr(build.library_builder, 'build_library', lambda *_: library)

    def load(*_args, **_options):
        raise AssertionError('the weights were loaded')

    monkeypatch.setattr(hf, 'load', load)
    with pytest.raises(ConfigError, match='config.rollout.prompt_tokens=96'):
        build.build(config, for_training=True)


@pytest.mark.fault('user-8', 'a tool of the user under the prompts of the miniature')
def test_a_tool_that_the_prompt_does_not_name_is_a_warning(monkeypatch, tmp_path, user_reads):
    (tmp_path / 'user8_tool.py').write_text(
        'from zeroplay_jax.tools.base import Tool, string_parameter\n'
        'class Clock(Tool):\n'
        '    name, description = "clock", "the time"\n'
        '    parameters = string_parameter("zone", "a zone")\n'
        '    def run(self, calls): return []\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = drzero.get_config('mini')
    assert not [line for line in measure(config, documents(0.0)) if 'names no tools' in line]
    config.tools.names = ('search', 'user8_tool:Clock')
    (warning,) = [line for line in measure(config, documents(0.0)) if 'role solver' in line]
    assert 'can call clock, but its prompt' in warning and 'config.prompts=paper' in warning
    user_reads(f'warning: {warning}')
