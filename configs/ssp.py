"""SSP with the hyperparameters of its paper, for Qwen2.5-7B-Instruct on a v5p-32 (four hosts of four chips).

    zeroplay inputs answers --sets nq_train.jsonl,hotpotqa_train.jsonl,arpo_train.parquet --most-words 1000 \\
        --out data/ssp_answers.jsonl
    launch/tpu_vm.sh --name ssp --zone us-east5-a --type v5p-32 --setup "$MOUNT" -- --config=configs/ssp.py \\
        --workdir=/mnt/share/runs/ssp --config.checkpoint.every=10 --policy=/mnt/share/Qwen2.5-7B-Instruct \\
        --index=/mnt/share/wiki18_e5 --config.judge.url=http://10.0.0.3:8001/v1 \\
        $(zeroplay plan --config=configs/ssp.py --machine=v5p-32)
    zeroplay train --config=configs/ssp.py:mini --workdir=runs/ssp_mini

The plan (zeroplay plan): 56.4 GiB of a chip's 95 in rollouts, 76.6 in updates; 4 h for 200 steps, simulated for
rollouts of 512 prompt, 768 written and 1,024 read tokens. The judge is a server elsewhere. It has not been run.
The paper: judged right 49.5 % on average over seven sets, 41.5 before (table 1). launch/README.md: MOUNT.

The first command builds the file of answers (`inputs.answers`) for the second, from the sets of appendix A.4
(arpo_train.parquet: the training set that ARPO released, arXiv:2507.19849); with --corpus instead of --sets it takes
them from a corpus. The third runs three steps on two CPU cores: every stage runs, almost nothing is learnt. Its
answers are those of the training worlds: external, and counted as such.

Where paper and released code differ, this config follows the paper: the solver's advantages are not divided by the
deviation and every answer weighs the same (eq. 4); the proposer's loss is a plain sum (eq. 5) without a KL term. Unlike
table 4 (mini-batches of 128 of 256), the proposer makes one update per batch, as the code does: its loss has no ratio.
The checker is the policy itself, as in algorithm 1; greedy is ours. The released code asks the server that also judges
(ssp.checker, rows ssp/code and ssp/judge_checker). Noise is single documents of other trajectories (section 4.4); the
code adds all documents of so many trajectories (rows ssp/code and ssp/noise_trajectories). Proposer and solver have
optimisers of their own; the code has one for both (shared_optimizer), and the paper says neither. Every evaluation of
the run also measures answers by the judge, as the paper does (eval.metric). Every value with its source:
docs/hyperparameters.md.
"""

from zeroplay_jax.configs import common


def get_config(variant=''):
    """Returns the config of the paper, or that of the variant 'mini' or 'small'; see above."""
    common.check_variant('ssp', variant)
    config = common.get_config('ssp')
    config.weights = 'shared'  # one policy plays both roles (section 3.1)
    config.schedule.update(iterations=1, hop_ratio=(4, 3, 2))  # ratio and order: inferred
    # Tables 3 and 4; single documents: section 4.4
    config.ssp.update(answerability_check=True, noise=4, noise_unit='document')
    config.ssp.update(fill='replay_reset', fill_period=10)  # tables 4 and 5; 10: appendix
    config.ssp.update(first_update='solver', invalid_reward=0.0)  # algorithm 1
    config.ssp.checker = 'policy'  # algorithm 1, line 4
    config.ssp.strict_format = True  # appendix A.2
    config.reward.update(answer='judge', difficulty='one_minus')  # section 4.1; eq. 7
    config.eval.metric = 'judge'  # section 4.1

    for role in (config.proposer, config.solver):
        role.update(
            learning_rate=1e-6, warmup_steps=5, batch=256, temperature=1.0, steps=200
        )  # table 4
    # Eq. 4; five samples: table 4
    config.solver.update(
        samples=5, baseline='mean', scale='none', loss='token_pg', aggregation='seq_mean_token_mean'
    )
    config.solver.update(kl_coef=0.01, minibatches=2)  # table 4: 256 by 128
    config.solver.update(
        kl_kind='k3', clip_low=0.2, clip_high=0.2
    )  # verl's defaults, as appendix A.1 says
    config.proposer.update(
        samples=1, baseline='none', scale='none', loss='reinforce'
    )  # table 4, eq. 5
    config.proposer.update(aggregation='seq_mean_token_sum', kl_coef=0.0, minibatches=1)  # eq. 5
    if variant == 'mini':
        return _mini(config)
    if variant == 'small':
        common.small(config)
        config.inputs.answers = 'own/answers.jsonl'
        # There is no server of a judge.
        config.reward.answer, config.eval.metric = 'em', 'none'
        return config

    common.use_wikipedia(config, 'Qwen2.5-7B-Instruct', 'wiki18_e5')
    config.inputs.answers = 'data/ssp_answers.jsonl'
    config.judge.update(
        kind='endpoint', model='Qwen2.5-32B-Instruct', temperature=0.0, tokens=512
    )  # section 4
    config.tools.syntax = 'search_r1'
    config.rollout.update(
        prompt_tokens=4096, turn_tokens=512, observation_tokens=512, max_turns=11
    )  # ten searches
    config.rollout.response_tokens = 8192  # table 4
    config.sampler.update(context=12288, chunk=512)  # table 4: 4096 prompt + 8192 response
    config.micro.update(tokens=12288, weights='published')
    return config


def _mini(config):
    """Shrinks the run to three steps."""
    for role in (config.proposer, config.solver):
        role.update(steps=3, warmup_steps=0, batch=16, learning_rate=1e-4)
    config.solver.samples = 3
    config.ssp.update(noise=2, strict_format=False)
    config.reward.answer = 'em'
    config.eval.metric = 'none'
    config.world.train = (0, 4)
    config.world.evaluation = (0, 2)
    common.shrink(config)
    return config
