"""Config fields of what a run logs and traces; `schema.Run` has them as sections."""

from __future__ import annotations

from typing import Annotated, Literal

from zeroplay_jax.settings.bounds import NonNegativeInt, Section, requires

WRITERS = ('tensorboard', 'wandb', 'mlflow')


class Log(Section):
    """What a run prints on the terminal beside its progress bar, and where its metrics go."""

    samples_every: NonNegativeInt = 10
    """Steps between two printed rollouts (question, searches, answer, reward); 0: none."""
    writers: tuple[Literal['tensorboard', 'wandb', 'mlflow'], ...] = ('tensorboard',)
    """Where metrics go beside metrics.jsonl: tensorboard, wandb (Weights & Biases), mlflow. The last two have to be
    installed (pip install wandb, mlflow) and are set up by their own environment variables, such as WANDB_MODE=offline
    and MLFLOW_TRACKING_URI."""
    project: Annotated[str, requires(bool, 'give the name of a project')] = 'zeroplay_jax'
    """wandb, mlflow: project or experiment; the run is named after its workdir."""


class Profile(Section):
    """Traces of jax.profiler, in the folder profile/ of the workdir
    ([where the time goes](tpu-gpu.md#where-the-time-goes))."""

    steps: Annotated[
        tuple[int, ...],
        requires(lambda x: all(step >= 0 for step in x), 'give numbers of steps, such as (2, 3)'),
    ] = ()
    """Numbers of the steps that are traced; a step that compiles programs is not a typical one."""
