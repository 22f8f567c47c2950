"""A recipe of another package: its own roles, prompts and settings, trained and evaluated like a built-in one."""

import dataclasses
import sys

import jax
import numpy as np
import pytest
import scripted
from scripted import ScriptedContext, final

from zeroplay_jax.configs import common, quickstart
from zeroplay_jax.configuration import rules
from zeroplay_jax.evaluation.answering import evaluate
from zeroplay_jax.recipes.datasets import SeedDocument
from zeroplay_jax.recipes.drzero import Recipe as DrZero
from zeroplay_jax.rollout.prompts import Prompt
from zeroplay_jax.run import build
from zeroplay_jax.selfplay.recipe import Recipe
from zeroplay_jax.selfplay.schedule import Step, all_steps
from zeroplay_jax.settings.kinds import ConfigError
from zeroplay_jax.types import Question, Task

RECIPE = '''
"""Three roles write about topics; later rollouts of a prompt earn more."""

from zeroplay_jax.selfplay.answers import group_of
from zeroplay_jax.selfplay.recipe import Recipe as RecipeBase
from zeroplay_jax.selfplay.recipe import RoleSpec
from zeroplay_jax.selfplay.schedule import Phase
from zeroplay_jax.settings.kinds import PositiveFloat, PositiveInt, Section
from zeroplay_jax.types import Outcome, Question, Row, RowInfo, Task, TaskDropped

ROLES = ('critic', 'solver', 'proposer')


class Settings(Section):
    """Settings of this game."""

    bonus: PositiveFloat = 0.25
    """Reward of the second rollout."""
    topics: PositiveInt = 2
    """Topics per step."""


class Recipe(RecipeBase):
    settings = {'debate': Settings}
    prompts = {
        'propose_topic': {'mini': 'Propose: {topic}', 'full': 'Please propose: {topic}'},
        'criticise': 'Criticise: {topic}',
        'solver': 'Own solver prompt: {topic}',
    }

    @classmethod
    def roles(cls, config):
        return (
            RoleSpec('proposer', 'propose_topic'),
            RoleSpec('solver', 'solver'),
            RoleSpec('critic', 'criticise', tools=()),
        )

    def phases(self):
        return [Phase('debate', 1, ROLES)]

    def tasks(self, step, pool, cursor):
        if cursor.round:
            return []
        # One more than the batch: the last one is dropped.
        count = self.config.debate.topics + 1
        topics = [Question(f'topic {number}') for number in range(count)]
        return [Task((step.number, number), topic) for number, topic in enumerate(topics)]

    async def episode(self, context, step, task):
        if task.identity[1] == self.config.debate.topics:
            raise TaskDropped('tired')
        rows = []
        for number, role in enumerate(ROLES):
            topic = task.payload.text
            identity = (*task.identity, number)
            trajectories = await context.ask(role, identity, self.config[role].samples, topic=topic)
            for sample, trajectory in enumerate(trajectories):
                reward = self.config.debate.bonus * sample
                info = RowInfo(question=task.payload)
                rows.append(Row(role, trajectory, reward, group_of(task.identity), info=info))
        return Outcome(rows)
'''

REWARDS = """
def steep(solved, n, target):
    return target * solved**2 / n


def first_letter(prediction, golds):
    return 0.5 * ((prediction or ' ')[0] == golds[0][0])
"""


@pytest.fixture(scope='module')
def packages(tmp_path_factory):
    """Puts a package with both modules on Python's path."""
    folder = tmp_path_factory.mktemp('packages')
    (folder / 'debate').mkdir()
    (folder / 'debate' / 'recipe.py').write_text(RECIPE)
    (folder / 'debate' / 'rewards.py').write_text(REWARDS)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


def make_config():
    config = common.get_config('debate.recipe')
    for role in ('proposer', 'solver', 'critic'):
        config[role].update(batch=2, samples=2, learning_rate=1e-3)
    config.debate.bonus = 1.0
    config.world.update(train=(0, 1), evaluation=(0, 1))
    config.eval.update(questions=2, hops=(1,))
    config.sampler.slots = 8
    config.micro.rows = 4
    return config


@pytest.fixture(scope='module')
def run(packages):
    config = make_config()
    rules.check(config)
    return config, build.build(config)


def test_settings_of_a_recipe_are_checked_like_any_other(packages):
    config = make_config()
    rules.check(config)
    config.debate.bonus = -1.0
    with pytest.raises(
        ConfigError, match='config.debate.bonus=-1.0: Input should be greater than 0'
    ):
        rules.check(config)
    config = make_config()
    config.critic.clip_low = 0.0
    with pytest.raises(ConfigError, match='config.critic.clip_low'):
        rules.check(config)
    with config.unlocked():
        config.debate.bonsu = 1.0
    with pytest.raises(ConfigError, match='did you mean debate.bonus'):
        rules.check(config)


