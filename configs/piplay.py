"""π-Play with the hyperparameters of its paper, for Qwen3-4B-Instruct-2507.

    python -m zeroplay_jax.main --config=configs/piplay.py --workdir=runs/piplay
    python -m zeroplay_jax.main --config=configs/piplay.py:mini --workdir=runs/piplay_mini

The first is meant for an accelerator host and has not been run. The second plays three steps per role with the
built-in checkpoint, on two CPU cores: every stage runs, nothing is learnt. A file of documents for the first is built
as configs/drzero.py says.

The paper leaves open in which direction the divergence runs and how it is averaged: here student ‖ teacher, as a mean
over the tokens that the student wrote, like the code it cites; `solver.distill_kind` has the other directions. The
teacher starts from the student's first weights and is not restarted between iterations.
"""

from configs import drzero


def get_config(variant=''):
    if variant not in ('', 'mini'):
        raise ValueError(f'no variant {variant!r}; there is configs/piplay.py and configs/piplay.py:mini')
    config = drzero.get_config(variant)
    config.recipe = 'piplay'
    # Table of hyperparameters: K about 50, the weight falls over the iterations, soft update weight 0.05.
    config.solver.update(distill_top_k=50, distill_coef=(0.1, 0.03, 0.03), distill_kind='reverse')
    config.solver.update(distill_tail=True, distill_ema_rate=0.05, clip_norm=0.1)
    config.solver.aggregation = 'seq_mean_token_mean'  # eq. 8
    config.proposer.clip_norm = 0.1
    config.privileged.kind = 'qcp'
    if variant == 'mini':
        config.solver.distill_top_k = 20
        config.privileged.update(prompt_tokens=160, tokens=160 + config.sampler.context)
        return config

    config.policy.path = 'checkpoints/Qwen3-4B-Instruct-2507'
    config.privileged.update(prompt_tokens=4096, tokens=8192)
    return config
