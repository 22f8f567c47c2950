"""The papers' claims in miniature: what is registered, equal arms, looks, runs and the committed table."""

import json
import sys

import numpy as np
import pytest
from python_process import ROOT, finish, start, start_python

from benchmarks import claims, claims_runs
from benchmarks import claims_statistics as statistics
from zeroplay_jax.configs import ablations
from zeroplay_jax.configuration import rules
from zeroplay_jax.training import loop

(THE_FILTER,) = [claim for claim in claims.CLAIMS if claim.text == 'the filter helps']

# ---- what is registered ----


@pytest.mark.parametrize('arm', claims_runs.ARMS)
def test_every_arm_of_the_claims_is_a_sound_config(arm):
    rules.check(claims_runs.config_of(arm, 0))
    row = claims_runs.ARMS[arm].row
    assert not row or f'{claims_runs.ARMS[arm].system}/{row}' in ablations.ROWS


def test_every_claim_has_arms_a_measure_and_a_reason():
    named = {arm for claim in claims.CLAIMS for arm in (claim.better, claim.worse) if arm}
    assert named == set(claims_runs.ARMS)
    assert set(claims.MEASURES) == set(statistics.MEASURES)
    for claim in claims.CLAIMS:
        assert claim.measure in claims.MEASURES and claim.reason, claim.text
        assert (claim.measure == 'gain') == (not claim.worse), claim.text
        assert claim.of == 'exact_match' or claim.system == 'scope', claim.text
    assert len({(claim.system, claim.text) for claim in claims.CLAIMS}) == len(claims.CLAIMS)
    assert all(measure['text'] and measure['reason'] for measure in claims.MEASURES.values())


@pytest.mark.parametrize('claim', claims.CLAIMS, ids=lambda claim: f'{claim.system}: {claim.text}')
def test_arms_differ_in_what_the_claim_names_and_in_nothing_else(claim):
    different = claims.arm_differences(claim.better, claim.worse)
    assert set(different) == set(claim.differs), different


def test_the_registration_is_printed_with_the_differences(capsys):
    claims.main(['--list', '--only', 'dspo'])
    printed = capsys.readouterr().out
    assert 'by worst_drop of exact_match: section 4.3' in printed
    assert 'solver.filter_groups: True against False' in printed and 'ssp' not in printed


