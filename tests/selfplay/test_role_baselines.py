"""A recipe that is written from the pages alone: roles with baselines of their own against frozen opponents."""

import dataclasses

import input_files
import pytest
import rae_recipe
import scripted
from scripted import ScriptedContext, final

from zeroplay_jax.configs import drzero
from zeroplay_jax.configuration import fields, rules
from zeroplay_jax.recipes.datasets import SeedDocument
from zeroplay_jax.selfplay.recipe import state_of, with_state
from zeroplay_jax.selfplay.schedule import BatchCursor, QuestionPool, all_steps
from zeroplay_jax.settings.kinds import ConfigError
from zeroplay_jax.types import Task

DOCUMENTS = [SeedDocument(f'Town {number}', 'It lies in Tarva.', hops=1) for number in range(16)]
PROPOSAL = final(question='In which country is Town 1?', answer='Tarva')
RIGHT, WRONG = final(answer='Tarva'), final(answer='Lomi')


@pytest.fixture
def game(tmp_path):
    config = drzero.get_config('mini')
    config.recipe = 'rae_recipe'
    fields.fit_to_recipe(config)
    config.schedule.update(iterations=2, hop_ratio=(1,))
    config.inputs.documents = input_files.write(
        tmp_path / 'documents.jsonl', *(document.to_json() for document in DOCUMENTS)
    )
    for role in (config.proposer, config.solver):
        role.update(batch=2, samples=2, steps=2, baseline='none', scale='none')
    config.reward.solves = 2
    rules.check(config)
    return rae_recipe.Recipe(fields.frozen(config), scripted.library())


def play(game, step, **scripts):
    """(rewards of the rows, who was asked) of one task; moves the baseline."""
    context = ScriptedContext(**scripts)
    context.roles |= {name: scripted.ScriptedRole() for name in scripts}
    played = with_state(game, state_of(game))
    (outcome,) = scripted.run_episodes(
        played, context, step, [Task((step.number, 0), DOCUMENTS[1])]
    )
    game.after_step(step, [outcome])
    return [row.reward for row in outcome.rows], [role for role, *_ in context.asked], outcome


@pytest.mark.fault('nov29-D4', 'a recipe written from the pages: baselines per role, frozen rivals')
def test_each_role_plays_against_the_past_of_the_other(game):
    proposer, solver = all_steps(game.phases())[0], all_steps(game.phases())[2]
    asked = dict(proposer=[PROPOSAL, PROPOSAL], solver_before_0=[RIGHT, WRONG, RIGHT, RIGHT])
    rewards, who, _ = play(game, proposer, **asked)
    # One of two solves pays, both do not.
    assert rewards == [1.0, 0.0]
    assert who == ['proposer', 'solver_before_0', 'solver_before_0']
    assert game.baselines['proposer'] == pytest.approx(0.05 * 0.5)
    assert game.baselines['solver'] == 0.0

    asked = dict(proposer_before_0=[PROPOSAL], solver=[RIGHT, WRONG])
    rewards, who, _ = play(game, solver, **asked)
    assert rewards == [1.0, 0.0] and who == ['proposer_before_0', 'solver']
    later = dataclasses.replace(solver, number=9)
    rewards, _, _ = play(game, later, proposer_before_0=[PROPOSAL], solver=[RIGHT, RIGHT])
    assert rewards == [0.975, 0.975]
    assert game.baselines['solver'] == pytest.approx(0.95 * 0.025 + 0.05)


def test_opponents_are_snapshots_and_a_rejected_question_is_counted(game):
    roles = {role.name: role.weights_from for role in game.roles(game.config)}
    assert roles['solver_before_0'] == roles['proposer_before_0'] == 'initial'
    assert roles['solver_before_1'] == 'solver@1' and roles['proposer_before_1'] == 'proposer@1'
    step = all_steps(game.phases())[2]
    _, _, outcome = play(game, step, proposer_before_0=[final(answer='x')], solver=[])
    assert outcome.drop == 'no_question'


def test_documents_of_a_file_do_not_repeat_in_phases_of_ones_own(game):
    steps = all_steps(game.phases())
    drawn = [game.tasks(step, QuestionPool(), BatchCursor()) for step in steps]
    for trains in ('proposer', 'solver'):
        titles = []
        for step, tasks in zip(steps, drawn, strict=True):
            if step.phase.trains == (trains,):
                titles += [task.payload.title for task in tasks]
        assert len(titles) == 8 and len(set(titles)) == 8


def test_another_baseline_beside_it_is_refused(game):
    config = game.config.to_dict()
    config['solver']['baseline'] = 'mean'
    changed = fields.default_config('rae_recipe')
    changed.update(config)
    with pytest.raises(ConfigError, match='config.solver.baseline=mean: the game has its own'):
        rules.check(changed)
