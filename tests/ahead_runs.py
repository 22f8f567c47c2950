"""The miniature with `rollout.ahead`, and engines of this process."""

from zeroplay_jax.configs import dspo
from zeroplay_jax.run import build


def make_config(ahead=1, **fields):
    """Questions of the worlds, a filter that needs further rounds, and updates large enough to change samples."""
    config = dspo.get_config('mini')
    config.solver.update(
        steps=4, batch=3, samples=4, minibatches=1, learning_rate=3e-4, fill_rounds=2
    )
    config.solver.update(surplus='drop', old_logp='trainer', tis_cap=2.0, tis_level='sequence')
    config.rollout.ahead = ahead
    config.sampler.slots = 8
    config.progress = False
    for name, value in fields.items():
        section, field = name.split('__')
        config[section][field] = value
    return config


def make_engine(config):
    run = build.build(config, for_training=True)
    return build.build_engine(config, run)
