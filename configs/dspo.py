"""DSPO, for Qwen2.5-7B-Instruct on a v5p-32 (four hosts of four chips). Many values are inferred, see below.

    zeroplay inputs questions --sets nq_train.jsonl,hotpotqa_train.jsonl \\
        --out data/nq_hotpotqa_train.jsonl
    launch/tpu_vm.sh --name dspo --zone us-east5-a --type v5p-32 --setup "$MOUNT" -- --config=configs/dspo.py \\
        --workdir=/mnt/share/runs/dspo --config.checkpoint.every=10 --policy=/mnt/share/Qwen2.5-7B-Instruct \\
        --index=/mnt/share/wiki18_bm25 \\
        $(zeroplay plan --config=configs/dspo.py --machine=v5p-32)
    zeroplay train --config=configs/dspo.py:mini --workdir=runs/dspo_mini

The plan (zeroplay plan): 24.8 GiB of a chip's 95 in rollouts, 38.7 in updates; 6 h for 200 steps, simulated for
rollouts of 512 prompt, 768 written and 1,024 read tokens, half of the questions kept by the filter. This config has not
been run.
launch/README.md: MOUNT.
The paper: answer contained (subEM) 0.531 on average over seven sets (table 1), NQ 0.580.

The first command builds the file for the second (`inputs.questions`: the training questions of NQ and HotpotQA,
as in the paper). The third trains three steps with the built-in checkpoint on questions of the training worlds, which
are counted as external.

Every evaluation of the run measures subEM, the paper's metric, beside exact match (`eval.metric`).

The paper gives neither clip range, group size, batch, rate nor stopping rule. They are inferred, and marked so below:
the clip range is GSPO's, rate and batch are those of the other four systems. With one update per batch the sequence
ratio is 1 up to rounding, so there are four. Every value with its source: docs/hyperparameters.md.
"""

from zeroplay_jax.configs import common


def get_config(variant=''):
    """Returns the config of the paper, or that of the variant 'mini' or 'small'; see above."""
    common.check_variant('dspo', variant)
    config = common.get_config('dspo')
    config.schedule.iterations = 1
    config.reward.answer = 'subem'  # section 4.1: the reward
    config.eval.metric = (
        'subem'  # section 4.1: the metric; exact match is always measured beside it
    )
    config.solver.update(loss='sequence_pg', aggregation='seq_mean_token_mean')  # eqs. 6 and 11
    config.solver.update(
        baseline='mean', scale='std', filter_groups=True, surplus='carry'
    )  # eqs. 9 and 10
    # Inferred; the clip range is GSPO's, the rounds are those of DAPO's script in verl.
    config.solver.update(clip_low=3e-4, clip_high=4e-4, kl_coef=0.001, kl_kind='k3', fill_rounds=10)
    config.solver.update(
        samples=8, batch=256, learning_rate=1e-6, minibatches=4, steps=200
    )  # inferred
    if variant == 'mini':
        return _mini(config)
    if variant == 'small':
        common.small(config)
        config.inputs.questions = 'own/train_questions.jsonl'
        return config

    # The paper searches with BM25.
    common.use_wikipedia(config, 'Qwen2.5-7B-Instruct', 'wiki18_bm25')
    config.inputs.questions = 'data/nq_hotpotqa_train.jsonl'
    config.tools.syntax = 'qwen'
    config.rollout.update(prompt_tokens=512, turn_tokens=512, observation_tokens=512, max_turns=4)
    config.sampler.update(context=4096, chunk=256)
    config.micro.update(tokens=4096, weights='published')
    return config


def _mini(config):
    """Shrinks the run to three steps."""
    config.solver.update(
        steps=3, batch=8, samples=4, minibatches=4, learning_rate=1e-4, clip_low=0.2, clip_high=0.28
    )
    config.inputs.world_questions = 40
    config.world.train = (0, 4)
    config.world.evaluation = (0, 2)
    common.shrink(config)
    return config
