"""The papers' claims in miniature: what is registered, equal arms, looks, runs and the committed table."""

import concurrent.futures
import json
import tomllib

import numpy as np
import pytest
from python_process import ROOT, config_flags
from refused_calls import check_table

from benchmarks import claims, claims_runs
from benchmarks import claims_statistics as statistics
from zeroplay_jax.configs import ablations
from zeroplay_jax.configuration import fields, rules
from zeroplay_jax.run import loop

pytestmark = pytest.mark.results

HISTORY = tomllib.loads(claims_runs.REGISTRATION.read_text())['history']
(THE_FILTER,) = [claim for claim in claims.CLAIMS if claim.text == 'the filter helps']

# ---- what is registered ----


PLAYABLE = [name for name, arm in claims_runs.ARMS.items() if arm.is_playable]


def test_only_arms_of_ssp_start_from_what_has_left():
    assert {arm.system for arm in claims_runs.ARMS.values() if not arm.is_playable} == {'ssp'}
    assert set(claims_runs.ARMS) >= set(PLAYABLE) > {'drzero', 'piplay', 'dspo', 'scope'}


@pytest.mark.parametrize('arm', PLAYABLE)
def test_every_arm_of_the_claims_is_a_sound_config(arm):
    rules.check(claims_runs.config_of(arm, 0))
    row = claims_runs.ARMS[arm].row
    assert not row or f'{claims_runs.ARMS[arm].system}/{row}' in ablations.ROWS


def test_every_claim_has_arms_a_measure_and_a_reason():
    compared = claims.CLAIMS + claims.ABLATIONS
    named = {arm for claim in compared for arm in (claim.better, claim.worse) if arm}
    assert named == set(claims_runs.ARMS)
    assert set(claims.MEASURES) == set(statistics.MEASURES)
    for claim in claims.CLAIMS:
        assert claim.measure in claims.MEASURES and claim.reason, claim.text
        assert (claim.measure == 'gain') == (not claim.worse), claim.text
        assert not claim.registered or claim.registered in claim.measures, claim.text
        # The rule of the page: another measure than the value at the end only for speed, cost and stability.
        about = claims.MEASURES[claim.measure]['reason']
        assert claim.measure in ('final', 'gain', 'first_iteration') or 'claim is about' in about
        assert claim.of == 'exact_match' or claim.system == 'scope', claim.text
    assert len({(claim.system, claim.text) for claim in claims.CLAIMS}) == len(claims.CLAIMS)
    for system in {claim.system for claim in claims.CLAIMS}:
        played = [len(claim.earlier) for claim in claims.CLAIMS if claim.system == system]
        described = [play for play in HISTORY['plays'] if play['system'] == system]
        assert len(described) == max(played)
    assert all(measure['text'] and measure['reason'] for measure in claims.MEASURES.values())


@pytest.mark.parametrize(
    'claim', claims.CLAIMS + claims.ABLATIONS, ids=lambda claim: f'{claim.system}: {claim.text}'
)
def test_arms_differ_in_what_the_claim_names_and_in_nothing_else(claim):
    if not claim.worse:
        assert not claim.differs
        return
    better, worse = (
        fields.leaves(claims_runs.config_of(arm, seed=0)) for arm in (claim.better, claim.worse)
    )
    # A field that only one recipe has belongs to the difference of the recipes.
    common = better.keys() & worse.keys()
    assert {name for name in common if better[name] != worse[name]} == set(claim.differs)


# ---- looks ----


def test_looks_are_combined_so_that_interval_and_verdict_agree(tmp_path):
    def combined(p_values, intervals, plays=1):
        """(p times the share of the first look, interval, upper limit, verdict)."""
        results, shares = [], [look.share / plays for look in claims_runs.LOOKS]
        for p, interval in zip(p_values, intervals, strict=True):
            results.append(dict(p=p, interval=interval, upper=interval[1] - 0.01))
        row = statistics.combine_looks(results, shares[: len(results)])
        p = row['p'] * claims_runs.LOOKS[0].share
        return f'{p:.3f}', row['interval'], round(row['upper'], 2), row['verdict']

    path = ROOT / 'tests' / 'golden' / 'claim_looks.txt'
    check_table(path, {'combined': combined}, tmp_path)


@pytest.mark.parametrize(('difference', 'last_look'), [(0.04, -1), (0.0, 0)])
def test_a_claim_is_closed_when_its_upper_limit_is_below_the_margin(difference, last_look):
    class Narrow(FakeRunner):
        @staticmethod
        def result(arm, seed):
            # Seeds differ by ± .04, and the upper limit is about .04 above the mean.
            swing = 0.04 if seed % 2 else -0.04
            rate = 0.5 + (arm == 'dspo') * (difference + swing)
            points = [[0, 0, [0.0] * 4], [8, 400, [rate] * 4]]
            return {'curve': points, 'code': 'c'}

    (row,) = claims.play([THE_FILTER], Narrow(), claims_runs.LOOKS)
    assert row['seeds'] == claims_runs.LOOKS[last_look].seeds
    assert (shown(row) == 'less') == (not difference)


