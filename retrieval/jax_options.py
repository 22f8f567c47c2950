"""Options of JAX, of the environment or of a notebook, that programs here cannot have."""

from __future__ import annotations

import jax

from .types import UserError

# Options of JAX that change dtypes, noise or products, with the values that runs have. What a run draws names its
# generator (rollout/slot_state.py), whatever the default one is.
_OPTIONS = {
    'jax_default_matmul_precision': None,
    'jax_enable_x64': False,
    'jax_numpy_dtype_promotion': 'standard',
    'jax_numpy_rank_promotion': 'allow',
    'jax_threefry_partitionable': True,
}


def check_options() -> None:
    """Refuses options of JAX with which a run or an index would have other numbers or none.

    Raises:
      UserError: one line.
    """
    for name, value in _OPTIONS.items():
        # Later versions of JAX lack some.
        current = getattr(jax.config, name, value)
        if current != value:
            raise UserError(
                f'{name}={current}: programs here are written for {value}; unset {name.upper()}, or call '
                f'jax.config.update({name!r}, {value!r})'
            )


def all_devices() -> list[jax.Device]:
    """Returns the devices of all processes.

    Raises:
      UserError: there is none, or as `check_options`.
    """
    check_options()
    try:
        return jax.devices()
    # JAX asserts that there is a device on platforms that it knows.
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f'JAX_PLATFORMS={jax.config.jax_platforms or ""}: JAX finds no such device; correct it or unset it'
        ) from error
