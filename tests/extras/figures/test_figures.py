"""Named figures of the papers, drawn from small recorded runs and from a run of an earlier version."""

import pathlib
import xml.etree.ElementTree as ET

import pytest

from zeroplay_jax.extras import drawing, figures

RUNS = pathlib.Path(__file__).parents[2] / 'golden' / 'runs'
SVG = '{http://www.w3.org/2000/svg}'


def texts(path):
    return {node.text for node in ET.parse(path).getroot().iter(f'{SVG}text')}


@pytest.mark.parametrize('name', figures.figures())
def test_every_figure_is_drawn_from_a_recorded_run(name, tmp_path):
    """Of the system that its name begins with, or another one."""
    (run, *_) = [*(path for path in RUNS.iterdir() if name.startswith(path.name)), RUNS / 'drzero']
    out = tmp_path / 'figure.svg'
    assert figures.main([name, str(run), '--out', str(out)]) == 0
    assert (tmp_path / 'figure.png').read_bytes().startswith(b'\x89PNG')
    figure = figures.figures()[name]
    shown = ' '.join(filter(None, texts(out)))
    published = (f'paper: {label}' for label in figure.get('published', {}))
    expected = figure['title'], figure['y'], figure.get('x', drawing.STEPS), *published
    assert all(text in shown for text in expected)


def test_a_line_has_the_values_of_the_log(tmp_path):
    rows = [{'step': 0, 'iteration': 0, 'phase': 'evaluation', 'rubrics/mean': 0.1}]
    for step in range(1, 5):
        rows.append({'step': step, 'iteration': step // 3, 'phase': 'solver'})
        rows[-1] |= {'solver/score': step / 10, 'proposer/score': 0.9, 'solver/reward_mean': 0.0}
    # A role that is not trained is not drawn.
    rows.append({'step': 4, 'iteration': 1, 'phase': 'generate', 'solver/score': 9.0})
    rows.append({'step': 5, 'iteration': 1, 'phase': 'evaluation', 'rubrics/mean': 0.3})
    run = {'name': 'a', 'metrics': rows}
    figure = figures.figures()['scope3b']
    assert figure['metrics'] == ['solver/score'] and figure['x'] == 'iteration'
    lines = figures._lines_of_run(figure, run)
    assert lines == {'solver/score': ([1, 2], pytest.approx([0.15, 0.35]))}
    over_steps = {'metrics': ['solver/score', 'rubrics/mean']}
    lines = figures._lines_of_run(over_steps, run)
    assert lines['solver/score'] == ([1, 2, 3, 4], [0.1, 0.2, 0.3, 0.4])
    assert lines['rubrics/mean'] == ([0, 4], [0.1, 0.3])
