"""Three steps on the miniature world, about two minutes on two CPU cores.

zeroplay train --config=examples/hint/config.py --workdir=runs/hint
"""

from zeroplay_jax.configs import common


def get_config():
    """Four hints and four answers per question."""
    config = common.get_config('examples.hint.recipe')
    for role in (config.solver, config.hinter):
        role.update(loss='token_pg', samples=4, learning_rate=1e-4, filter_groups=False)
    config.solver.update(steps=3, batch=8, minibatches=1)
    config.schedule.iterations = 1
    config.inputs.world_questions = 40
    config.world.update(train=(0, 4), evaluation=(0, 2))
    common.shrink(config)
    return config
