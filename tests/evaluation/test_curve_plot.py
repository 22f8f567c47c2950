"""The SVG plot of a run shows the evaluations in summary.json."""

import json
import pathlib
import re
import xml.etree.ElementTree as ET

import pytest
import sample_run

from zeroplay_jax import report as command

ROOT = pathlib.Path(__file__).parents[2]
SVG = '{http://www.w3.org/2000/svg}'
HOPS = (1, 2, 3, 4)
QUESTIONS = 20


def flags(*correct_by_hop):
    """Returns {hops: 0/1 per question} with the given numbers of correct answers for 1, 2, ... hops."""
    by_hop = {}
    for hop, correct in zip(HOPS, correct_by_hop):
        by_hop[str(hop)] = [1] * correct + [0] * (QUESTIONS - correct)
    return by_hop


@pytest.fixture
def finished_run(tmp_path):
    folder = sample_run.write_run(tmp_path / 'a & <b> $x', count=4)
    summary = json.loads((folder / 'summary.json').read_text())
    summary['results']['evaluations'] = {
        '0': flags(5, 5, 5, 0),
        '10': flags(20, 10, 15, 5),
        '9': flags(10, 5, 0, 0),
    }
    (folder / 'summary.json').write_text(json.dumps(summary))
    return folder


def plot(folder, out):
    assert command.main([str(folder), '--picture', str(out)]) == 0
    return ET.parse(out).getroot()


def points(root, gid):
    """Returns the points of the path in the group with an id, in SVG coordinates."""
    (group,) = [node for node in root.iter(f'{SVG}g') if node.get('id') == gid]
    path = next(group.iter(f'{SVG}path')).get('d')
    use = group.find(f'.//{SVG}use')  # a filled area is defined once and placed by an offset
    offset = float(use.get('y')) if use is not None else 0.0
    return [(float(x), float(y) + offset) for x, y in re.findall(r'[ML] (\S+) (\S+)', path)]


def test_lines_are_the_evaluations_in_order_of_steps(finished_run, tmp_path, capsys):
    out = tmp_path / 'curve.svg'
    root = plot(finished_run, out)
    assert capsys.readouterr().out == f'{out}\n'
    # Hop count 4 is 0 at the first steps and 0.25 at the last, which gives the scale of the axis.
    hop4 = [y for _, y in points(root, 'hop4')]
    assert hop4[0] == hop4[1]
    height = (hop4[0] - hop4[2]) / 0.25

    mean = points(root, 'mean')
    xs = [x for x, _ in mean]
    assert (xs[1] - xs[0]) / (xs[2] - xs[0]) == pytest.approx(0.9)
    values = [(hop4[0] - y) / height for _, y in mean]
    assert values == pytest.approx([0.25, 0.25, 0.75], abs=1e-3)
    assert all(points(root, f'hop{hop}') for hop in HOPS)
    # The band contains the mean.
    band_ys = [y for _, y in points(root, 'band')]
    assert min(band_ys) < min(y for _, y in mean) and max(band_ys) > max(y for _, y in mean)


def test_text_is_text_and_the_legend_has_the_last_values_in_their_order(finished_run, tmp_path):
    root = plot(finished_run, tmp_path / 'curve.svg')
    texts = [node.text for node in root.iter(f'{SVG}text')]
    assert {'0', '9', '10'} <= set(texts)
    legend = ['1 hop 1.00', 'mean 0.75', '3 hops 0.75', '2 hops 0.50', '4 hops 0.25']
    assert [text for text in texts if text in legend] == legend
    assert any(text.startswith('a & <b> $x: ') for text in texts)


def test_equal_runs_give_equal_files(finished_run, tmp_path):
    plot(finished_run, tmp_path / 'first.svg')
    plot(finished_run, tmp_path / 'second.svg')
    first = (tmp_path / 'first.svg').read_bytes()
    assert first == (tmp_path / 'second.svg').read_bytes()
    assert b'<dc:date>' not in first


def test_unfinished_and_damaged_runs_are_user_errors(finished_run, tmp_path, capsys):
    arguments = [str(finished_run), '--picture', str(tmp_path / 'curve.svg')]
    summary_path = finished_run / 'summary.json'
    summary = json.loads(summary_path.read_text())
    damaged = 'is damaged; repeat the command of the run'
    for evaluations in ('[1]', '{"1": []}', '{"1": [[1]]}', '{"2": [1]}'):
        results = {'evaluations': {'0': {'1': [1]}, '9': json.loads(evaluations)}}
        summary_path.write_text(json.dumps(summary | {'results': results}))
        assert command.main(arguments) == 2
        assert f'"results" of summary.json {damaged}' in capsys.readouterr().err
    summary_path.unlink()
    assert command.main(arguments) == 2
    assert 'wait until the run has finished' in capsys.readouterr().err
    assert not (tmp_path / 'curve.svg').exists()
