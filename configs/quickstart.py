"""Dr. Zero self-play in a miniature world: one proposer, one solver, real search, no external data.

    make quickstart WORKDIR=runs/quickstart SEED=0

runs python -m zeroplay_jax.main --config=configs/quickstart.py --workdir=runs/quickstart --config.seed=0

Made for two CPU cores without a GPU. Results: report.html and summary.json in the workdir.
"""

from zeroplay_jax.configs import common


def get_config():
    """Returns the defaults with the sizes of a run on two CPU cores."""
    config = common.get_config('drzero')
    # One device per core; on a GPU or TPU, those that it has.
    config.cpu_devices = 2
    config.mesh.replica = -1
    # Most of the cache is not in use.
    config.sampler.attention = 'used'

    config.schedule.iterations = 2

    config.proposer.learning_rate = 2e-4
    config.proposer.steps = 4
    config.proposer.batch = 32

    config.pool.update(batch=64, batches=5, samples=1)

    config.solver.learning_rate = 3e-4
    config.solver.steps = 18
    config.solver.batch = 32
    config.solver.samples = 5

    config.eval.every = 6
    config.checkpoint.every = 5
    return config
