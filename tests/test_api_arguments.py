"""Wrong arguments of `import zeroplay_jax as zp`: one line with the function, the argument and the fix."""

import dataclasses
import pathlib
import re

import jax.numpy as jnp
import pytest
import refused_calls
from refused_calls import check_table
from trajectories import make_trajectory

import zeroplay_jax as zp
from zeroplay_jax.objectives import masking
from zeroplay_jax.objectives.losses import PolicyLoss
from zeroplay_jax.tools.calculator import CalculatorTool
from zeroplay_jax.types import Turn

CHANGES = {'world.train': (0, 1), 'world.evaluation': (0, 1), 'sampler.slots': 2}


@pytest.fixture(scope='module')
def settings():
    return zp.config('dspo', 'mini', CHANGES)


@pytest.fixture(scope='module')
def policy(settings):
    return zp.load_policy(settings=settings)


@pytest.fixture(scope='module')
def index(settings):
    return zp.open_index(settings=settings)


def rollout(sample=0):
    return make_trajectory(Turn('<answer>Rome</answer>'), identity=(0, 0, sample))


# These, and what begins with score_, are named by calls of the table.
ROLLOUTS = [[rollout(0), rollout(1)], [rollout(2), rollout(3)]]


def refused(call, *parts):
    text = refused_calls.refused(call)
    # What and where, and after the semicolon how to correct it.
    for part in (*parts, '; '):
        assert part in text, text
    return text


def reported(sent, *case):
    """A case of a table of tests that others reported; `sent` names it in the table of benchmarks/faults.py."""
    return pytest.param(*case, marks=pytest.mark.fault('kin-faces', sent))


CALLS = pathlib.Path(__file__).parent / 'golden' / 'api_refusals.txt'


def test_every_wrong_call_has_the_answer_of_the_table(policy, index, tmp_path):
    (tmp_path / 'file').touch()
    (tmp_path / 'empty').mkdir()
    names = {'policy': policy, 'index': index, 'folder': tmp_path}
    names['CalculatorTool'] = CalculatorTool
    check_table(CALLS, globals() | names, tmp_path)


@pytest.mark.parametrize(
    ('changes', 'part'),
    [
        reported(
            "zp.config(…, {'solver.steps': True})",
            {'solver.steps': True},
            'config.solver.steps=True: must be a whole number',
        ),
        reported(
            "zp.config(…, {'solver.learning_rate': None})",
            {'solver.learning_rate': None},
            'learning_rate=None: must be a number',
        ),
    ],
)
def test_config(changes, part, user_reads):
    user_reads(refused(lambda: zp.config('drzero', '', changes), part))


@pytest.mark.fault('kin-faces', "zp.config(…, {'solver': {'steps': 1}})")
def test_a_dict_of_a_section_sets_the_fields_that_it_names(user_reads):
    user_reads('right: the other fields of the section stay')
    settings = zp.config('drzero', 'mini', {'solver': {'steps': 1}, 'eval': {'hops': [1, 2]}})
    assert settings == zp.config('drzero', 'mini', {'solver.steps': 1, 'eval.hops': (1, 2)})


@pytest.mark.fault('kin-faces', 'zp.load_policy with settings.solver.foo = 3')
def test_a_field_that_is_set_later_is_checked(user_reads):
    settings = zp.config('drzero', 'mini')
    settings.solver.foo = 3
    part = 'config.solver.foo: no such field'
    user_reads(refused(lambda: zp.load_policy(settings=settings), part))


@pytest.mark.parametrize(
    ('question', 'options', 'part'),
    [
        reported('zp.sample_rollouts of a blank question', ' ', {}, 'questions[0] is empty'),
        reported("zp.sample_rollouts(…, seed='x')", 'Who?', {'seed': 'x'}, "seed='x'"),
        reported('zp.sample_rollouts(…, seed=-1)', 'Who?', {'seed': -1}, 'seed=-1'),
    ],
)
def test_sample_rollouts(policy, index, question, options, part, user_reads):
    user_reads(refused(lambda: zp.sample_rollouts(policy, index, [question], **options), part))


@pytest.mark.fault('kin-faces', "index.search(['Batos'])")
def test_search(index, user_reads):
    user_reads(refused(lambda: index.search(['Batos']), 'search: the query is a list'))


@pytest.mark.fault('kin-faces', 'repr(policy)')
def test_parts_are_shown_in_one_line(policy, index, user_reads):
    user_reads(f'right: {policy!r}')
    assert re.fullmatch(r"Policy\('.*': Qwen\w+, [\d,]+ parameters\)", repr(policy))
    assert repr(index) == "Index(about='the miniature world')"


@pytest.mark.fault('kin-faces', 'zp.score(rollouts, [[1912]])')
def test_answers_that_are_numbers_are_read_as_in_files(user_reads):
    user_reads('right: as the text 1912')
    year = dataclasses.replace(rollout(), turns=(Turn('<answer>1912</answer>'),))
    assert zp.score([[year]] * 4, [[1912], 1912.0, ('1912',), ['1913']]).ravel().tolist() == [
        1,
        1,
        1,
        0,
    ]


def score_of_five(prediction, accepted):
    return 5.0


def score_nan(prediction, accepted):
    return float('nan')


def score_of_text(prediction, accepted):
    return 'right'


REWARDS = [[0.0, 1.0], [1.0, 0.0]]


def coupled(logp, old_logp, advantage, mask, segment, **options):
    mask, logp = masking.masked('coupled', mask, logp)
    return masking.spread(masking.segment_sum(logp, segment), segment), {}


def centred(logp, old_logp, advantage, mask, segment, **options):
    return -(advantage - jnp.mean(advantage)) * logp, {}


COUPLED = PolicyLoss(coupled, elementwise=True)


@pytest.mark.fault('kin-faces', "zp.policy_loss(…, [['1', '0'], …])")
def test_policy_loss(policy, user_reads):
    loss = lambda: zp.policy_loss(policy, ROLLOUTS, [['1', '0'], ['0', '1']])
    user_reads(refused(loss, 'policy_loss: ', 'rewards is not a table of numbers'))


@pytest.mark.fault('kin-faces', 'zp.train(settings, None)')
def test_train_without_a_folder(user_reads):
    train = lambda: zp.train(zp.config('dspo', 'mini'), None)
    user_reads(refused(train, 'train: workdir is a NoneType'))


def test_settings_of_a_folder_are_those_of_its_tokenizer():
    policy = zp.load_policy('zeroplay_jax/mini/english/clean')
    assert (
        policy.config.rollout.observation_tokens == zp.config('english').rollout.observation_tokens
    )
    # That of configs/english.py is -1.
    assert policy.config.mesh.replica == 1
