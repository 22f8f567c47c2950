"""SCOPE with a judge among its roles: it learns from its replies; killed, it ends with the same bits."""

import collections
import json

import killed_runs
import pytest
from run_files import check_same_run, lines

from zeroplay_jax.configs import common, scope
from zeroplay_jax.configuration.fields import frozen
from zeroplay_jax.configuration.rules import check
from zeroplay_jax.run import build, loop
from zeroplay_jax.selfplay import judge
from zeroplay_jax.selfplay.recipe import Recipe
from zeroplay_jax.selfplay.schedule import Phase
from zeroplay_jax.settings.kinds import ConfigError, refuse
from zeroplay_jax.types import UserError

RUBRICS = ['Names its country.', 'Names its leader.']


def make_config(folder):
    config = scope.get_config('mini')
    config.recipe = 'judge_recipe'
    common.add_sections(config)
    config.progress = False
    tasks = [{'task': f'Describe {name}.', 'rubrics': RUBRICS} for name in ('Lomi', 'Gumu')]
    path = folder / 'tasks.jsonl'
    path.write_text('\n'.join(map(json.dumps, tasks)))
    config.inputs.tasks = str(path)
    config.judge.update(kind='policy', max_failure_rate=1.0)
    config.world.update(train=(0, 1), evaluation=(0, 1))
    config.eval.update(questions=1, hops=(1,))
    config.sampler.slots, config.micro.rows = 16, 2
    for role in (config.solver, config.grader):
        role.update(steps=2, batch=2, samples=3, learning_rate=1e-3)
    # How many tasks a step has is the solver's.
    config.grader.batch = 64
    return config


@pytest.mark.long
def test_it_learns_and_a_killed_run_ends_with_the_same_bits(tmp_path, monkeypatch):
    # The checkpoint of the miniature writes no verdicts; its replies differ in length.
    monkeypatch.setattr(judge, 'grade', lambda text: len(text) % 2 == 0 if text else None)
    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    loop.run(make_config(tmp_path), whole)
    steps = [record for record in lines(whole) if record['phase'] == 'solver']
    assert len(steps) == 2 and all(step['grader/gradient_norm'] > 0 for step in steps)
    rows = [row for row in lines(whole, 'trajectories.jsonl') if row['role'] == 'grader']
    assert {row['reward'] for row in rows} == {0.0, 1.0}
    # Each judgement is a group; the evaluations have the judge of the start.
    assert {row['phase'] for row in rows} == {'solver'}
    assert len(rows) == 3 * len({row['group'] for row in rows})
    # Three answers to two tasks, and three replies about each answer and rubric.
    assert all(step['rollouts'] == 2 * 3 * (1 + 2 * 3) for step in steps)
    killed_runs.run_until(2, monkeypatch, make_config(tmp_path), killed)
    loop.run(make_config(tmp_path), killed)
    check_same_run(whole, killed)


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


def test_a_role_that_training_asks_for_no_judgement_is_refused():
    class Judged(Recipe):
        judge_roles = {'judge.answer': 'grader', 'judge.grade': 'grader'}

        @classmethod
        def roles(cls, config):
            return ()

    config = common.get_config('dspo')
    config.judge.kind, config.eval.metric = 'policy', 'judge'
    with pytest.raises(
        ConfigError,
        match="asks role grader for no judge.answer or judge.grade; .* add 'correct' to",
    ):
        refuse(config, Judged.check_judge_roles(frozen(config)))
    config.reward.answer = 'judge'
    refuse(config, Judged.check_judge_roles(frozen(config)))


def test_without_verdicts_the_policy_is_to_be_changed_not_repaired(tmp_path):
    policy = build._judge(make_config(tmp_path), None, {})
    policy._max_failure_rate = 0.5
    with pytest.raises(UserError, match=r'=0\.5; take a policy that writes verdicts, or raise'):
        policy.check_failure_rate(collections.Counter(asked=2, unread=2))