def shown(row, measure=''):
    """The verdict of a row, by the measure that leads or by another one."""
    return claims.kind(row['measures'][measure or row['measure']], row['margin'])


class FakeRunner:
    """Results by arm: the filter helps always, the sequence ratio from a later look on."""

    def __init__(self, budget=10**9, stored=()):
        self.runs, self.budget, self.stored_runs = [], budget, stored

    def stored(self, runs):
        return {run: self.result(*run) for run in runs if run in self.stored_runs}

    def run(self, runs):
        self.runs.append(runs)
        return {run: self.result(*run) for run in runs[: self.budget]}

    @staticmethod
    def result(arm, seed):
        rng = np.random.default_rng([seed, *arm.encode()])
        rate = {'dspo no filter': 0.2, 'dspo token level': 0.56}.get(arm, 0.7)
        correct = rng.random(200) < np.clip(rate + 0.12 * rng.normal(), 0, 1)
        zeros = [0] * 200
        return {'curve': [[0, 0, zeros], [8, 400, correct.astype(int).tolist()]], 'code': 'c'}


def test_only_open_claims_get_more_seeds(capsys):
    chosen = [c for c in claims.CLAIMS if c.system == 'dspo' and c.measure == 'final']
    runner = FakeRunner()
    table = claims.play(chosen, runner, claims_runs.LOOKS)
    by_claim = {row['claim']: row for row in table}
    decided = by_claim[THE_FILTER.text]
    assert (decided['seeds'], shown(decided)) == (8, 'holds')
    assert {arm for arm, _ in runner.runs[0]} == {c for x in chosen for c in (x.better, x.worse)}
    assert 'dspo no filter' not in {arm for arm, _ in runner.runs[1]}
    grpo = by_claim['beats GRPO']
    assert shown(grpo) == 'less' or grpo['seeds'] == claims_runs.LOOKS[-1].seeds
    for row in table:
        for result in row['measures'].values():
            low, high = result['interval']
            assert (result['verdict'] != 'open') == (low > 0 or high < 0)
    assert 'look 2: ' in capsys.readouterr().err


def test_an_interrupted_look_does_not_count():
    assert claims.play([THE_FILTER], FakeRunner(budget=15), claims_runs.LOOKS[:1]) == []
    (row,) = claims.play([THE_FILTER], FakeRunner(budget=16), claims_runs.LOOKS)
    assert row['seeds'] == 8 and row['codes'] == ['c'] and row['rollouts'] == [400, 400]
    # Both arms have as many rollouts.
    assert set(row['measures']) == {'final', 'area'}
    # Claims of other systems are corrected for.
    final = row['measures']['final']
    assert final['p_holm'] == pytest.approx(len(claims.CLAIMS) * final['p'], rel=0.01)


# ---- runs and the committed table ----


SHRUNK = """
    world.train=(0,1) world.evaluation=(0,1) schedule.iterations=1 solver.steps=1 solver.batch=2 solver.samples=2
    solver.minibatches=1 eval.questions=2
"""


def test_an_arm_runs_once_and_is_stored(monkeypatch, tmp_path):
    whole = claims_runs.config_of

    def shrunk(arm, seed):
        config = whole(arm, seed)
        fields.set_fields(config, config_flags(SHRUNK))
        return config

    monkeypatch.setattr(claims_runs, 'config_of', shrunk)

    def run_arm():
        with claims_runs.Runner(tmp_path, claims_runs.run_arm, 1) as runner:
            # In this process.
            runner._pool = Inline()
            return runner.run([('dspo', 0)])['dspo', 0]

    first = run_arm()
    assert first['curve'][0][0] == 0 and len(first['curve'][0][2]) == 8
    assert first['curve'][-1][1] > 0, 'rollouts are counted'
    assert first['code'] == claims_runs.code_hash()
    monkeypatch.setattr(loop, 'run', None)  # a second run would fail
    assert run_arm() == first
    assert json.loads(next(tmp_path.iterdir()).read_text()) == first


class Inline:
    """In place of a pool of processes."""

    def submit(self, function, *arguments):
        future = concurrent.futures.Future()
        future.set_result(function(*arguments))
        return future

    def shutdown(self, **_):
        pass


TABLE = json.loads((claims.RESULTS / 'claims.json').read_text())['claims']


def test_a_note_says_where_the_measures_disagree():
    notes = {(claim.system, claim.text): claim.note for claim in claims.CLAIMS}
    for row in TABLE:
        kinds = {shown(row, measure).strip('()') for measure in row['measures']}
        # Decided, with or without correction, by one measure and not by another.
        is_split = len(kinds) > 1 and kinds != {'less', 'open'}
        assert notes[row['system'], row['claim']] or not is_split, row['claim']


def test_the_committed_table_is_that_of_the_committed_runs(tmp_path):
    (tmp_path / 'runs').symlink_to(claims.RESULTS / 'runs')
    claims.main(['--minutes', '0', '--out', str(tmp_path)])
    for name in ('claims.json', 'claims.md'):
        assert (tmp_path / name).read_text() == (claims.RESULTS / name).read_text()
