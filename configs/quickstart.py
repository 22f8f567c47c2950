"""Dr. Zero self-play in a miniature world: one proposer, one solver, real search, no external data.

    make quickstart WORKDIR=runs/quickstart SEED=0

runs zeroplay train --config=configs/quickstart.py --workdir=runs/quickstart --config.seed=0

Made for two CPU cores without a GPU. Results: report.html and summary.json in the workdir.
"""

from zeroplay_jax.configs import common
from zeroplay_jax.settings.kinds import PARTS_CHECKPOINT


def get_config():
    """Returns the defaults with the sizes of a run on two CPU cores."""
    config = common.get_config('drzero')
    # One device per core; on a GPU or TPU, those that it has.
    config.cpu_devices = 2
    config.mesh.replica = -1
    config.prompts = 'numbered'
    config.policy.update(path=str(PARTS_CHECKPOINT), attention='blocked', logits='trained')
    # Six searches and what they return.
    config.rollout.max_turns = 8
    config.sampler.context = 1024
    config.micro.update(rows=4, tokens=1024)
    # Most of the cache is not in use.
    config.sampler.attention = 'used'

    # A second iteration adds .03 with three hops and .04 with four, and loses .07 with two (results/hops.tsv).
    config.schedule.iterations = 1
    # Longer chains than the start was shown; more than half of what comes back has two hops all the same.
    config.schedule.hop_ratio = (0, 0, 3, 1)

    config.proposer.update(learning_rate=2e-4, steps=4, batch=32)

    config.pool.update(batch=64, batches=5, samples=1)

    config.solver.update(learning_rate=6e-4, steps=12, batch=32, samples=5)

    # Worlds that only two trials used, before hop_ratio was changed once more.
    config.world.evaluation = (12, 12)
    config.eval.update(every=0, questions=60, hops=(1, 2, 3, 4))
    config.checkpoint.every = 5
    # Of the held-out questions twelve per hop count; as many of every step.
    config.log_trajectories = 48
    return config
