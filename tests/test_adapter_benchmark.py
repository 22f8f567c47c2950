"""The comparison of adapters with whole weights: its configs, its table, and stored runs."""

import json

import pytest

from benchmarks import adapters, command
from zeroplay_jax.configuration import fields, rules
from zeroplay_jax.selfplay.recipe import trained_roles


@pytest.mark.parametrize('arm', adapters.ARMS)
def test_runs_differ_in_rank_and_learning_rates_only(arm):
    whole = fields.leaves(adapters.config_of(arm, 0, 10.0, 1))
    config = adapters.config_of(arm, 16, 10.0, 1)
    rules.check(config)
    different = {name for name, value in fields.leaves(config).items() if value != whole[name]}
    rates = {f'{role}.learning_rate' for role in trained_roles(config)}
    assert different == rates | {'policy.adapters.rank'}
    for name in rates:
        assert fields.leaves(config)[name] == pytest.approx(10 * whole[name])


def test_the_curve_counts_steps_of_the_solver():
    phases = 'evaluation proposer generate solver solver evaluation selfplay'.split()
    records = [{'phase': phase, 'em/mean': 0.5} for phase in phases]
    assert adapters.curve(records) == [[0, 0.5], [2, 0.5]]


def test_stored_runs_are_tabulated_and_not_executed_again(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(adapters, 'run_arm', None)
    folder = tmp_path / 'adapters'
    folder.mkdir()
    for rank in (0, 4):
        for seed, final in enumerate((0.6, 1.0)):
            curve = [[0, 0.2], [8, 0.2], [24, final]]
            run = dict(arm='dspo', rank=rank, factor=10.0 if rank else 1.0, seed=seed, curve=curve)
            path = adapters.stored_path('dspo', rank, run['factor'], seed, folder)
            path.write_text(json.dumps(run))
    monkeypatch.setattr(command, 'RESULTS', tmp_path)
    monkeypatch.setattr(adapters, 'ARMS', ('dspo',))
    monkeypatch.setattr(adapters, 'RANKS', (0,))
    monkeypatch.setattr(adapters, 'SEEDS', 2)
    monkeypatch.setattr('sys.argv', ['adapters'])
    adapters.main()
    printed = capsys.readouterr().out
    assert printed == (tmp_path / 'adapters.tsv').read_text()
    # All stored runs are in the table. Area of a run: (8 · 0.2 + 16 · (0.2 + final) / 2) / 24.
    cells = '2\t0.200\t0.800 (0.600 to 1.000)\t0.400\n'
    assert f'dspo\twhole\t× 1\t{cells}' in printed
    assert f'dspo\trank 4\t× 10\t{cells}' in printed


def test_the_committed_table_is_that_of_the_committed_runs():
    stored = (command.RESULTS / 'adapters.tsv').read_text()
    assert adapters.table(command.RESULTS / 'adapters') == stored