def test_prompts_of_a_recipe_override_shared_ones(run):
    _, context = run
    rollouts = context.rollouts
    codec = rollouts.roles['critic'].env.codec

    def text(role):
        return codec.decode(rollouts.prompt_ids(role, topic='Lomi'))

    assert 'Propose: Lomi' in text('proposer') and 'Please' not in text('proposer')
    assert 'Own solver prompt: Lomi' in text('solver')
    assert 'Criticise: Lomi' in text('critic')


def test_every_declared_role_is_trained_under_its_name(run):
    config, context = run
    engine = build.build_engine(config, context)
    assert set(engine.learners) == {'proposer', 'solver', 'critic'}
    initial = {
        name: jax.tree.map(np.array, learner.params) for name, learner in engine.learners.items()
    }
    (step,) = all_steps(engine.recipe.phases())
    metrics, rows = engine.run_step(step, lambda: None)
    assert len(rows) == 2 * 2 * 3
    for name, learner in engine.learners.items():
        before = jax.tree.leaves(initial[name])
        after = jax.tree.leaves(learner.params)
        changes = [float(np.abs(x - np.asarray(y)).max()) for x, y in zip(before, after)]
        assert max(changes) > 0, name
        assert metrics[f'{name}/gradient_norm'] > 0
        assert metrics[f'{name}/group_size'] == 2
        assert engine.weights.newest[name] == 1
    assert {row.trajectory.weights for row in rows if row.role == 'critic'} == {'critic'}
    # The role without tools has one turn; the engine turns `TaskDropped` into an outcome.
    assert all(len(row.trajectory.turns) == 1 for row in rows if row.role == 'critic')
    assert metrics['drop/tired'] == 1 and metrics['dropped_episodes'] == pytest.approx(1 / 3)
    (dropped,) = [record for record in engine.task_log if record['drop'] == 'tired']
    assert dropped['task'] == [0, 2] and dropped['question'] == 'topic 2'


def test_a_role_without_tools_can_be_evaluated(run):
    _, context = run
    context.publish_weights(['critic'])
    # Held-out questions are asked on the prompt 'solver', which this recipe replaced by one about topics.
    prompts = {**context.evaluation.prompts, 'solver': Prompt('Question: {question}')}
    evaluation = dataclasses.replace(context.evaluation, prompts=prompts)
    recipe = Recipe({}, None)
    recipe.evaluated_role = 'critic'
    rows = evaluate(evaluation, context.library.questions, 5, recipe)
    assert len(rows) == 2 and {row.role for row in rows} == {'critic'}
    assert all(len(row.trajectory.turns) == 1 for row in rows)
    assert not any(row.trajectory.valid_calls for row in rows)


# ---- rewards ------------------------------------------------------------------------------------


def drzero(**reward):
    config = quickstart.get_config()
    config.reward.update(reward)
    rules.check(config)
    return DrZero(config, scripted.library())


def test_rewards_of_another_package_score_proposals_and_answers(packages):
    recipe = drzero(
        difficulty='debate.rewards:steep', answer='debate.rewards:first_letter', target=0.25
    )
    proposal = final(question='Where is it?', answer='Tarva')
    solver = [final(answer=answer) for answer in ('Tarva', 'Tube', 'Lomi', 'x', 'T')]
    context = ScriptedContext(proposer=[proposal], solver=solver)
    task = Task((0, 0), SeedDocument('Tarva', 'Tarva is large.', hops=1))
    step = Step(scripted.phase('proposer'), 0, 0)
    (outcome,) = scripted.run_episodes(recipe, context, step, [task])
    # A score of one half counts as solved: three answers of five begin with the same letter.
    assert outcome.rows[0].info.solve_count == 3
    assert outcome.rows[0].parts['difficulty'] == 0.25 * 3**2 / 5

    context = ScriptedContext(solver=solver)
    task = Task((0, 0), Question('Where?', ('Tarva',)))
    step = Step(scripted.phase('solver'), 0, 0)
    (outcome,) = scripted.run_episodes(recipe, context, step, [task])
    assert [row.reward for row in outcome.rows] == [0.5, 0.5, 0.0, 0.0, 0.5]
    assert [row.info.score for row in outcome.rows] == [0.5, 0.5, 0.0, 0.0, 0.5]
