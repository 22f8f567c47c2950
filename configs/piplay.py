"""π-Play with the hyperparameters of its paper, for Qwen3-4B-Instruct-2507 on a v5p-32 (four hosts of four chips).

    launch/tpu_vm.sh --name piplay --zone us-east5-a --type v5p-32 --setup "$MOUNT" -- --config=configs/piplay.py \\
        --workdir=/mnt/share/runs/piplay --config.checkpoint.every=10 \\
        --policy=/mnt/share/Qwen3-4B-Instruct-2507 --index=/mnt/share/wiki18_e5 \\
        $(zeroplay plan --config=configs/piplay.py --machine=v5p-32)
    zeroplay train --config=configs/piplay.py:mini --workdir=runs/piplay_mini

The plan (zeroplay plan): 82.5 GiB of a chip's 95 in rollouts, 88.6 in updates; 2 h for 150 steps of each kind,
simulated for rollouts of 512 prompt, 384 written and 1,024 read tokens and teacher prompts of 2,048.
This config has not been run. launch/README.md: MOUNT.
The paper: exact match summed over seven sets 277.2, 39.6 on average (main results), NQ 41.8.

The second command runs three steps per role with the built-in checkpoint, on two CPU cores: every stage runs, next to
nothing is learnt. configs/drzero.py shows how to build a file of documents for the first.

Everything but the teacher is Dr. Zero's, so that the two can be compared. Of the paper's alternatives (learning rate of
the examiner 5e-7 or 1e-6, gradient norm 0.1 or 1.0, KL 0 or 0.001) this config takes those of configs/drzero.py. How
GRPO averages over tokens (eq. 8) cannot be read from the text at hand; that is inferred, and is Dr. Zero's too.
Sequences have 4,096 tokens and not 8,192: five turns of 256 tokens and four observations of 512 fit.

The paper leaves open in which direction the divergence runs and how it is averaged: here student ‖ teacher, as a mean
over the tokens that the student wrote, like the code it cites; `solver.distill_kind` has the other directions. The
teacher starts from the student's first weights and is not restarted between iterations. Every value with its source:
docs/hyperparameters.md.
"""

from zeroplay_jax.configs import common, drzero


def get_config(variant=''):
    """Returns the config of the paper, or that of the variant 'mini' or 'small'; see above."""
    common.check_variant('piplay', variant)
    config = drzero.get_config(variant)
    config.recipe = 'piplay'
    common.add_sections(config)
    # α: appendix A, for Qwen3-4B-Instruct-2507; K: about 50; direction: not stated.
    config.solver.update(distill_top_k=50, distill_coef=(0.1, 0.03, 0.03), distill_kind='reverse')
    config.solver.update(distill_tail=True, distill_ema_rate=0.05)  # appendix C; table 7
    config.privileged.kind = 'qcp'  # section 3.3
    if variant == 'mini':
        config.solver.distill_top_k = 20
        config.privileged.update(prompt_tokens=160, tokens=160 + config.sampler.context)
        return config
    if variant == 'small':
        config.privileged.update(prompt_tokens=2048, tokens=2048 + config.sampler.context)
        return config

    config.policy.path = 'checkpoints/Qwen3-4B-Instruct-2507'
    config.privileged.update(prompt_tokens=4096, tokens=8192)
    return config
