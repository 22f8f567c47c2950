"""A judge among the roles of SCOPE: its tasks, and what cannot judge. One that learns is played by test_hosts.py."""

import input_files
import judge_recipe
from refused_calls import refused

from zeroplay_jax.configs import common, scope
from zeroplay_jax.configuration.rules import check
from zeroplay_jax.selfplay.schedule import Phase


def test_a_judge_draws_no_tasks_unless_it_is_trained_alone():
    both, alone = (
        Phase('solver', 1, trains=roles) for roles in (('solver', 'grader'), ('grader',))
    )
    assert judge_recipe.Recipe.roles_with_tasks(both) == ['solver']
    assert judge_recipe.Recipe.roles_with_tasks(alone) == ['grader']


def test_what_cannot_judge_is_refused(tmp_path, monkeypatch):
    config = scope.get_config('mini')
    config.recipe = 'judge_recipe'
    common.add_sections(config)
    config.grader.samples = 3
    task = {'task': 'Describe Lomi.', 'rubrics': ['Names its country.']}
    config.inputs.tasks = input_files.write(tmp_path / 'tasks.jsonl', task)
    assert 'judge.kind=rule: roles of judge_recipe judge' in refused(check, config)
    config.judge.update(kind='policy', max_failure_rate=1.0)
    check(config)
    # The last has another prompt than its judgements.
    for roles in ({'judge.grades': 'grader'}, {'judge.grade': 'solver'}, {'checker': 'grader'}):
        monkeypatch.setattr(judge_recipe.Recipe, 'judge_roles', roles)
        line = refused(check, config)
        assert 'judge_roles has ' in line and '; give one of judge.answer, ' in line
