"""Three steps of the game with a critic on the miniature world.

zeroplay train --config=PATH/zp_outside/config.py --workdir=runs/critic
"""

from zeroplay_jax.configs import common


def get_config():
    """A run that two CPU cores finish in a minute."""
    config = common.get_config('zp_outside.critic')
    config.tools.names = ('zp_outside.tools:fresh_search',)
    config.tools.top_k = 2
    config.critic_game.drafts = 2
    config.reward.answer = 'zp_outside.rewards:last_word'
    config.schedule.iterations = 1
    for role in (config.solver, config.critic):
        # So few rollouts seldom differ at 1.0.
        role.update(loss='zp_outside.losses:quadratic', learning_rate=1e-4, temperature=1.5)
    config.solver.update(steps=3, batch=4, samples=4, filter_groups=False)
    config.critic.update(samples=4, minibatches=2)
    config.sampler.slots = 16
    config.rollout.max_turns = 3
    config.micro.rows = 2
    config.world.update(train=(0, 1), evaluation=(0, 1))
    config.inputs.world_questions = 12
    config.eval.update(questions=2, hops=(1, 2))
    # In so few rollouts a step may have no reward variance.
    config.stop_after_empty_steps = 0
    return config
