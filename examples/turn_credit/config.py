"""Three steps on the miniature world, about a minute on two CPU cores.

zeroplay train --config=examples/turn_credit/config.py --workdir=runs/turn_credit
"""

from zeroplay_jax.configs import common


def get_config():
    """The unbiased estimate of the gradient: returns of turns, and sums over tokens."""
    config = common.get_config('examples.turn_credit.recipe')
    config.turn_credit.weight = 0.5
    config.solver.update(advantage='turn', baseline='loo', scale='none')
    config.solver.update(loss='token_pg', aggregation='seq_mean_token_sum', dual_clip=0.0)
    config.solver.update(steps=3, batch=8, samples=4, learning_rate=1e-4)
    config.schedule.iterations = 1
    config.inputs.world_questions = 40
    config.world.update(train=(0, 4), evaluation=(0, 2))
    common.shrink(config)
    return config
