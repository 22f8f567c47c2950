"""Rules about the devices, slots and pages of the sampler, and about rollouts of older weights."""

from config_checks import message

from zeroplay_jax.configuration import rules


def test_attention_to_used_places_needs_pages_as_long_as_a_slot(sound):
    sound.sampler.attention = 'used'
    rules.check(sound)
    sound.sampler.page = 64
    assert message(sound).startswith('config.sampler.attention=used: ')
    assert 'set xla' in message(sound)


def test_devices_of_a_cpu_are_used(sound):
    sound.mesh.replica = 1
    assert 'config.cpu_devices=2: the mesh has 1 of these devices' in message(sound)
    sound.cpu_devices = 1
    rules.check(sound)


def test_pages_hold_one_rollout_and_divide_over_the_devices(sound):
    sound.cpu_devices = sound.mesh.replica = 1
    sound.sampler.update(attention='xla', page=100, pages=5)
    assert message(sound).startswith('config.sampler.token_budget=0: sampler.page=100 needs steps')
    sound.sampler.token_budget = 32
    assert 'fills 6 pages of 100; give 6 or more' in message(sound)
    sound.sampler.pages = 6
    rules.check(sound)
    sound.mesh.fsdp = 2
    assert 'give 12 or more' in message(sound)
    sound.sampler.pages = 13
    assert message(sound).startswith('config.sampler.pages=13')
    sound.sampler.update(pages=14, token_budget=33)
    assert message(sound).startswith('config.sampler.token_budget=33')


def test_rollouts_of_older_weights_are_corrected(sound):
    sound.rollout.ahead = 1
    assert message(sound).startswith('config.proposer.tis_cap=0.0: rollouts of older weights')
    assert 'proposer.old_logp=trainer; give a cap' in message(sound)
    for role in (sound.proposer, sound.solver):
        role.tis_cap = 2.0
        role.old_logp = 'trainer'
    rules.check(sound)
    sound.offload = True
    assert message(sound).startswith('config.offload=True: rollouts are in progress during')
    sound.offload = False
    sound.cpu_devices = sound.mesh.replica = 1
    sound.sampler.update(attention='xla', page=64, pages=40, token_budget=32)
    rules.check(sound)
    sound.solver.update(filter_groups=True, surplus='carry')
    assert 'set solver.surplus to drop' in message(sound)
    sound.solver.filter_groups = False
    sound.rollout.ahead = 2
    assert message(sound).startswith('config.rollout.ahead=2')


def test_smaller_decode_steps_ascend_and_divide_over_the_devices(sound):
    sound.cpu_devices = sound.mesh.replica = 1
    sound.sampler.update(attention='xla', page=100, token_budget=96, decode_buckets=(8, 96))
    assert 'give numbers below 96' in message(sound)
    sound.sampler.decode_buckets = (8, 4)
    assert 'smallest first' in message(sound)
    sound.sampler.decode_buckets = (3, 8)
    rules.check(sound)
    sound.mesh.fsdp = 2
    assert 'give multiples of 2' in message(sound)
