"""A role that judges among those of SSP: its tasks, and what cannot judge. test_hosts.py plays it."""

from refused_calls import refused

from tests.turn_recipe import Recipe
from zeroplay_jax.configs import common, ssp
from zeroplay_jax.configuration.rules import check
from zeroplay_jax.selfplay.schedule import Phase


def test_a_judge_draws_no_tasks_unless_it_is_trained_alone():
    both, alone = (Phase('game', 1, trains=roles) for roles in (('solver', 'reader'), ('reader',)))
    assert Recipe.roles_with_tasks(both) == ['solver']
    assert Recipe.roles_with_tasks(alone) == ['reader']


def test_what_cannot_judge_is_refused(monkeypatch):
    config = ssp.get_config('mini')
    config.recipe = 'tests.turn_recipe'
    common.add_sections(config)
    config.ssp.checker = 'judge'
    config.reader.samples = 3
    assert 'judge.kind=rule: roles of tests.turn_recipe judge' in refused(check, config)
    config.judge.update(kind='policy', tokens=64)
    check(config)
    # The last has another prompt than its judgements.
    for roles in ({'judge.grades': 'reader'}, {'checker': 'solver'}, {'judge.grade': 'reader'}):
        monkeypatch.setattr(Recipe, 'judge_roles', roles)
        assert 'judge_roles has ' in refused(check, config)
