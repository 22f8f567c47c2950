"""Dr. Zero with the hyperparameters of its paper, for Qwen2.5-3B-Instruct.

    python -m zeroplay_jax.main --config=configs/drzero.py --workdir=runs/drzero
    python -m zeroplay_jax.main --config=configs/drzero.py:mini --workdir=runs/drzero_mini

The first is meant for an accelerator host that holds two 3B policies with their optimisers, and wants the Hugging
Face folder that `policy.path` names. It has not been run: nothing here is a measured result of ours. It searches an
index of Wikipedia that has to be built first (retrieval/README.md). The second plays the same game for three steps
per role with the built-in checkpoint, on two CPU cores: every stage runs, nothing is learnt.

Documents are drawn from the index anew in every step. With --config.inputs.documents=data/documents.jsonl they come
from a file instead, each once; so many are what the three iterations ask for:

    python -m zeroplay_jax.inputs documents --corpus wiki-18.jsonl --count 76800 --out data/documents.jsonl

Where paper and released code differ this page takes the paper, except for the loss: the clipped ratio of the code,
averaged over tokens. With one update per batch the ratio is 1; for the proposer that is the paper's gradient up to
a constant, for the solver it weighs long answers more than the paper's mean per answer. Ours is that every batch
holds the hops in exactly 4:3:2:1 (the code draws them), hence singleton='zero'.
"""

from configs import common


def get_config(variant=''):
    if variant not in ('', 'mini'):
        raise ValueError(f'no variant {variant!r}; there is configs/drzero.py and configs/drzero.py:mini')
    config = common.get_config()
    config.recipe = 'drzero'
    config.schedule.update(iterations=3, hop_ratio=(4, 3, 2, 1), group='hop')
    config.reward.update(solves=5, difficulty='linear', format_weight=0.5, grounding=False)

    for role in (config.proposer, config.solver):
        role.update(learning_rate=1e-6, weight_decay=0.01, beta1=0.9, beta2=0.999, clip_norm=1.0)
        role.update(steps=50, batch=256, temperature=1.0, minibatches=1, kl_coef=0.0)
        role.warmup_steps = int(0.03 * role.steps)  # the ratio of the paper, rounded as verl does
        role.update(baseline='mean', scale='std', std_ddof=1, singleton='zero')
        role.update(loss='token_pg', clip_low=0.2, clip_high=0.2, dual_clip=3.0, aggregation='token')
    config.proposer.samples = 1  # HRPO: one rollout per document, grouped by hops
    config.solver.samples = 5  # GRPO: five per question
    config.pool.update(batch=256, samples=5, question_words=50)
    if variant == 'mini':
        return _mini(config)

    config.policy.update(path='checkpoints/Qwen2.5-3B-Instruct', dtype='bfloat16', remat=True)
    config.retrieval.update(kind='folder', path='indexes/wiki18_e5')  # made by python -m retrieval.build
    config.eval.update(file='data/nq_test.jsonl', questions=500)
    config.mesh.fsdp = -1
    config.prompts = 'paper'
    config.tools.update(family='qwen', top_k=3)
    config.rollout.update(prompt_tokens=768, turn_tokens=256, observation_tokens=512, max_turns=5)
    config.sampler.update(slots=256, context=4096, chunk=256, burst=16)  # 768 + 5 · 256 + 4 · 512 = 4096
    config.micro.update(rows=8, tokens=4096)
    return config


def _mini(config):
    """Shrinks the run to three steps of each role."""
    config.schedule.iterations = 1
    for role in (config.proposer, config.solver):
        role.update(steps=3, warmup_steps=0, learning_rate=1e-4)
    config.proposer.batch = 16  # the smallest with two documents for every hop count
    config.solver.batch = 8
    config.pool.update(batch=8, samples=2)
    config.sampler.slots = 32
    config.eval.questions = 8
    return config
