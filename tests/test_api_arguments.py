"""Wrong arguments of `import zeroplay_jax as zp`: one line with the function, the argument and the fix."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

import zeroplay_jax as zp
from zeroplay_jax.objectives import masking
from zeroplay_jax.objectives.losses import PolicyLoss
from zeroplay_jax.tools.calculator import CalculatorTool
from zeroplay_jax.types import POLICY, Trajectory, Turn, UserError

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
    length = 4
    return Trajectory(
        np.zeros(length, np.int32),
        np.full(length, POLICY, np.int8),
        np.zeros(length, np.float32),
        (Turn('<answer>Rome</answer>'),),
        'answer',
        'solver',
        0,
        (0, 0, sample),
    )


ROLLOUTS = [[rollout(0), rollout(1)], [rollout(2), rollout(3)]]


def refused(call, *parts):
    with pytest.raises(UserError) as caught:
        call()
    text = str(caught.value)
    assert '\n' not in text, text
    # What and where, and after the semicolon how to correct it.
    for part in (*parts, '; '):
        assert part in text, text
    return text


def reported(sent, *case):
    """A case of a table of tests that others reported; `sent` names it in the table of benchmarks/faults.py."""
    return pytest.param(*case, marks=pytest.mark.fault('kin-faces', sent))


@pytest.mark.parametrize(
    ('arguments', 'part'),
    [
        (('drzerro',), "config: name='drzerro': no such recipe"),
        (('drzero', 'minni'), "no variant 'minni'"),
        (('quickstart', 'mini'), 'quickstart has no variants'),
        (('zeroplay_jax.recipes.ssp', 'mini'), 'no variant'),
        (('drzero', '', {'solver.bach': 4}), 'no such field; did you mean config.solver.batch'),
        (
            ('drzero', '', {'solver.batch': 'four'}),
            'config.solver.batch=four: must be a whole number',
        ),
        (('drzero', '', 'solver.batch=4'), 'changes is a str'),
        (
            ('drzero', '', {'solver': 3}),
            "a section and not a field; name one of its fields, such as 'solver.NAME'",
        ),
        (('drzero', '', {3: 4}), 'no such field'),
        (
            ('drzero', '', {'solver': {'bach': 4}}),
            'no such field; did you mean config.solver.batch',
        ),
        (('drzero', '', {'slover': {}}), 'did you mean'),
        (('drzero', '', {'solver.batch': {'x': 4}}), 'is a value and has no fields; set'),
        reported(
            "zp.config(…, {'solver.steps': True})",
            ('drzero', '', {'solver.steps': True}),
            'config.solver.steps=True: must be a whole number',
        ),
        reported(
            "zp.config(…, {'solver.learning_rate': None})",
            ('drzero', '', {'solver.learning_rate': None}),
            'learning_rate=None: must be a number',
        ),
    ],
)
def test_config(arguments, part, user_reads):
    user_reads(refused(lambda: zp.config(*arguments), part))


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


def test_load_policy(tmp_path):
    refused(lambda: zp.load_policy(tmp_path / 'nowhere'), 'nowhere')
    refused(lambda: zp.load_policy(tmp_path), str(tmp_path))
    refused(lambda: zp.load_policy(settings='drzero'), 'load_policy: settings is a str')


def test_open_index(tmp_path):
    refused(lambda: zp.open_index(tmp_path / 'nowhere'), 'nowhere')
    refused(lambda: zp.open_index(tmp_path), str(tmp_path))
    refused(lambda: zp.open_index(settings={'seed': 1}), 'open_index: settings is a dict')


@pytest.mark.parametrize(
    ('questions', 'options', 'part'),
    [
        ('Who?', {}, 'questions is a str'),
        (['Who?', 3], {}, 'questions[1] is a int'),
        reported('zp.sample_rollouts of a blank question', [' '], {}, 'questions[0] is empty'),
        (['Who?'], {'samples': 0}, 'samples=0'),
        (['Who?'], {'samples': True}, 'samples=True'),
        reported("zp.sample_rollouts(…, seed='x')", ['Who?'], {'seed': 'x'}, "seed='x'"),
        reported('zp.sample_rollouts(…, seed=-1)', ['Who?'], {'seed': -1}, 'seed=-1'),
        (['Who?'], {'step': 1.5}, 'step=1.5'),
        (['Who?'], {'temperature': -1.0}, 'temperature=-1.0'),
        (['Who?'], {'tools': 'search'}, 'tools is a str'),
        (['Who?'], {'tools': ['serch']}, "'serch' is not a tool"),
        (['Who?'], {'tools': [CalculatorTool]}, 'CalculatorTool is a class'),
        (['Who?'], {'tools': [3]}, 'a tool is a int'),
        (['Who? ' * 500], {}, "questions[0] ('Who? Who?"),
    ],
)
def test_sample_rollouts(policy, index, questions, options, part, user_reads):
    user_reads(refused(lambda: zp.sample_rollouts(policy, index, questions, **options), part))


def test_sample_rollouts_of_something_else(policy, index):
    refused(lambda: zp.sample_rollouts('base', index, ['Who?']), 'policy is a str', 'load_policy')
    refused(lambda: zp.sample_rollouts(policy, 'notes', ['Who?']), 'index is a str', 'open_index')


@pytest.mark.fault('kin-faces', "index.search(['Batos'])")
def test_search(index, user_reads):
    user_reads(refused(lambda: index.search(['Batos']), 'search: the query is a list'))


@pytest.mark.fault('kin-faces', 'repr(policy)')
def test_parts_are_shown_in_one_line(policy, index, user_reads):
    user_reads(f'right: {policy!r}')
    assert re.fullmatch(r"Policy\('.*': Qwen\w+, [\d,]+ parameters\)", repr(policy))
    assert repr(index) == "Index(about='the miniature world')"


@pytest.mark.parametrize('value', [ROLLOUTS, ROLLOUTS[0], 'a text'])
def test_show(value):
    refused(lambda: zp.show(value), 'show: ', 'rollouts[0][0]')


@pytest.mark.parametrize(
    ('rollouts', 'answers', 'metric', 'part'),
    [
        (ROLLOUTS, [], 'em', 'score: 0 entries of answers for 2 questions'),
        (ROLLOUTS, 'Rome', 'em', 'score: answers is a str'),
        (ROLLOUTS, ['Rome', None], 'em', 'score: answers[1]: "answers" is a JSON null'),
        (ROLLOUTS, [['Rome'], [None]], 'em', 'score: answers[1]: an answer of "answers" is a JSON'),
        (ROLLOUTS, ['Rome', 'Paris'], 'eem', "score: answer metric 'eem' is not built in"),
        (ROLLOUTS, ['Rome', 'Paris'], 'no_package.x:f', 'cannot import module'),
        (ROLLOUTS[0], ['Rome', 'Paris'], 'em', 'score: rollouts[0] is not a list of rollouts'),
        (ROLLOUTS[0][0], ['Rome'], 'em', 'score: rollouts is a Trajectory'),
    ],
)
def test_score(rollouts, answers, metric, part):
    refused(lambda: zp.score(rollouts, answers, metric), part)


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


@pytest.mark.parametrize(
    ('name', 'part'),
    [('score_of_five', '5.0'), ('score_nan', 'nan'), ('score_of_text', 'a str')],
)
def test_a_metric_that_returns_no_score(name, part):
    metric = f'{__name__}:{name}'
    answers = ['Rome', 'Paris']
    expected = f"score: metric '{metric}' returned {part}; return a number in [0, 1]"
    refused(lambda: zp.score(ROLLOUTS, answers, metric), expected)


REWARDS = [[0.0, 1.0], [1.0, 0.0]]


def coupled(logp, old_logp, advantage, mask, segment, **options):
    mask, logp = masking.masked('coupled', mask, logp)
    return masking.spread(masking.segment_sum(logp, segment), segment), {}


def centred(logp, old_logp, advantage, mask, segment, **options):
    return -(advantage - jnp.mean(advantage)) * logp, {}


COUPLED = PolicyLoss(coupled, elementwise=True)


@pytest.mark.parametrize(
    ('rewards', 'options', 'part'),
    [
        (REWARDS, {'loss': 'ppo'}, 'loss=ppo: not possible; give one of reinforce, token_pg'),
        (REWARDS, {'loss': 'no_package.x:f'}, 'cannot import module'),
        (REWARDS, {'loss': 3}, 'config.solver.loss=3: must be a text'),
        (REWARDS, {'loss': score_nan}, 'it is called with (logp, old_logp'),
        (REWARDS, {'loss': COUPLED}, 'loss coupled: declared elementwise'),
        (REWARDS, {'loss': centred}, 'loss centred: the loss of a token changes with other'),
        (REWARDS, {'clip_lo': 0.2}, 'config.solver.clip_lo: no such field; did you mean'),
        (REWARDS, {'clip_low': -0.2}, 'config.solver.clip_low=-0.2: not possible'),
        (REWARDS, {'clip_low': 'small'}, 'config.solver.clip_low=small: must be a number'),
        (REWARDS, {'distill_top_k': 5}, 'no teacher prompt; set distill_top_k to 0'),
        (REWARDS, {'baseline': 'value'}, 'baseline=value needs a run, which has a value network'),
        (REWARDS[:1], {}, 'rewards for 1 questions and rollouts of 2'),
        ([[0.0], [1.0, 0.0]], {}, '1 rewards for the 2 rollouts of question 0'),
        ([0.0, 1.0], {}, 'rewards is not a table of numbers'),
        reported(
            "zp.policy_loss(…, [['1', '0'], …])",
            [['1', '0'], ['0', '1']],
            {},
            'rewards is not a table of numbers',
        ),
        ([[0.0, float('nan')], [1.0, 0.0]], {}, 'a reward of question 0 is nan'),
        (None, {}, 'rewards is not a table of numbers (NoneType)'),
    ],
)
def test_policy_loss(policy, rewards, options, part, user_reads):
    loss = lambda: zp.policy_loss(policy, ROLLOUTS, rewards, **options)
    user_reads(refused(loss, 'policy_loss: ', part))


def test_policy_loss_of_something_else(policy):
    refused(lambda: zp.policy_loss(None, ROLLOUTS, REWARDS), 'policy is a NoneType')
    refused(lambda: zp.policy_loss(policy, ROLLOUTS[0], REWARDS), 'rollouts[0] is not a list')


@pytest.mark.fault('kin-faces', 'zp.train(settings, None)')
def test_train_without_a_folder(user_reads):
    train = lambda: zp.train(zp.config('dspo', 'mini'), None)
    user_reads(refused(train, 'train: workdir is a NoneType'))


def test_train(tmp_path):
    config = zp.config('dspo', 'mini')
    (tmp_path / 'file').touch()
    refused(lambda: zp.train('configs/dspo.py', tmp_path), 'train: settings is a str')
    refused(lambda: zp.train(config, tmp_path / 'file' / 'run'), 'there is a file in this place')
    broken = zp.config('dspo', 'mini', {'solver.batch': 0})
    refused(lambda: zp.train(broken, tmp_path), 'config.solver.batch=0')


def test_settings_of_a_folder_are_those_of_its_tokenizer():
    policy = zp.load_policy('zeroplay_jax/mini/english/clean')
    assert (
        policy.config.rollout.observation_tokens == zp.config('english').rollout.observation_tokens
    )
    # That of configs/english.py is -1.
    assert policy.config.mesh.replica == 1
