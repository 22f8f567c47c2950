"""The picture of a run: what it draws is what summary.json says."""

import json
import pathlib
import re
import xml.etree.ElementTree as ET

import pytest
import sample_run

from zeroplay_jax import report as command

ROOT = pathlib.Path(__file__).parents[2]
NAME = '{http://www.w3.org/2000/svg}'


@pytest.fixture
def ended(tmp_path):
    folder = sample_run.write_run(tmp_path / 'a & <b>', count=4)
    summary = json.loads((folder / 'summary.json').read_text())
    flags = lambda *ones: {str(hop): [1] * n + [0] * (20 - n) for hop, n in zip((1, 2, 3, 4), ones)}
    summary['results']['evaluations'] = {
        '0': flags(5, 5, 5, 0),
        '10': flags(20, 10, 15, 5),
        '9': flags(10, 5, 0, 0),
    }
    (folder / 'summary.json').write_text(json.dumps(summary))
    return folder


def test_lines_go_through_the_evaluations_in_order_of_steps(ended, tmp_path, capsys):
    out = tmp_path / 'curve.svg'
    assert command.main([str(ended), '--picture', str(out)]) == 0
    assert capsys.readouterr().out == f'{out}\n'
    root = ET.parse(out).getroot()
    *hops, mean = [
        [tuple(map(float, pair.split(','))) for pair in line.get('points').split()]
        for line in root.iter(f'{NAME}polyline')
    ]
    assert len(hops) == 4 and [x for x, _ in mean] == sorted(x for x, _ in mean)
    grid = [float(re.search(r'M\S+ (\S+)H', path.get('d'))[1]) for path in root.iter(f'{NAME}path')]
    value = lambda y: (grid[0] - y) / (grid[0] - grid[-1])
    assert [value(y) for _, y in mean] == pytest.approx([0.25, 0.25, 0.75], abs=1e-3)
    assert [value(y) for _, y in hops[3]] == pytest.approx([0, 0, 0.25], abs=1e-3)
    words = [text.text for text in root.iter(f'{NAME}text')]
    assert {'0', '9', '10', 'mean 0.75', '1 hop 1.00', '2 hops 0.50', '4 hops 0.25'} <= set(words)
    assert words[0].startswith('a & <b>: ')
    # the band holds the mean
    band = root.find(f'{NAME}polygon').get('points').split()
    heights = [float(pair.split(',')[1]) for pair in band]
    assert all(high <= y <= low for high, low, (_, y) in zip(heights[:3], heights[:2:-1], mean))
    labels = [
        float(text.get('y'))
        for text in root.iter(f'{NAME}text')
        if 'hop' in text.text and ':' not in text.text
    ]
    assert min(b - a for a, b in zip(sorted(labels), sorted(labels)[1:])) >= 13


def test_its_text_can_be_read_on_white_and_on_black(ended, tmp_path):
    command.main([str(ended), '--picture', str(tmp_path / 'curve.svg')])
    (ink,) = {
        text.get('fill') for text in ET.parse(tmp_path / 'curve.svg').getroot().iter(f'{NAME}text')
    }
    parts = [int(ink[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    light = sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))
    assert 1.05 / (light + 0.05) >= 4.5 and (light + 0.05) / 0.05 >= 4.5  # the contrast of WCAG
    shipped = (ROOT / 'benchmarks/results/quickstart.svg').read_text()
    assert set(re.findall(r'<text [^>]*fill="(\S+)"', shipped)) == {ink}


def test_a_run_that_has_not_ended_and_a_missing_folder_are_told(ended, tmp_path, capsys):
    assert command.main([str(ended), '--picture', str(tmp_path / 'no' / 'curve.svg')]) == 2
    assert 'make it first' in capsys.readouterr().err
    summary = json.loads((ended / 'summary.json').read_text())
    for damaged in (
        [1],
        {'evaluations': {'0': [1], '9': [1]}},
        {'evaluations': {'0': {'1': []}, '9': {'1': []}}},
    ):
        (ended / 'summary.json').write_text(json.dumps(summary | {'results': damaged}))
        assert command.main([str(ended), '--picture', str(tmp_path / 'curve.svg')]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert '"results" of summary.json is damaged; give the command of the run again' in line
    (ended / 'summary.json').unlink()
    assert command.main([str(ended), '--picture', str(tmp_path / 'curve.svg')]) == 2
    assert (
        'let the run end first' in capsys.readouterr().err and not (tmp_path / 'curve.svg').exists()
    )
