"""The pages have the figures of the stored rows; benchmarks of speed and of a game, and arms of claims, still run."""

import csv
import dataclasses
import json

import numpy as np
import pytest
from python_process import ROOT

from benchmarks import claims, claims_runs, gpu_run
from benchmarks import rollout as bench
from benchmarks.command import RESULTS
from benchmarks.game import __main__ as game
from benchmarks.peers import workload
from zeroplay_jax.configuration import fields, rules
from zeroplay_jax.evaluation.statistics import difference, interval_text

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
    for run in ('plain', 'repeatable', 'killed'):
        steps = [row for row in cells if row['run'] == run]
        phases = ['evaluation', 'proposer', 'proposer', 'generate', 'solver', 'evaluation']
        assert [row['phase'] for row in steps] == phases
        assert float(steps[2]['tokens/s']) > 0 < float(steps[2]['trained tokens/s'])
    shown = json.loads(figures)
    assert 2 <= shown.pop('killed after steps') < len(phases)
    # 0.9 million weights, with moments and slots.
    assert 0.01 < shown.pop('planned_gib') < 1
    steps = len(phases)
    equal = {'equal steps': steps, 'equal steps without the flag': steps, 'differences': []}
    assert shown == equal
    log = (tmp_path / 'runs' / 'killed.0.log').read_text()
    assert 'resumes at step' in log


def stored(name):
    """The rows of a stored table, below two lines that say how the runs were made."""
    lines = (RESULTS / name).read_text().splitlines()[2:]
    return list(csv.DictReader(lines, delimiter='\t'))


def page(name):
    return (ROOT / name).read_text().replace('**', '')


def cells(rows, columns):
    """Cells of a page: the scores of each row, of three and more their mean with the lowest and the highest."""
    texts = []
    for column in columns:
        scores = [float(row[column]) for row in rows]
        if len(scores) < 3:
            texts.append(', '.join(f'{score:.2f}' for score in scores))
        else:
            texts.append(f'{np.mean(scores):.2f} [{min(scores):.2f}, {max(scores):.2f}]')
    return ' | '.join(texts)


def hops(first, last, before=''):
    return [f'{before}{number} hops' for number in range(first, last + 1)]


def by(rows, name):
    groups = {}
    for row in rows:
        groups.setdefault(row[name], []).append(row)
    return groups


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
    arms = by(stored('hops.tsv'), 'arm')
    for rows in arms.values():
        assert f'| {cells(rows, hops(3, 4))} |' in page('docs/results.md')

    def means(arm):
        texts = []
        for column in hops(3, 4):
            texts.append(f'{np.mean([float(row[column]) for row in arms[arm]]):.2f}')
        return ' | '.join(texts)

    for row in (
        f'| before | {means("start")} |',
        f'| after self-play (mean of 5 seeds) | {means("quickstart")} |',
        f'| after self-play with twice the steps (mean of 5 seeds) | {means("selfplay")} |',
        f'| after random rewards, twice the steps (2 seeds) | {cells(arms["random"], hops(3, 4))} |',
        f'(mean of 3 seeds) | {means("supervised_same")} |',
    ):
        assert row in page('README.md')


def test_the_page_has_the_figures_of_other_starts_and_of_fresh_questions():
    results = page('docs/results.md')
    for variant, rows in by(stored('starts.tsv'), 'variant').items():
        arms = by(rows, 'arm')
        played = arms['selfplay']
        # The start is one policy, whatever is trained from it.
        start, after = cells(played[:1], hops(3, 4, 'start ')), cells(played, hops(3, 4, 'after '))
        name, proposals = variant or 'of the package', played[0]['long proposals']
        assert f'| {name} | {start} | {proposals} | {after} |' in results
        if variant == 'parts last':
            assert f'| start | {cells(played[:1], hops(3, 6, "start "))} |' in results
            for of_arm in arms.values():
                assert f'| {cells(of_arm, hops(3, 6, "after "))} |' in results
    runs = {}
    for row in stored('fresh.tsv'):
        runs.setdefault(row['policy'].rpartition('-')[0], []).append(row)
    for rows in runs.values():
        assert f'| {cells(rows, hops(3, 6))} |' in results


def test_the_page_says_what_credit_per_turn_has_shown():
    arms = by(stored('turn_credit.tsv'), 'arm')
    by_outcome, by_turn = (
        [float(row['3 and 4']) for row in arms[f'{name}_credit']] for name in ('outcome', 'turn')
    )
    gain = difference([0.0], np.subtract(by_turn, by_outcome))
    assert interval_text(gain, sign='+') in page('examples/turn_credit/README.md')


def test_the_stored_table_of_claims_is_that_of_the_stored_runs(tmp_path):
    (tmp_path / 'runs').symlink_to(RESULTS / 'runs')
    claims.main(['--minutes', '0', '--out', str(tmp_path)])
    for name in ('claims.json', 'claims.md'):
        assert (tmp_path / name).read_text() == (RESULTS / name).read_text()


@pytest.mark.parametrize('claim', claims.CLAIMS + claims.ABLATIONS, ids=lambda claim: claim.text)
def test_arms_of_a_claim_differ_in_what_it_names_and_in_nothing_else(claim):
    configs = []
    for arm in filter(None, (claim.better, claim.worse)):
        config = claims_runs.config_of(arm, seed=0)
        if claims_runs.ARMS[arm].is_playable:
            rules.check(config)
        configs.append(fields.leaves(config))
    # A field that only one recipe has belongs to the difference of the recipes.
    common = configs[0].keys() & configs[-1].keys()
    differing = {name for name in common if configs[0][name] != configs[-1][name]}
    assert differing == set(claim.differs)
