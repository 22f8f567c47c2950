"""Dr. Zero with the hyperparameters of its paper, for Qwen2.5-3B-Instruct on a v5litepod-16 (four hosts of four chips).

    launch/tpu_vm.sh --name drzero --zone us-west4-a --type v5litepod-16 --setup "$MOUNT" -- \\
        --config=configs/drzero.py --workdir=/mnt/share/runs/drzero --config.checkpoint.every=10 \\
        --policy=/mnt/share/Qwen2.5-3B-Instruct --index=/mnt/share/wiki18_e5 \\
        $(zeroplay plan --config=configs/drzero.py --machine=v5litepod-16)
    zeroplay train --config=configs/drzero.py:mini --workdir=runs/drzero_mini

The plan (zeroplay plan): 13.8 GiB of a chip's 15.75 in rollouts, 5.3 in updates, the learners' state in host
memory; 3 h for 150 steps of each kind, simulated without its transfers, for rollouts of 512 prompt, 384 written and
1,024 read tokens. This config has not been run.
The paper: exact match 0.326 on average over seven sets (table 1), NQ 0.397. launch/README.md: MOUNT.

Build the index of Wikipedia first (retrieval/README.md). The second command runs three steps per role with a
built-in checkpoint, on two CPU cores: every stage runs, both roles are updated, almost nothing is learnt.

Every step draws documents from the index. With --config.inputs.documents=data/documents.jsonl they come from a file
instead; none repeats before all with its hop count were used. Three iterations need this many:

    zeroplay inputs documents --corpus wiki-18.jsonl --count 39000 --out data/documents.jsonl

Where paper and released code differ, this config follows the paper. The loss is the code's: a clipped ratio per token,
averaged over all tokens of the batch. With one update per batch the ratio is 1 (up to rounding), and both gradients, of
eq. 2 and of eq. 5, are sums over tokens of advantage times gradient of the log-probability: the code's up to a
constant, the number of tokens of the batch (the row drzero/sum_over_tokens has the sum). Of the paper's alternatives
(learning rate of the proposer 5e-7 or 1e-6, gradient norm 0.1 or 1.0, KL of the solver 0 or 0.001) this config takes
1e-6, 1.0 and 0. Its solver has sequences of 3,072 tokens, ours of 4,096, like the proposer. Different from paper and
code: every batch has the hops in exactly 4:3:2:1 (the code draws them), hence singleton='zero'. Every value with its
source: docs/hyperparameters.md.
"""

from zeroplay_jax.configs import common


def get_config(variant=''):
    """Returns the config of the paper, or that of the variant 'mini' or 'small'; see above."""
    common.check_variant('drzero', variant)
    config = common.get_config('drzero')
    config.schedule.update(iterations=3, hop_ratio=(4, 3, 2, 1))  # appendix A, table 4; eq. 3
    config.drzero.group = 'hop'  # eq. 3
    config.drzero.separate_format = True  # appendix A: four parts, which the code couples
    config.reward.update(solves=5, difficulty='linear', format_weight=0.5)  # table 5, eq. 4

    for role in (config.proposer, config.solver):
        role.update(
            learning_rate=1e-6, weight_decay=0.01, clip_norm=1.0
        )  # tables 5, 6; AdamW's β 0.9 and 0.999 are constants of learner/optimizer.py
        role.update(
            steps=50, batch=256, temperature=1.0, minibatches=1, kl_coef=0.0
        )  # tables 5, 6; T: the code
        role.warmup_steps = int(0.03 * role.steps)  # tables 5 and 6, rounded as verl does
        role.update(baseline='mean', scale='std', singleton='zero')  # eqs. 3 and 5; singleton: ours
        role.update(
            loss='token_pg', clip_low=0.2, clip_high=0.2, dual_clip=3.0, aggregation='token'
        )  # the code
    config.proposer.samples = 1  # table 5: one rollout per document, grouped by hops
    config.solver.samples = 5  # table 6
    config.pool.update(batch=256, samples=5)  # the code
    if variant == 'mini':
        return _mini(config)
    if variant == 'small':
        common.small(config)
        config.pool.update(batch=32, samples=2)
        return config

    common.use_wikipedia(config, 'Qwen2.5-3B-Instruct', 'wiki18_e5')
    # The paper prints every iteration.
    config.checkpoint.iterations = True
    config.schedule.repeat_documents = True  # appendix A
    config.eval.every = config.solver.steps
    config.tools.syntax = 'qwen'  # figure 5; appendix A
    config.rollout.update(
        prompt_tokens=768, turn_tokens=256, observation_tokens=512, max_turns=5
    )  # turns: tables 5, 6
    config.sampler.update(context=4096, chunk=256)  # table 5: 768 + 5 · 256 + 4 · 512 = 4096
    config.micro.tokens = 4096
    return config


def _mini(config):
    """Shrinks the run to three steps of each role."""
    config.schedule.iterations = 1
    for role in (config.proposer, config.solver):
        role.update(steps=3, warmup_steps=0, learning_rate=1e-4)
    config.proposer.batch = 16  # the smallest with two documents for every hop count
    config.solver.batch = 8
    config.pool.update(batch=8, samples=2)
    common.shrink(config)
    return config
