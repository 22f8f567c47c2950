"""A run that is killed ends with the bits of one that was not, whatever it keeps from step to step."""

import pytest
import run_library
from run_files import check_same_run, count_steps

from zeroplay_jax.learner.checkpoint import saved_steps
from zeroplay_jax.run import loop

# Each of the others has something that these have not.
LONG = ('drzero', 'ssp', 'cross')
NAMES = [
    pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in run_library.RUNS
]


@pytest.mark.parametrize('name', NAMES)
def test_a_killed_run_ends_with_the_same_bits(name, tmp_path, tmp_path_factory):
    whole = run_library.whole(name, tmp_path_factory)
    workdir = run_library.killed(name, tmp_path_factory, tmp_path / 'killed')
    # Its logs are ahead of its newest checkpoint, and it has not ended.
    assert max(saved_steps(workdir / 'checkpoints')) < count_steps(workdir) < count_steps(whole)
    loop.run(run_library.config_of(name, workdir), workdir)
    check_same_run(whole, workdir)
