"""Three steps of the game with a critic on the miniature world.

zeroplay train --config=PATH/zp_outside/config.py --workdir=runs/critic
"""

from zeroplay_jax.configs import common


def get_config():
    """A run that two CPU cores finish in a minute."""
    config = common.get_config('zp_outside.critic')
    config.tools.names = ('zp_outside.tools:fresh_search',)
    config.tools.top_k = 2
    config.critic_game.update(drafts=2, improvement=0.5)
    config.reward.update(
        difficulty='zp_outside.rewards:plateau',
        answer='zp_outside.rewards:last_word',
        solves=2,
        format_weight=0.5,
    )
    config.schedule.update(iterations=1, hop_ratio=(1, 1))
    for role in (config.proposer, config.solver, config.critic):
        # So few rollouts seldom differ at 1.0.
        role.update(
            loss='zp_outside.losses:quadratic', learning_rate=1e-4, samples=2, temperature=1.5
        )
    config.proposer.update(steps=3, batch=4)
    config.critic.minibatches = 2
    config.sampler.slots = 16
    config.rollout.max_turns = 3
    config.micro.rows = 2
    config.world.update(train=(0, 1), evaluation=(0, 1))
    config.eval.update(questions=2, hops=(1, 2))
    # With two rollouts per prompt a step often has no reward variance.
    config.stop_after_empty_steps = 0
    return config
