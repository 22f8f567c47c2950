"""The quickstart with questions of two facts and composed ones of three and four, some minutes on two CPU cores.

zeroplay train --config=examples/composing/config.py --workdir=runs/composing
"""

from zeroplay_jax.configs import quickstart


def get_config():
    """Four attempts per document: parts have to be confirmed, and answers need documents of their own."""
    config = quickstart.get_config()
    config.recipe = 'examples.composing.recipe'
    # The start asks for two facts as well as it has to.
    config.proposer.train_iterations = 0
    config.schedule.hop_ratio = (0, 1, 2, 2)
    config.pool.samples = 4
    # As the figures in docs/results.md.
    config.schedule.iterations = 2
    config.eval.update(every=12, hops=(1, 2, 3, 4, 5, 6))
    return config
