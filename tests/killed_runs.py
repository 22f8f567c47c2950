"""Runs that end right after their first checkpoint, as if the process had been killed."""

import pytest

from zeroplay_jax.learner.checkpoint import Checkpointer
from zeroplay_jax.run import loop


class Killed(Exception):
    pass


def run_to_first_checkpoint(monkeypatch, config, workdir, source):
    """Runs until a checkpoint is on the disk; the run begins with the state of another one."""
    save = Checkpointer.save

    def save_and_kill(self, *args):
        save(self, *args)
        self.wait()
        raise Killed

    monkeypatch.setattr(Checkpointer, 'save', save_and_kill)
    with pytest.raises(Killed):
        loop.run(config, workdir, source)
