"""A judge among the roles of SCOPE: its tasks, and what cannot judge. One that learns is played by test_hosts.py."""

import json

import pytest

from zeroplay_jax.configs import common, scope
from zeroplay_jax.configuration.rules import check
from zeroplay_jax.selfplay.schedule import Phase
from zeroplay_jax.settings.kinds import ConfigError


def make_config(folder):
    config = scope.get_config('mini')
    config.recipe = 'judge_recipe'
    common.add_sections(config)
    path = folder / 'tasks.jsonl'
    path.write_text(json.dumps({'task': 'Describe Lomi.', 'rubrics': ['Names its country.']}))
    config.inputs.tasks = str(path)
    config.judge.update(kind='policy', max_failure_rate=1.0)
    for role in (config.solver, config.grader):
        role.update(steps=2, batch=2, samples=3)
    return config


def test_a_judge_draws_no_tasks_unless_it_is_trained_alone():
    import judge_recipe

    both, alone = (
        Phase('solver', 1, trains=roles) for roles in (('solver', 'grader'), ('grader',))
    )
    assert judge_recipe.Recipe.roles_with_tasks(both) == ['solver']
    assert judge_recipe.Recipe.roles_with_tasks(alone) == ['grader']


def test_what_cannot_judge_is_refused(tmp_path, monkeypatch):
    config = make_config(tmp_path)
    config.judge.kind = 'rule'
    with pytest.raises(ConfigError, match='judge.kind=rule: roles of judge_recipe judge'):
        check(config)
    config.judge.kind = 'policy'
    check(config)
    import judge_recipe

    # The last has another prompt than its judgements.
    for roles in ({'judge.grades': 'grader'}, {'judge.grade': 'solver'}, {'checker': 'grader'}):
        monkeypatch.setattr(judge_recipe.Recipe, 'judge_roles', roles)
        with pytest.raises(ConfigError, match='judge_roles has .*; give one of judge.answer, '):
            check(config)
