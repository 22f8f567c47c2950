"""The benchmarks run: small sizes here, because a benchmark that broke is found when it is needed."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from benchmarks import claims
from benchmarks import rollout as bench
from zeroplay_jax import config as configuration
from zeroplay_jax import train
from zeroplay_jax.policy import transformer


@pytest.fixture
def small(monkeypatch):
    model = dataclasses.replace(
        bench.MODEL,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
    )
    monkeypatch.setattr(bench, 'MODEL', model)
    monkeypatch.setattr(bench, 'matmul_rate', lambda: 1e12)
    return transformer.init(model, jax.random.key(0))


def test_rollouts_and_updates_of_the_speed_benchmark(small):
    scheduler, update = bench.make_scheduler(small), bench.make_update(small)
    figures = bench.measure(scheduler, update)
    assert set(figures) == {'rollout', 'train', 'bound', 'gflops'} and all(
        x > 0 for x in figures.values()
    )
    shares = bench.shares(scheduler)
    assert 0 < sum(shares.values()) <= 1.001


@pytest.mark.parametrize('arm', claims.ARMS)
def test_every_arm_of_the_claims_is_a_sound_config(arm):
    configuration.check(claims.config_of(arm, 0))


def test_claims_name_arms_that_exist():
    assert {a for c in claims.CLAIMS for a in (c.better, c.worse)} == set(claims.ARMS)


def runs(rates, questions=200):
    rng = np.random.default_rng(0)
    draw = lambda p: (rng.random(questions) < p).astype(int).tolist()
    return [{'curve': [[0, 0, draw(0.2)], [8, 500, draw(p)], [16, 1000, draw(p)]]} for p in rates]


def test_verdicts_of_claims():
    good, bad = runs([0.9, 0.92, 0.88]), runs([0.4, 0.42, 0.38])
    assert claims.judge(good, bad, 'final')['verdict'] == 'holds'
    assert claims.judge(bad, good, 'final')['verdict'] == 'does not hold'
    found = claims.judge(good, good, 'final')
    assert found['verdict'] == 'undecided' and found['difference'] == 0
    # The good arm is at the bad arm's last level at its first evaluation after training began.
    assert claims.judge(good, bad, 'steps')['difference'] >= 0
    falling = [{'curve': [[0, 0, [1] * 10], [8, 1000, [0] * 10]]}] * 3
    assert claims.judge(runs([0.9] * 3), falling, 'stability')['verdict'] == 'holds'


def test_arms_of_the_claims_are_compared_where_both_played_as_much():
    slow = [{'curve': [[0, 0, [0, 0]], [8, 100, [1, 0]]]}] * 3
    # Right on the second question too, but at 300 rollouts; at 100 it is half way to its first evaluation.
    dear = [{'curve': [[0, 0, [0, 0]], [4, 200, [1, 0]], [8, 300, [1, 1]]]}] * 3
    assert claims.judge(dear, slow, budget=False)['difference'] == 0.5
    assert claims.judge(dear, slow)['difference'] == -0.25
    falls_late = [{'curve': [[0, 0, [1, 1]], [4, 100, [1, 1]], [8, 300, [0, 0]]]}] * 3
    assert claims.judge(falls_late, slow, 'stability')['difference'] == 0
    met = lambda *scores: [{'curve': [[0, 0, [0], [0.0, 0.0]], [8, 100, [0], list(scores)]]}] * 3
    assert claims.judge(met(0.5, 1.0), met(0.5, 0.5), 'rubrics')['difference'] == 0.25


@pytest.mark.parametrize('spread', [0.0, 0.05, 0.15])
def test_arms_that_do_not_differ_seldom_get_a_verdict(spread):
    rng, wrong = np.random.default_rng(1), 0
    hard = rng.normal(size=200)
    for _ in range(300):
        sides = []
        for _side in range(2):
            rates = np.clip(0.5 + spread * rng.normal(size=3), 0, 1)
            flags = [
                (rng.random(200) < np.clip(rate + 0.2 * hard, 0, 1)).astype(int).tolist()
                for rate in rates
            ]
            sides.append([{'curve': [[0, 0, f], [8, 100, f]]} for f in flags])
        wrong += claims.judge(*sides)['verdict'] != 'undecided'
    assert wrong / 300 < 0.08  # 5 % and what 300 draws leave open


def test_more_seeds_are_asked_for_where_seeds_differ():
    found = claims.judge(runs([0.9, 0.5, 0.7]), runs([0.5, 0.6, 0.4]))
    assert (
        found['verdict'] == 'undecided'
        and found['seeds_needed'] > 10
        and len(found['by_seed']) == 3
    )
    assert claims.judge(runs([0.9] * 3, 40), runs([0.4] * 3, 40))['questions_needed'] > 40


def test_an_arm_is_played_once_and_kept(monkeypatch, tmp_path):
    whole = claims.config_of

    def shrunk(arm, seed):
        config = whole(arm, seed)
        config.world.update(train=(0, 1), evaluation=(0, 1))
        config.schedule.iterations = 1
        config.solver.update(steps=1, batch=2, samples=2, minibatches=1)
        config.proposer.update(steps=1, batch=16)
        config.pool.update(batch=4, batches=1)
        config.eval.update(questions=2)
        return config

    monkeypatch.setattr(claims, 'config_of', shrunk)
    first = claims.play('drzero', 0, tmp_path)
    assert first['curve'][0][0] == 0 and len(first['curve'][0][2]) == 8
    assert first['curve'][-1][1] > 0, 'rollouts are counted'
    monkeypatch.setattr(train, 'run', None)  # a second run would fail
    assert claims.play('drzero', 0, tmp_path) == first
    assert json.loads(next(tmp_path.iterdir()).read_text()) == first


def test_the_table_of_the_claims_is_what_was_found():
    found = json.loads((claims.RESULTS / 'claims.json').read_text())['claims']
    assert [(c['system'], c['claim']) for c in found] == [(c.system, c.text) for c in claims.CLAIMS]
    page = (claims.RESULTS.parent / 'README.md').read_text()
    for c in found:
        low, high = c['ci95']
        row = f'| {c["system"]} | {c["claim"]} | {c["verdict"]} | {c["difference"]:+.3f} | {low:+.3f} … {high:+.3f} |'
        assert row in page and c['seeds'] >= 3
    count = lambda verdict: sum(c['verdict'] == verdict for c in found)
    said = (
        f'of {len(found)}, {count("holds")} hold with three seeds, {count("does not hold")} do not'
    )
    assert said in (claims.RESULTS.parents[1] / 'README.md').read_text()
    kept = [json.loads(path.read_text()) for path in (claims.RESULTS / 'runs').glob('*.json')]
    assert {(run['arm'], run['seed']) for run in kept} >= {
        (arm, seed) for arm in claims.ARMS for seed in range(3)
    }