def test_a_table_of_no_stored_runs_is_an_error(tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        claims.main(['--minutes', '0', '--looks', '1', '--out', str(tmp_path)])
    printed = capsys.readouterr().out
    assert error.value.code == 1 and f'too few runs in {tmp_path / "runs"}' in printed
    assert printed.endswith('{"claims": []}\n') and not (tmp_path / 'claims.json').exists()


def test_a_reader_of_the_registration_may_stop_early():
    command = f'{sys.executable} -m benchmarks.claims --list | head -n 1'
    out, err = finish(start(['bash', '-c', command]))
    assert out.startswith('look 1') and 'Error' not in err


# ---- looks ----


def test_looks_are_combined_so_that_interval_and_verdict_agree():
    row = dict(p=0.9, interval=[-0.1, 0.08])
    # The first look decides, although the mean of the second is below 0.
    claims._combine_looks(row, [0.01, 0.9], [[0.02, 0.3], [-0.1, 0.08]], plays=1)
    share = claims_runs.LOOKS[0].share
    assert row['interval'] == [0.02, 0.08] and row['p'] == 0.01 / share < 0.05
    assert row['verdict'] == 'holds' and not row['negligible']
    # Played three times, it would have had to be clearer.
    claims._combine_looks(row, [0.01], [[-0.01, 0.33]], plays=3)
    assert row['p'] == pytest.approx(0.03 / share) and row['verdict'] == 'undecided'
    claims._combine_looks(row, [0.3, 0.4], [[-0.06, 0.04], [-0.04, 0.06]], plays=1)
    assert row['negligible'] and row['verdict'] == 'undecided'
    claims._combine_looks(row, [0.01, 0.01], [[0.02, 0.3], [-0.1, -0.01]], plays=1)
    assert (row['p'], row['interval'], row['verdict']) == (1, [-0.1, 0.3], 'undecided')


@pytest.mark.parametrize(('difference', 'last_look'), [(0.08, -1), (0.0, 0)])
def test_a_narrow_interval_closes_a_claim_only_around_zero(difference, last_look):
    class Narrow(FakeRunner):
        @staticmethod
        def result(arm, seed):
            # The area is half of the value at the end. Seeds differ by ± .04, and the interval is about ± .045.
            swing = 0.08 if seed % 2 else -0.08
            rate = 0.5 + (arm == 'dspo') * (difference + swing)
            points = [[0, 0, [0.0] * 4], [8, 400, [rate] * 4]]
            return {'curve': points, 'code': 'c'}

    (row,) = claims.play([THE_FILTER], Narrow(), claims_runs.LOOKS)
    assert row['seeds'] == claims_runs.LOOKS[last_look].seeds
    assert row['negligible'] == (not difference)


class FakeRunner:
    """Results by arm: the filter helps always, the sequence ratio from the second look on."""

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
    chosen = [c for c in claims.CLAIMS if c.system == 'dspo' and c.measure == 'area']
    runner = FakeRunner()
    table = claims.play(chosen, runner, claims_runs.LOOKS)
    by_claim = {row['claim']: row for row in table}
    decided = by_claim[THE_FILTER.text]
    assert (decided['seeds'], decided['verdict_holm']) == (8, 'holds')
    assert {arm for arm, _ in runner.runs[0]} == {c for x in chosen for c in (x.better, x.worse)}
    assert 'dspo no filter' not in {arm for arm, _ in runner.runs[1]}
    grpo = by_claim['beats GRPO']
    assert grpo['verdict_holm'] == 'undecided'
    assert grpo['negligible'] or grpo['seeds'] == claims_runs.LOOKS[-1].seeds
    for row in table:
        low, high = row['interval']
        assert (row['verdict'] != 'undecided') == (low > 0 or high < 0)
    assert 'look 2: ' in capsys.readouterr().err


def test_an_interrupted_look_does_not_count():
    assert claims.play([THE_FILTER], FakeRunner(budget=15), claims_runs.LOOKS[:1]) == []
    (row,) = claims.play([THE_FILTER], FakeRunner(budget=16), claims_runs.LOOKS)
    assert row['seeds'] == 8 and row['codes'] == ['c'] and row['rollouts'] == [400, 400]
    assert set(row['beside']) == {'final', 'area_of_rollouts'}


def test_claims_of_other_systems_are_corrected_for_and_stay_in_the_table():
    # The claims of Dr. Zero have all their runs of the first look, one of SSP's lacks one.
    runs_of = lambda system: claims.runs_of([c for c in claims.CLAIMS if c.system == system], 8)
    *some, (missing_arm, _) = runs_of('ssp')
    runner = FakeRunner(stored=runs_of('drzero') + some)
    table = claims.play([THE_FILTER], runner, claims_runs.LOOKS, stored_claims=claims.CLAIMS)
    assert {arm for runs in runner.runs for arm, _ in runs} == {'dspo', 'dspo no filter'}
    registered = [(c.system, c.text) for c in claims.CLAIMS]
    rows = [(row['system'], row['claim']) for row in table]
    assert rows == sorted(rows, key=registered.index)
    assert {('drzero', c.text) for c in claims.CLAIMS if c.system == 'drzero'} <= set(rows)
    (incomplete,) = [c for c in claims.CLAIMS if c.worse == missing_arm]
    assert ('ssp', incomplete.text) not in rows
    without_results = [1.0] * (len(claims.CLAIMS) - len(table))
    corrected = statistics.holm([row['p'] for row in table] + without_results)
    assert [row['p_holm'] for row in table] == pytest.approx(corrected[: len(table)], rel=0.01)
    (alone,) = claims.play([THE_FILTER], FakeRunner(), claims_runs.LOOKS)
    (row,) = [row for row in table if row['claim'] == THE_FILTER.text]
    # The verdict of a claim does not depend on which others were executed first.
    assert row['p'] == alone['p'] < row['p_holm']
    assert alone['p_holm'] == pytest.approx(len(claims.CLAIMS) * row['p'], rel=0.01)


def test_the_forest_plot_shows_every_claim(tmp_path):
    rows = []
    for number, verdict in enumerate(claims.COLOURS):
        interval = [-0.1, 0.2] if number else [-0.9, 0.2]
        row = dict(system='ssp', claim=f'claim {number} $', verdict_holm=verdict, difference=0.1)
        row |= dict(selected=number == 1, afterwards=number == 2, added=number == 2)
        rows.append(row | dict(interval=interval))
    claims.write_forest_plot(rows, tmp_path / 'a.svg')
    svg = (tmp_path / 'a.svg').read_text()
    for number, mark in enumerate(['', ' §', ' † ‡']):
        assert f'ssp: claim {number} ${mark}<' in svg
    assert all(colour in svg for colour in claims.COLOURS.values())
    claims.write_forest_plot(rows, tmp_path / 'b.svg')
    assert (tmp_path / 'b.svg').read_text() == svg


# ---- runs and the committed table ----


@pytest.mark.parametrize('arm', ['drzero', 'ssp', 'scope'])
def test_results_from_a_checkpoint_that_was_trained_again_are_not_reused(
    monkeypatch, tmp_path, arm
):
    before = claims_runs.stored_path(arm, 0, tmp_path)
    monkeypatch.setattr(claims_runs, '_checkpoint_hashes', lambda folder: 'of other weights')
    assert claims_runs.stored_path(arm, 0, tmp_path) != before


@pytest.mark.long
def test_the_hash_of_the_code_covers_every_package_and_checkpoint():
    names = {str(path.relative_to(claims_runs.PACKAGE)) for path in claims_runs._package_files()}
    assert {'configs/ssp.py', 'retrieval/bm25.py', 'mini/open/base/model.safetensors'} <= names
    assert 'selfplay/judge.py' in names
    assert not any('__pycache__' in name for name in names)


PARENT = """
import concurrent.futures, multiprocessing, os, signal, time
from benchmarks import claims_runs

def start():
    claims_runs.threading.Thread(target=claims_runs._end_with_parent, daemon=True).start()
    # As the training loop does.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

if __name__ == '__main__':
    context = multiprocessing.get_context('spawn')
    pool = concurrent.futures.ProcessPoolExecutor(1, context, start)
    print(pool.submit(os.getpid).result(), flush=True)
    time.sleep(600)
"""


def test_processes_of_the_pool_end_with_their_parent(tmp_path):
    script = tmp_path / 'parent.py'
    script.write_text(PARENT)
    with start_python(script, PYTHONPATH=str(ROOT)) as parent:
        assert int(parent.stdout.readline()) != parent.pid
        parent.kill()
        # The worker has written to the same pipe, which ends when no process has it open.
        output, _ = parent.communicate(timeout=60)
    assert output == ''


def test_an_arm_runs_once_and_is_stored(monkeypatch, tmp_path):
    whole = claims_runs.config_of

    def shrunk(arm, seed):
        config = whole(arm, seed)
        config.world.update(train=(0, 1), evaluation=(0, 1))
        config.schedule.iterations = 1
        config.solver.update(steps=1, batch=2, samples=2, minibatches=1)
        config.proposer.update(steps=1, batch=16)
        config.pool.update(batch=4, batches=1)
        config.eval.update(questions=2)
        return config

    monkeypatch.setattr(claims_runs, 'config_of', shrunk)

    def run_arm():
        path = claims_runs.stored_path('drzero', 0, tmp_path)
        return claims_runs.stored_result(path, claims_runs.run_arm, 'drzero', 0)

    first = run_arm()
    assert first['curve'][0][0] == 0 and len(first['curve'][0][2]) == 8
    assert first['curve'][-1][1] > 0, 'rollouts are counted'
    assert first['code'] == claims_runs.code_hash()
    monkeypatch.setattr(loop, 'run', None)  # a second run would fail
    assert run_arm() == first
    assert json.loads(next(tmp_path.iterdir()).read_text()) == first
    monkeypatch.setattr(claims_runs, 'CODE', claims_runs.CODE + 1)
    with pytest.raises(TypeError):
        run_arm()


def test_the_pages_state_the_committed_table():
    table = json.loads((claims.RESULTS / 'claims.json').read_text())['claims']
    before = [row for row in table if not row['afterwards']]
    count = lambda verdict: sum(row['verdict'] == verdict for row in before)
    small = sum(claims.shown_verdict(row) == 'less than .05' for row in before)
    decided = count('holds') + count('does not hold')
    after_correction = sum(row['verdict_holm'] != 'undecided' for row in before)
    results = ' '.join((ROOT / 'docs' / 'results.md').read_text().split())
    sentence = f'{len(before)} comparisons: {count("holds")} hold, the opposite of {count("does not hold")} is seen, '
    assert f'{sentence}{small} make less than .05 of a difference' in results
    readme = ' '.join((ROOT / 'README.md').read_text().split())
    assert f'the miniature decides {decided} of {len(before)} of their claims' in readme
    assert f'{after_correction} of them after correction' in readme
    assert f'shows less than .05 of a difference for {small}' in readme


def test_the_committed_table_is_that_of_the_committed_runs(tmp_path):
    (tmp_path / 'runs').symlink_to(claims.RESULTS / 'runs')
    claims.main(['--minutes', '0', '--out', str(tmp_path)])
    for name in ('claims.json', 'claims.md'):
        assert (tmp_path / name).read_text() == (claims.RESULTS / name).read_text()
