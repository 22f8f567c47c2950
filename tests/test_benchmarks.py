"""The pages have the figures of the stored rows; benchmarks of speed and of a game still run."""

import csv
import dataclasses
import json

import numpy as np
import pytest
from python_process import ROOT

from benchmarks import gpu_run
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


GPU_RUN = """
    --machine=cpu:1 --config=configs/drzero.py:mini --config.eval.questions=1 --config.sampler.slots=8
    --config.world.train=(0,4) --config.world.evaluation=(0,2) --config.schedule.hop_ratio=(1,)
    --config.micro.rows=2 --config.stop_after_empty_steps=0 --config.proposer.steps=2 --config.proposer.batch=4
    --config.solver.steps=1 --config.solver.batch=4 --config.pool.batch=4
"""


@pytest.mark.long
def test_the_runs_for_a_gpu_show_on_a_cpu_that_a_seed_repeats_them(tmp_path, capsys):
    gpu_run.main([f'--out={tmp_path / "runs"}', *GPU_RUN.split()])
    columns, *rows, figures = capsys.readouterr().out.splitlines()
    cells = [dict(zip(columns.split('\t'), row.split('\t'), strict=True)) for row in rows]
    phases = ['evaluation', 'proposer', 'proposer', 'generate', 'solver', 'evaluation']
    for run in ('plain', 'repeatable', 'killed'):
        assert [row['phase'] for row in cells if row['run'] == run] == phases
    assert float(cells[2]['tokens/s']) > 0 < float(cells[2]['trained tokens/s'])
    shown = json.loads(figures)
    assert 2 <= shown.pop('killed after steps') < len(phases)
    # 0.9 million weights, with moments and slots.
    assert 0.01 < shown.pop('planned_gib') < 1
    # The memory of a CPU is not known.
    assert shown.pop('most_gib') is None and shown.pop('killed')
    assert shown.pop('finished') == ['plain', 'repeatable', 'killed']
    steps = len(phases)
    equal = {'equal steps': steps, 'equal steps without the flag': steps, 'differences': []}
    assert shown == equal
    log = (tmp_path / 'runs' / 'killed.0.log').read_text()
    assert 'resumes at step' in log


def stored(name):
    """The rows of a stored table, below two lines that say how the runs were made."""
    lines = (RESULTS / name).read_text().splitlines()[2:]
    return list(csv.DictReader(lines, delimiter='\t'))


def test_the_expected_reward_of_a_difficulty_is_its_polynomial():
    right = game.CHANCES
    wrong = 1 - right
    # E[n − k; 0 < k < n] / (n − 1); 4 E[k (n − k)] / n²; and of ten, 1 − 2 E|k/10 − ½| at one half.
    linear = 5 / 4 * (wrong - wrong**5)
    polynomials = {
        'drzero': linear,
        'piplay': linear,
        'drzero/parabolic': 4 * 4 / 5 * right * wrong,
        'drzero/sqlm': 1 - right**5 - wrong**5,
        'ssp': wrong,
    }
    for proposer, wanted in polynomials.items():
        reward = game.paper_config(proposer).reward
        np.testing.assert_allclose(game.expected_rewards(reward, right), wanted, atol=1e-12)
    for proposer, wanted in {'scope': 1 - 70 / 2**8, 'drzero/r_zero': 1 - 252 / 2**10}.items():
        rewards = game.expected_rewards(game.paper_config(proposer).reward, right)
        assert rewards.max() == rewards[10] == pytest.approx(wanted)


def test_every_proposer_chooses_what_pays_most():
    # 5 (1 − p)⁴ = 1 where the linear reward is highest.
    best = {'Dr. Zero, π-Play': 1 - 5**-0.25, 'SSP': 0.0}
    rows = stored('game.tsv')
    assert {row['proposer'] for row in rows} == set(game.PROPOSERS.values())
    for row in rows:
        wanted = best.get(row['proposer'], 0.5)
        assert float(row['best chance']) == pytest.approx(wanted, abs=1e-3)
        # Of single choices: the mean chance of a uniform choice is the best one of most rewards.
        assert float(row['last distance']) < 0.05 < 0.15 < float(row['first distance'])


def test_the_engine_plays_the_game(tmp_path, monkeypatch):
    monkeypatch.setattr(game, 'STEPS', 2)
    monkeypatch.setattr(game, 'BATCH', 16)
    shares = game.play('scope', 0, tmp_path)
    assert shares.shape == (2, 21)
    assert shares.sum(1) == pytest.approx(1)
    of_both = [game.game_config(name, tmp_path, 0).to_dict() for name in ('drzero', 'piplay')]
    assert of_both[0] == of_both[1]


def test_the_pages_have_the_figures_of_self_play_and_its_controls():
    arms = {}
    for row in stored('hops.tsv'):
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
