"""The lines that a run prints, and the question that it says to ask."""

import pathlib

from refused_calls import check_table

from zeroplay_jax.run import ending, hooks
from zeroplay_jax.selfplay.schedule import Phase, Step


def test_the_lines():
    step = Step(Phase('evaluation', 1, iteration=1), 0, 30)

    def evaluated(step, **rewards):
        """Logged answers of the evaluation after so many steps."""
        rows = []
        for name, reward in rewards.items():
            info = {'question': f'{name}?'}
            rows.append({'phase': 'evaluation', 'step': step, 'reward': reward, 'info': info})
        return rows

    names = vars(hooks) | vars(ending) | {'EVALUATION': step, 'evaluated': evaluated}
    check_table(pathlib.Path(__file__).parent / 'terminal.txt', names)
