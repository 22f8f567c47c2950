"""The pages have the figures of the stored rows; benchmarks of speed and of a game, and arms of claims, still run."""

import csv
import dataclasses

import numpy as np
import pytest
from python_process import ROOT

from benchmarks import claims
from benchmarks import rollout as bench
from benchmarks.command import RESULTS
from benchmarks.game import __main__ as game
from benchmarks.peers import workload

pytestmark = pytest.mark.results

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=64, layers=2, heads=4, kv_heads=2)


def test_the_benchmark_of_speed_measures_rollouts_and_updates():
    model = dataclasses.replace(bench.MODEL, **SIZES, head_dim=8)
    rollouts = workload.Rollouts('uneven', 512, ((), (20,), (30, 5, 150), (1, 99)))
    engine = bench.Engine(model, rollouts)
    engine.measure()
    # A further round reads the weights that the updates of the first one made.
    figures = engine.measure()
    assert set(figures) == {'generated_tokens_per_second', 'update_tokens_per_second'}
    assert all(value > 0 for value in figures.values())


def test_the_engine_plays_the_game(tmp_path, monkeypatch):
    monkeypatch.setattr(game, 'STEPS', 2)
    monkeypatch.setattr(game, 'BATCH', 16)
    shares = game.play('scope', 0, tmp_path)
    assert shares.shape == (2, 21)
    assert shares.sum(1) == pytest.approx(1)
    of_both = [game.game_config(name, tmp_path, 0).to_dict() for name in ('drzero', 'piplay')]
    assert of_both[0] == of_both[1]


def test_the_pages_have_the_figures_of_self_play_and_its_controls():
    lines = (RESULTS / 'hops.tsv').read_text().splitlines()[2:]
    arms = {}
    for row in csv.DictReader(lines, delimiter='\t'):
        arms.setdefault(row['arm'], []).append([float(row[f'{n} hops']) for n in (3, 4)])
    results, readme = (
        (ROOT / name).read_text().replace('**', '') for name in ('docs/results.md', 'README.md')
    )
    means = {}
    for arm, scores in arms.items():
        # Of three runs and more the page has their mean with the lowest and the highest.
        bounds = zip(np.mean(scores, 0), np.min(scores, 0), np.max(scores, 0))
        cells = ' | '.join(f'{mean:.2f} [{low:.2f}, {high:.2f}]' for mean, low, high in bounds)
        assert len(scores) < 3 or f'| {cells} |' in results
        means[arm] = ' | '.join(f'{mean:.2f}' for mean in np.mean(scores, 0))
    for row in (
        f'| before | {means["start"]} |',
        f'| after self-play (mean of 5 seeds) | {means["quickstart"]} |',
        f'| after self-play with twice the steps (mean of 5 seeds) | {means["selfplay"]} |',
        f'(mean of 3 seeds) | {means["supervised_same"]} |',
    ):
        assert row in readme


def test_the_stored_table_of_claims_is_that_of_the_stored_runs(tmp_path):
    (tmp_path / 'runs').symlink_to(RESULTS / 'runs')
    claims.main(['--minutes', '0', '--out', str(tmp_path)])
    for name in ('claims.json', 'claims.md'):
        assert (tmp_path / name).read_text() == (RESULTS / name).read_text()
