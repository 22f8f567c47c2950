"""Three steps in an environment of verifiers, about two minutes on two CPU cores.

zeroplay train --config=examples/verifiers_env/config.py --workdir=runs/verifiers
"""

from zeroplay_jax.configs import common


def get_config():
    """Four rollouts of each of eight tasks."""
    config = common.get_config('examples.verifiers_env.recipe')
    config.environment.python = 'runs/verifiers_python/bin/python'
    config.environment.block = (
        '{"taskset": {"id": "tasks"}, "agent": {"runtime": {"type": "subprocess"}}}'
    )
    config.tools.names = ('examples.verifiers_env.recipe:tools',)
    config.rollout.update(max_turns=1, turn_tokens=48)
    config.solver.update(steps=3, batch=8, samples=4, learning_rate=1e-4)
    config.schedule.update(iterations=1, hop_ratio=(1,))
    config.eval.hops = (1,)
    config.world.update(train=(0, 4), evaluation=(0, 2))
    common.shrink(config)
    return config
