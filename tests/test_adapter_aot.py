"""Compile rows of runs with adapters: what is counted, which slots are chosen, and the pages that show them."""

import pathlib
import re

import jax
import pytest
import slice_compiler

from benchmarks.machines import aot, programs
from benchmarks.machines.aot import SLOTS, AdapterCase
from benchmarks.machines.programs import Compiled, Machine

pytestmark = pytest.mark.results

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
        return Compiled(arguments, self.temporaries, arguments + self.temporaries)


def case_of(name, memory=2**40, temporaries=0):
    devices = jax.devices()[:1]
    compiler = Compiler(temporaries)
    machine = Machine('one', memory, devices, devices, 'blocked', compiler)
    return AdapterCase(name, RANK, machine, layers=LAYERS)


@pytest.fixture(scope='module')
def case():
    return case_of('qwen2.5-7b')


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
    memory = resident + case.slot_bytes(96) + aot.HEADROOM + 1
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
    path.write_text('{"rows": []}')
    monkeypatch.setattr(aot, 'RESULTS', path)
    machine = Machine('one', 1.0, [], [])
    row = dict(work='qwen2.5-7b', machine='one', rank=4, fits=True)
    aot.store([row])
    monkeypatch.setattr(aot, 'AdapterCase', None)
    assert aot.measure('qwen2.5-7b', machine, 4, again=False) == [row]
    with pytest.raises(TypeError):
        aot.measure('qwen2.5-7b', machine, 8, again=False)


def test_the_readme_names_the_machines_on_which_every_config_fits():
    fitting = {}
    for row in aot.stored_rows():
        if row['rank'] and row['work'].startswith('configs/'):
            fitting.setdefault((row['work'].partition(',')[0], row['machine']), []).append(
                row['fits']
            )
    readme = (ROOT / 'README.md').read_text()
    slice_type = re.search(r'each config fits a (\S+), and one H100', readme)[1]
    assert slice_type == 'v5litepod-4'
    for name in aot.CONFIGS:
        for machine in ('v5e:2x2', 'h100'):
            assert any(fitting[f'configs/{name}.py', machine]), (name, machine)


SMALL = """
import json
from benchmarks.machines import aot, programs
programs.prepare_tpu()
machine = programs.machine_of('v5e:2x2')
case = aot.AdapterCase('qwen2.5-3b', 4, machine, layers=1)
aot.SLOTS = (16,)
print(json.dumps(case.rows_of_all()))
"""


@pytest.mark.long
@pytest.mark.skipif(programs.tpu_compiler() is None, reason='libtpu is not installed')
def test_the_programs_of_a_small_model_compile_for_a_slice():
    rows = slice_compiler.last_line(SMALL, timeout=600)
    assert [row['program'] for row in rows] == ['extend', 'decode', 'update', 'teacher']
    assert all(row['fits'] and not row['offloaded'] for row in rows)
    assert all(row['arguments'] < row['hbm_bytes'] for row in rows)
