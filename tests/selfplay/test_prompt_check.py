"""Prompts of the real inputs are measured before a run: most too long refuses it, some warn, few are fine."""

import dataclasses
import pathlib

import pytest
import scripted
from refused_calls import check_table

import zeroplay_jax as zp
from zeroplay_jax.configs import drzero
from zeroplay_jax.configuration.fields import frozen
from zeroplay_jax.rollout import prompts
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.selfplay import prompt_check
from zeroplay_jax.selfplay.context import Role, RolloutContext
from zeroplay_jax.selfplay.library import Document, SearchableCorpus
from zeroplay_jax.selfplay.recipe import recipe_class
from zeroplay_jax.selfplay.role_environment import role_environment
from zeroplay_jax.settings.kinds import BUILT_IN_CHECKPOINT
from zeroplay_jax.tools.registry import build_tools
from zeroplay_jax.types import Question, UserError

SHORT = Document('Gumu', 'Gumu lies in Lomi.')

# Real English, of which the built-in tokenizer spells out every word.
LONG = Document('Photosynthesis', 'Chlorophyll absorbs electromagnetic radiation. ' * 5)


def measure(system, documents=(), questions=(), worlds=None, **changes):
    """Warnings, or the refusal."""
    config = zp.config(system, 'mini')
    for name, value in changes.items():
        config.update_from_flattened_dict({name.replace('__', '.'): value})
    return check_prompts(config, documents, list(map(Question, questions)), worlds)


def test_which_prompts_are_refused_warned_about_and_fine():
    names = dict(
        globals(),
        given=lambda text: scripted.Material([Question(text, ('it',))], [text]),
        LONG_TEXT='Which phenomenon did the investigators hypothesise? ' * 6,
        SHORT_CONTEXT=dict(sampler__context=100, micro__tokens=100),
    )
    check_table(pathlib.Path(__file__).parent / 'prompt_check.txt', names)


def documents(long_share, count=40):
    long_count = round(long_share * count)
    return [
        dataclasses.replace(LONG if number < long_count else SHORT, id=str(number))
        for number in range(count)
    ]


def check_prompts(config, documents=(), questions=(), worlds=None):
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
    recipe = recipe_type(config, scripted.library(tuple(documents), worlds))
    return prompt_check.check_prompts(frozen(config), recipe, context, questions)


def test_a_field_that_no_prompt_has_is_refused_before_weights_are_loaded(monkeypatch):
    async def episode(self, context, step, task):
        await context.ask('solver', task.identity, qestion='Where?')

    monkeypatch.setattr(recipe_class('drzero'), 'episode', episode)
    with pytest.raises(UserError, match='has the fields question, and the recipe gives qestion'):
        check_prompts(drzero.get_config('mini'), documents(0.0))
