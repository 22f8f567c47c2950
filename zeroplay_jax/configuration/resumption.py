"""Whether a workdir can be used for a config: a run is resumed only with the config that it was started with.

Needs no JAX, so that a workdir of another run is refused within a second.
"""

from __future__ import annotations

import pathlib

from ml_collections import ConfigDict

from zeroplay_jax.configuration import fields
from zeroplay_jax.retrieval import objects
from zeroplay_jax.runtime import remote_workdir
from zeroplay_jax.runtime import workdir as run_workdir
from zeroplay_jax.types import Json

# Fields that may change on resume: the result does not depend on them.
CHANGEABLE_FIELDS = (
    'progress',
    'stop_after_empty_steps',
    'log.samples_every',
    'log.writers',
    'log.project',
    'profile.steps',
    'checkpoint.every',
    'checkpoint.keep',
    'checkpoint.best',
    'bucket.spool',
    'bucket.seconds',
    'compilation.cache',
    'compilation.gigabytes',
    'offload',
    'distributed.mode',
    'distributed.coordinator',
    'distributed.processes',
    'distributed.process',
    'distributed.heartbeat',
)


def changeable_fields(config: ConfigDict) -> tuple[str, ...]:
    """Returns the fields that may change when a run of this config is resumed."""
    changeable = list(CHANGEABLE_FIELDS)
    # Levels of alarms.
    changeable += [name for name, _ in fields.leaves(config) if name.startswith('alarms.')]
    if config.rollout.deterministic:
        # The limit has no effect in a deterministic run, which has no deadlines.
        changeable.append('rollout.tool_timeout')
    return tuple(changeable)


def check(workdir: str | pathlib.Path, config: ConfigDict) -> None:
    """Refuses a workdir of another config; changes nothing.

    Raises:
      WorkdirError: one line.
    """
    arguments = (config.to_dict(), changeable_fields(config), defaults(config))
    if objects.is_address(workdir):
        remote_workdir.check(str(workdir), config.bucket.spool, *arguments)
    else:
        run_workdir.check(pathlib.Path(workdir), *arguments)


def defaults(config: ConfigDict) -> Json:
    """Returns the defaults of all fields, which a config.json of an earlier version may lack."""
    return fields.default_config(config.recipe).to_dict()
