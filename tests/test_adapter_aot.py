"""Compile rows of runs with adapters: what is counted, which slots are chosen, and the pages that show them."""

import dataclasses
import pathlib
import re

import jax
import numpy as np
import pytest
import slice_compiler

from benchmarks import adapter_cases, adapter_tables, command, tpu_aot, tpu_programs
from benchmarks.adapter_cases import SLOTS, AdapterCase, Machine
from benchmarks.tpu_programs import Compiled
from zeroplay_jax.policy import adapters

ROOT = pathlib.Path(__file__).parents[1]
RANK, LAYERS = 4, 2
# Per layer of Qwen2.5-7B: inputs and outputs of q, k, v, o, gate, up and down.
SIDES = 2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944)


class Compiler:
    """Stands for the compiler: a program of one device needs its arguments and a fixed number of further bytes."""

    def __init__(self, temporaries):
        self.temporaries = temporaries

    def __call__(self, lowered):
        avals = jax.tree.leaves(lowered.in_avals)
        arguments = sum(x.size * x.dtype.itemsize for x in avals)
        return Compiled(arguments, self.temporaries, arguments + self.temporaries, 0.0, '')


def case_of(name, memory=2**40, temporaries=0):
    tpu_programs._COMPILED.clear()
    work = dataclasses.replace(adapter_cases.work_of(name, RANK), layers=LAYERS)
    devices = jax.devices()[:1]
    compiler = Compiler(temporaries)
    return AdapterCase(work, Machine('one', 'one', memory, devices, devices, 'blocked', compiler))


@pytest.fixture(scope='module')
def case():
    return case_of('qwen2.5-7b')


def test_shapes_of_adapters_are_those_of_a_run():
    kernel = {'kernel': np.zeros((6, 4), np.float32)}
    base = {'layer_0': {'q': kernel, 'down': kernel}, 'embedding': np.zeros(2)}
    made = adapters.init(base, ('q', 'down'), 3, 0, 'role')
    shapes = adapter_cases.adapter_shapes(base, ('q', 'down'), 3)
    same = jax.tree.map(lambda x, y: (x.shape, x.dtype) == (y.shape, y.dtype), made, shapes)
    assert all(jax.tree.leaves(same))


def test_the_arrays_of_a_run_are_counted_by_hand(case):
    adapter = LAYERS * RANK * SIDES
    sizes = case.resident()
    assert sizes['masters'] == 2 * 4 * adapter
    # The teacher has twice the rank. The sampler has both adapters alone and side by side, bfloat16.
    assert sizes['teacher'] == 2 * 4 * adapter
    assert sizes['adapters of the sampler'] == 2 * 2 * (2 * adapter)
    assert 0 <= sizes['moments'] - 2 * sizes['masters'] < 64
    matrices = 3584 * (2 * 3584 + 2 * 512 + 3 * 18944) * LAYERS + 2 * 152064 * 3584
    assert 0 < sizes['base'] - 2 * matrices < 2**20
    updated = case.resident('solver')
    assert updated['masters'] == 4 * adapter
    assert sum(updated.values()) == sum(sizes.values())


@pytest.mark.parametrize('temporaries', [0, 2**30])
def test_the_most_slots_that_fit_are_chosen(case, temporaries):
    resident = sum(case.resident().values())
    memory = resident + case.slot_bytes(96) + adapter_cases.HEADROOM + 1
    small = case_of('qwen2.5-7b', memory, temporaries)
    rows = small.rollout()
    assert [row['program'] for row in rows] == ['extend', 'decode']
    slots = rows[0]['slots']
    assert all(row['fits'] and not row['offloaded'] for row in rows)
    needed = resident + case.slot_bytes(slots) + temporaries
    assert abs(rows[1]['hbm_bytes'] - needed) < 2**20
    more = SLOTS[SLOTS.index(slots) - 1]
    assert (
        slots == 96 if not temporaries else resident + case.slot_bytes(more) + temporaries > memory
    )


def test_slots_leave_the_chip_only_if_an_update_needs_their_memory(case):
    roomy = case_of('dspo').updates(4)
    assert [row['program'] for row in roomy] == ['update']
    assert not any(row['offloaded'] for row in roomy)
    resident = sum(case.resident().values())
    slot_bytes = case.slot_bytes(128)
    tight = case_of('qwen2.5-7b', resident + slot_bytes, temporaries=2**29)
    for row in tight.updates(128):
        assert row['fits'] and row['offloaded'] == ['slots']
        assert row['hbm_bytes'] < resident + 2**30


def test_stored_rows_are_not_compiled_again(tmp_path, monkeypatch):
    path = tmp_path / 'rows.json'
    machine = Machine('one', 'one', 1.0, [], [], 'blocked', None)
    row = dict(work='qwen2.5-7b', machine='one', rank=4, fits=True)
    adapter_cases.store(path, [row])
    monkeypatch.setattr(adapter_cases, 'AdapterCase', None)
    assert adapter_cases.measure([('qwen2.5-7b', machine)], 4, path, again=False) == [row]
    with pytest.raises(TypeError):
        adapter_cases.measure([('qwen2.5-7b', machine)], 8, path, again=False)


def test_the_tables_of_the_pages_are_the_stored_rows():
    rows = adapter_cases.stored_rows()
    models = adapter_tables.model_table(rows, command.tab_separated)
    assert models == adapter_cases.RESULTS.with_suffix('.tsv').read_text()
    tables = adapter_tables.report(rows, rows).split('\n\n')
    assert len(tables) == 3 and tables[1].startswith('| model |')
    configs = adapter_tables.config_table(rows).split('\n')
    assert len(configs) == 2 + len(adapter_cases.CONFIGS)
    stored = adapter_cases.RESULTS.with_name(adapter_tables.CONFIGS_FILE).read_text()
    assert stored == adapter_tables.config_table(rows, command.tab_separated)
    readme = (ROOT / 'README.md').read_text()
    machines = set()
    for name, full in adapter_tables.FULL.items():
        module = (ROOT / 'configs' / f'{name}.py').read_text()
        assert f'--type {full} ' in module
        work = f'configs/{name}.py'
        assert re.search(rf'^\|.*\[{work}\].*$', readme, re.M)
        for kinds in (tuple(adapter_tables.ADAPTER_TOPOLOGIES), adapter_tables.GPUS):
            machines.add(adapter_tables.smallest_machine(rows, work, kinds))
    slice_type = re.search(r'each config fits a (\S+), and one H100', readme)[1]
    assert {adapter_tables.TYPES.get(machine, machine) for machine in machines} == {
        slice_type,
        'h100',
    }


SMALL = """
import dataclasses, json
from benchmarks import tpu_aot, adapter_cases
tpu_aot.prepare()
work = dataclasses.replace(adapter_cases.work_of('qwen2.5-3b', 4), layers=1)
case = adapter_cases.AdapterCase(work, adapter_cases.tpu_machine('v5e:2x2'))
adapter_cases.SLOTS = (16,)
print(json.dumps(case.rows_of_all()))
"""


@pytest.mark.long
@pytest.mark.skipif(tpu_aot.compiler_folder() is None, reason='libtpu is not installed')
def test_the_programs_of_a_small_model_compile_for_a_slice():
    rows = slice_compiler.last_line(SMALL, timeout=600)
    assert [row['program'] for row in rows] == ['extend', 'decode', 'update', 'teacher']
    assert all(row['fits'] and not row['offloaded'] for row in rows)
    assert all(row['arguments'] < row['hbm_bytes'] for row in rows)
    # A prefill does not read the output head.
    assert all(row['base_bytes'] < row['arguments'] for row in rows[1:])
