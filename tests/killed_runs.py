"""Runs that end right after a checkpoint, as if the process had been killed, for tests that resume them."""

import pytest

from zeroplay_jax.learner.checkpoint import Checkpointer
from zeroplay_jax.run import loop


class Killed(Exception):
    pass


def run_until(step, monkeypatch, config, workdir, source=None):
    """Runs until the checkpoint of this step is on the disk; None: until the first one."""
    save = Checkpointer.save

    def save_and_kill(self, saved_step, *args):
        save(self, saved_step, *args)
        self.wait()
        if step in (None, saved_step):
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, 'save', save_and_kill)
        with pytest.raises(Killed):
            loop.run(config, workdir, source)
