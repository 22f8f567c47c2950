"""The lines that a run prints."""

import pathlib

from refused_calls import check_table

from zeroplay_jax.run import hooks
from zeroplay_jax.selfplay.schedule import Phase, Step


def test_the_lines():
    step = Step(Phase('evaluation', 1, iteration=1), 0, 30)
    names = vars(hooks) | {'EVALUATION': step}
    check_table(pathlib.Path(__file__).parent / 'terminal.txt', names)
