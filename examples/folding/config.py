"""Three steps on the miniature world, about two minutes on two CPU cores.

zeroplay train --config=examples/folding/config.py --workdir=runs/folding
"""

from zeroplay_jax.configs import common


def get_config():
    """Two turns between folds, so that questions of two hops need a fold."""
    config = common.get_config('examples.folding.recipe')
    config.folding.folds = 2
    config.rollout.update(max_turns=2, turn_tokens=48)
    config.solver.update(loss='token_pg', aggregation='seq_mean_token_sum')
    config.solver.update(steps=3, batch=8, samples=4, learning_rate=1e-4)
    config.schedule.update(iterations=1, hop_ratio=(0, 1))
    config.eval.hops = (1, 2)
    config.inputs.world_questions = 40
    config.world.update(train=(0, 4), evaluation=(0, 2))
    common.shrink(config)
    return config
