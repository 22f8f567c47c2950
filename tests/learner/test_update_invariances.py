"""The gradient of a step is the same however its rollouts are packed, padded, ordered, cut and given to devices."""

import dataclasses

import pytest
import tiny
from updates import (
    DISTILS,
    close,
    config_of,
    gradient,
    make_rows,
    other,
    taught_rows,
    thinking,
    truncated,
)

from zeroplay_jax.learner.batch import pack
from zeroplay_jax.policy import adapters, hf
from zeroplay_jax.settings.schema import LINEARS

# Micro-batches, their order and devices.
ONE_BY_ONE = dict(micro_rows=1, tokens=27, teacher_tokens=47)
LONGEST_FIRST = dict(micro_rows=4, tokens=200, teacher_tokens=300, order='longest_first')
WIDE = dict(micro_rows=4, tokens=60, teacher_tokens=100)
ON_DEVICES = WIDE | dict(step=-1, mesh=(2, 2, 2))
# Some devices have no rollout.
WITH_IDLE_DEVICES = ON_DEVICES | dict(tokens=200)
# Losses of single tokens as if they read whole rows, from the logits of all tokens.
BY_ROWS = WIDE | dict(elementwise=False, logits='all')


def arranged(
    case,
    micro_rows,
    tokens,
    teacher_tokens,
    order='arrival',
    step=1,
    mesh=(1, 1, 1),
    elementwise=True,
    **fields,
):
    policy, rows, changes, options = case
    config = config_of(**changes)
    if not elementwise:
        policy_loss = dataclasses.replace(config.policy_loss, elementwise=False)
        config = dataclasses.replace(config, policy_loss=policy_loss)
    mode = changes.get('aggregation', 'token')
    if 'teacher' not in options:
        teacher_tokens = 0
    batches = pack(
        rows[::step],
        micro_rows=micro_rows,
        tokens=tokens,
        mode=mode,
        teacher_tokens=teacher_tokens,
        order=order,
    )
    return gradient(policy, config, batches, mesh, **options | fields)


def loss_of(name, mode='token'):
    def make(policy, folder):
        return policy, make_rows(policy[0], 12), dict(loss=name, aggregation=mode), {}

    return make


def all_terms(policy, folder):
    """A policy loss of single tokens with every other term and a teacher, from the logits of trained tokens alone."""
    rows = taught_rows(policy[0], 8)
    for number, row in enumerate(rows):
        row.advantage = 0.5 - number % 3
    terms = dict(kl_coef=0.1, entropy_coef=0.01, tis_cap=1.5, tis_level='token', dual_clip=1.2)
    return policy, rows, DISTILS | terms, dict(teacher=other(policy[1]), logits='trained')


def several_contexts(policy, folder):
    rows = list(map(thinking, taught_rows(policy[0])))
    return policy, rows, DISTILS, dict(teacher=other(policy[1]))


def truncated_to_ids(policy, folder):
    """Tokens that were drawn from a few ids: entropy, teacher and policy are those of the ids."""
    model, params = policy
    rows = [truncated(row, model.vocab_size) for row in taught_rows(model)]
    for number, row in enumerate(rows):
        row.advantage = float(number - 2)
    return policy, rows, DISTILS | dict(entropy_coef=0.1), dict(teacher=other(params))


def adapted(policy, folder):
    model, params = policy
    adapter = other(adapters.init(params, LINEARS, 2, 0, 'r'))
    return (model, adapter), make_rows(model), {}, dict(base=params)


def with_states(policy, folder):
    """Gated delta nets, whose states rollouts in one row must not share."""
    model = hf.read_config(tiny.make_folder(folder, letters=tiny.LETTERS, **tiny.DELTA))
    return (model, hf.load(folder, model)), make_rows(model), {}, {}


SEQUENCE_MEAN = 'seq_mean_token_mean'
OTHER_LOSSES = ('reinforce', 'cispo', 'geometric_pg')
MATRIX = [
    ('token_pg', loss_of('token_pg'), [ONE_BY_ONE, LONGEST_FIRST, ON_DEVICES]),
    (SEQUENCE_MEAN, loss_of('token_pg', SEQUENCE_MEAN), [LONGEST_FIRST, ON_DEVICES]),
    ('sums', loss_of('token_pg', 'seq_mean_token_sum'), [LONGEST_FIRST, ON_DEVICES]),
    ('sequence_pg', loss_of('sequence_pg', SEQUENCE_MEAN), [ON_DEVICES]),
    *((name, loss_of(name, SEQUENCE_MEAN), [ON_DEVICES]) for name in OTHER_LOSSES),
    ('terms', all_terms, [LONGEST_FIRST, WITH_IDLE_DEVICES, BY_ROWS]),
    ('contexts', several_contexts, [ON_DEVICES]),
    ('ids', truncated_to_ids, [ONE_BY_ONE, LONGEST_FIRST, ON_DEVICES]),
    ('adapters', adapted, [ON_DEVICES]),
    ('states', with_states, [ON_DEVICES]),
]


@pytest.mark.parametrize('name,make,arrangements', MATRIX, ids=[name for name, *_ in MATRIX])
def test_packing_order_micro_batches_and_devices_change_nothing(
    policy, tmp_path, name, make, arrangements
):
    """As the rollouts in a row each, in one micro-batch on one device."""
    case = make(policy, tmp_path / 'policy')
    expected = arranged(case, micro_rows=16, tokens=27, teacher_tokens=47)
    assert abs(expected[0]) > 1e-3
    # The recurrence adds up in another order.
    tolerance = 1e-4 if name == 'states' else 1e-5
    for arrangement in arrangements:
        close(arranged(case, **arrangement), expected, tolerance)
