"""The progress bar of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zeroplay_jax.retrieval import progress
from zeroplay_jax.selfplay.schedule import Step

# Episodes between two updates of their count: a terminal is slow, and episodes end in bursts.
_EPISODES_PER_UPDATE = 8
_SHOWN_METRICS = {'em/mean': 'EM', 'reward_mean': 'reward'}


class ProgressBar:
    """One line over all steps; silent where no terminal is attached."""

    def __init__(self, shown: bool, steps: Sequence[Step], cursor: int):
        self._bar = progress.bar(len(steps), 'steps', initial=cursor, shown=shown, leave=True)
        self._values: dict[str, str] = {}
        self._episodes = 0

    def begin_step(self, step: Step) -> None:
        """Shows phase, iteration and step."""
        position = ''
        if step.phase.name != 'evaluation':
            position = f' {step.phase.iteration + 1}.{step.index + 1}'
        self._bar.set_description_str(step.phase.name + position)
        self._episodes = 0

    def end_episode(self) -> None:
        """Counts an episode of the step."""
        self._episodes += 1
        if self._episodes % _EPISODES_PER_UPDATE == 0:
            self._show({'episodes': str(self._episodes)})

    def end_step(self, metrics: Mapping[str, float]) -> None:
        """Advances the bar and shows the main metrics."""
        self._bar.update()
        # An evaluation has no reward, a training step no exact match.
        values = {}
        for name, label in _SHOWN_METRICS.items():
            if name in metrics:
                values[label] = f'{metrics[name]:.2f}'
        self._show(values)

    def _show(self, values: Mapping[str, str]) -> None:
        # Values of earlier steps remain: an evaluation's result is shown until the next one.
        self._values |= values
        self._bar.set_postfix(self._values)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._bar.close()
