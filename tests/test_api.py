"""The functions of `import zeroplay_jax as zp` give what a run gives, and refuse wrong arguments in one line."""

import asyncio
import pathlib
import re

import numpy as np
import pytest
from python_process import config_flags
from refused_calls import check_table, check_values
from trajectories import make_trajectory

import zeroplay_jax as zp
from zeroplay_jax.configuration.fields import set_fields
from zeroplay_jax.run import build
from zeroplay_jax.selfplay.schedule import all_steps
from zeroplay_jax.tools.base import Tool, ToolResult, string_parameter
from zeroplay_jax.types import Turn

CHANGES = """
    world.train=(0,1) world.evaluation=(0,1) eval.questions=2 eval.hops=(1,2) inputs.world_questions=6
    schedule.hop_ratio=(1,1) sampler.slots=8 micro.rows=2 seed=3 solver.batch=6 solver.samples=3 solver.steps=1
    solver.minibatches=1 solver.filter_groups=False solver.kl_coef=0.1
"""


@pytest.fixture(scope='module')
def settings():
    settings = zp.config('dspo', 'mini')
    set_fields(settings, config_flags(CHANGES))
    return settings


@pytest.fixture(scope='module')
def policy(settings):
    return zp.load_policy(settings=settings)


@pytest.fixture(scope='module')
def index(settings):
    return zp.open_index(settings=settings)


def assert_same(trajectory, other):
    for name in ('tokens', 'source', 'logp'):
        np.testing.assert_array_equal(getattr(trajectory, name), getattr(other, name))
    assert trajectory.turns == other.turns
    assert trajectory.identity == other.identity


def test_rollouts_and_loss_are_those_of_a_training_step(settings, policy):
    run = build.build(settings)
    engine = build.build_engine(settings, run)
    (step,) = all_steps(engine.recipe.phases())[:1]
    metrics, rows = engine.run_step(step, lambda: None)

    groups = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    questions = [group[0].info.question for group in groups.values()]
    training = zp.Index(run.library.training, 'the training worlds')
    rollouts = zp.sample_rollouts(
        policy,
        training,
        [q.text for q in questions],
        samples=3,
        temperature=settings.solver.temperature,
        seed=3,
        step=step.number,
    )
    scores = zp.score(rollouts, [q.answers for q in questions], settings.reward.answer)
    for group, trajectories, group_scores in zip(groups.values(), rollouts, scores, strict=True):
        assert [row.reward for row in group] == list(group_scores)
        for row, trajectory in zip(group, trajectories, strict=True):
            assert_same(row.trajectory, trajectory)

    names = 'aggregation kl_coef kl_kind clip_low clip_high baseline scale temperature'.split()
    role = {name: settings.solver[name] for name in names}
    loss, stats = zp.policy_loss(policy, rollouts, scores, loss=settings.solver.loss, **role)
    assert metrics['solver/gradient_norm'] > 0
    assert set('loss ratio kl entropy informative_groups'.split()) <= stats.keys()
    for name, value in stats.items():
        np.testing.assert_allclose(float(value), metrics[f'solver/{name}'], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(float(loss), metrics['solver/loss'], rtol=1e-5, atol=1e-6)


def test_equal_seeds_give_equal_rollouts_also_in_a_notebook(policy, index):
    texts = [question.text for question in index.questions]

    def sampled(seed):
        return zp.sample_rollouts(policy, index, texts, samples=2, temperature=1.5, seed=seed)

    async def cell():
        return sampled(3)

    first = sampled(3)
    # A notebook runs its cells below an event loop.
    for again, rollouts in zip(asyncio.run(cell()), first, strict=True):
        for trajectory, other in zip(again, rollouts, strict=True):
            assert_same(trajectory, other)
    pairs = zip(sampled(4), first, strict=True)
    assert any(a[0].tokens.tolist() != b[0].tokens.tolist() for a, b in pairs)


class FixedSearch(Tool):
    name = 'search'
    description = 'always the same'
    parameters = string_parameter('query', 'anything')

    def run(self, calls):
        return [ToolResult(text=f'Lomi {"and Gumu " * 2_000}end') for _ in calls]


def test_a_tool_of_the_notebook_is_called_and_its_results_are_shown_as_the_policy_read_them(
    policy, index
):
    question = index.questions[0].text
    ((rollout,),) = zp.sample_rollouts(
        policy, index, [question], tools=[FixedSearch()], temperature=0.0
    )
    assert rollout.turns[0].call.text.endswith('end')
    (read,) = re.findall(r'ok\] (.*?) \[… \d+ tokens left out\]', zp.show(rollout), re.S)
    assert 'Lomi and Gumu' in read and 'end' not in read
    assert len(policy.codec.encode(read)) <= policy.config.rollout.observation_tokens


# ---- wrong arguments: one line with the function, the argument and the fix -----------------------------------


def rollout(sample=0):
    return make_trajectory(Turn('<answer>Rome</answer>'), identity=(0, 0, sample))


# These, and what is below, are named by calls of the tables.
ROLLOUTS = [[rollout(0), rollout(1)], [rollout(2), rollout(3)]]
YEAR = make_trajectory(Turn('<answer>1912</answer>'))


CALLS = pathlib.Path(__file__).parent / 'golden' / 'api_refusals.txt'


def test_every_wrong_call_has_the_answer_of_the_table(policy, index, tmp_path):
    (tmp_path / 'file').touch()
    (tmp_path / 'empty').mkdir()
    names = {'policy': policy, 'index': index, 'folder': tmp_path}
    check_table(CALLS, globals() | names, tmp_path)


def test_what_is_taken_has_its_value():
    check_values(CALLS.with_name('api_values.txt'), globals())


def score_of_five(prediction, accepted):
    return 5.0


REWARDS = [[0.0, 1.0], [1.0, 0.0]]
