"""Three steps at a server of OpenEnv, about a minute on two CPU cores.

python -m uvicorn examples.openenv_env.server:app --port 8000
zeroplay train --config=examples/openenv_env/config.py --workdir=runs/openenv
"""

from zeroplay_jax.configs import common


def get_config():
    """Four rollouts of each of eight tasks."""
    config = common.get_config('examples.openenv_env.recipe')
    config.openenv.update(tasks=8, turns=3, observation='text')
    config.rollout.turn_tokens = 32
    config.solver.update(steps=3, batch=8, samples=4, learning_rate=1e-4)
    config.schedule.update(iterations=1, hop_ratio=(1,))
    config.eval.hops = (1,)
    config.world.update(train=(0, 4), evaluation=(0, 2))
    common.shrink(config)
    return config
