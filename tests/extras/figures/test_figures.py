"""Named figures of the papers, drawn from small recorded runs and from a run of an earlier version."""

import pathlib
import xml.etree.ElementTree as ET

import pytest

from zeroplay_jax.extras import drawing, figures

RUNS = pathlib.Path(__file__).parents[2] / 'golden' / 'runs'
SVG = '{http://www.w3.org/2000/svg}'
NAMES = [name for name in figures.figures()]


def run_for(name):
    """The recorded run of the system that a figure's name begins with."""
    names = [path for path in RUNS.iterdir() if name.startswith(path.name)]
    return names[0] if names else RUNS / 'drzero'


def texts(path):
    return {node.text for node in ET.parse(path).getroot().iter(f'{SVG}text')}


@pytest.mark.parametrize('name', NAMES)
def test_every_figure_is_drawn_from_a_recorded_run(name, tmp_path, capsys):
    out = tmp_path / 'figure.svg'
    assert figures.main([name, str(run_for(name)), '--out', str(out)]) == 0
    assert capsys.readouterr().out.split() == [str(out), str(tmp_path / 'figure.png')]
    assert (tmp_path / 'figure.png').read_bytes().startswith(b'\x89PNG')
    figure = figures.figures()[name]
    shown = texts(out)
    assert {figure['title'], figure['y'], figure.get('x', drawing.STEPS)} <= shown
    assert all(
        any(text.startswith(f'paper: {label}') for text in shown if text)
        for label in figure.get('published', {})
    )


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
    lines = figures._lines_of_run(figures.figures()['scope2'], run)
    assert lines == {'rubrics/mean': ([0, 2], [0.1, 0.3])}
    first = [rows[1] | {'step': 0}]
    lines = figures._lines_of_run(figure, {'metrics': first})
    assert lines == {'solver/score': ([1], [0.1])}
    over_steps = {'metrics': ['solver/score', 'rubrics/mean']}
    lines = figures._lines_of_run(over_steps, run)
    assert lines['solver/score'] == ([1, 2, 3, 4], [0.1, 0.2, 0.3, 0.4])
    assert lines['rubrics/mean'] == ([0, 4], [0.1, 0.3])
