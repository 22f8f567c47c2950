"""A cross of three papers by configuration alone: HRPO proposer (Dr. Zero), sequence-level solver with dynamic filter
(DSPO), and distillation from a teacher that sees the construction path (π-Play).

    zeroplay train --config=configs/cross.py:mini --workdir=runs/cross_mini

No paper reports this combination; it shows how to make one. Without `:mini` it has Dr. Zero's sizes and was never run.
"""

from zeroplay_jax.configs import piplay


def get_config(variant=''):
    """Returns the combination with Dr. Zero's sizes, or with the variant 'mini' that of a miniature run."""
    if variant not in ('', 'mini'):
        raise ValueError(
            f'no variant {variant!r}; there is configs/cross.py and configs/cross.py:mini'
        )
    config = piplay.get_config(variant)
    config.drzero.group = 'hop'
    config.solver.update(
        loss='sequence_pg', aggregation='seq_mean_token_mean', filter_groups=True, surplus='carry'
    )
    config.solver.update(clip_low=3e-4, clip_high=4e-4, minibatches=4 if variant else 8)
    return config
