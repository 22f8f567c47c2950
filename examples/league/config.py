"""Two iterations of two steps on the miniature world, about two minutes on two CPU cores.

zeroplay train --config=examples/league/config.py --workdir=runs/league
"""

from zeroplay_jax.configs import common


def get_config():
    """Rewards are compared with the baselines of the state, not with those of a group."""
    config = common.get_config('examples.league.recipe')
    config.league.decay = 0.5
    config.solver.update(baseline='none', scale='none', loss='reinforce', minibatches=1)
    config.solver.update(steps=2, batch=8, samples=4, learning_rate=1e-4, filter_groups=False)
    config.schedule.iterations = 2
    config.inputs.world_questions = 40
    config.world.update(train=(0, 4), evaluation=(0, 2))
    config.checkpoint.best = 'em/mean'
    common.shrink(config)
    return config
