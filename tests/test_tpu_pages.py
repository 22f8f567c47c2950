"""Steps over pages compiled for TPU slices: what is stored and printed, and how the simulator reads it."""

import numpy as np
import pytest
import slice_compiler

from benchmarks import aot_cases, slices, slices_costs, tpu_pages, tpu_programs
from benchmarks.slices_costs import Settings
from benchmarks.slices_engines import Device, Engine, Episode, Group, Tools

CHIPS = pytest.importorskip('zeroplay_jax.extras.plan.machines').CHIPS
SHAPES = pytest.importorskip('zeroplay_jax.extras.plan.planning').SHAPES
NAME = tpu_pages.MODEL
MODEL = slices_costs.published_model(NAME)


@pytest.mark.parametrize('kind', tpu_pages.SLOTS)
def test_pages_take_the_memory_of_the_slots(kind):
    slots = tpu_pages.SLOTS[kind]
    size = tpu_pages.paged(slots, kind)
    assert size.pages * size.page <= slots * (4096 + 256)
    # Three times the rollouts of the slots, or 256, at 1,500 tokens each.
    assert size.slots == min(3 * slots, 256)
    of_table = [row['slots'] for row in aot_cases.stored_rows() if is_decode(row, kind)]
    assert of_table == [slots]


def is_decode(row, kind):
    machines = [name for name, machine in slices.MACHINES.items() if machine.kind == kind]
    case = (row['model'], row['machine'], row['rank'])
    return case == (NAME, machines[0], 0) and row['program'] == 'decode'


def test_the_table_of_the_page_is_what_is_stored():
    text = tpu_pages.table()
    assert text == tpu_pages.RESULTS.with_suffix('.tsv').read_text()
    shapes = [SHAPES[kind] for kind in tpu_pages.SLOTS]
    assert len(text.splitlines()) == 1 + sum(1 + len(shape.buckets) for shape in shapes)


@pytest.mark.parametrize('kind', tpu_pages.SLOTS)
def test_compiled_steps_take_no_less_than_their_least_time_and_fit(kind):
    machine = slices_costs.machine_costs(kind, MODEL, 4, 1)
    size = tpu_pages.paged(tpu_pages.SLOTS[kind], kind)
    assert set(machine.slowdown) == {size.token_budget, *size.decode_buckets}
    for tokens in machine.slowdown:
        step = tpu_pages.stored()[kind]['steps'][str(tokens)]
        sampled = min(tokens, size.slots)
        products = tokens * machine.token + sampled * machine.logits
        least = max(machine.read, products)
        assert machine.step(tokens, sampled) == pytest.approx(max(least, step['seconds']))
        assert step['arguments'] + step['temporaries'] < CHIPS[kind].memory
        kernel, limit = tpu_pages.kernel_seconds(machine.kernel, size, tokens)
        assert 0 < kernel < 1 and limit in ('traffic', 'instructions')
    # Elsewhere peak rates: twice the chips take half the time.
    one, two = (slices_costs.machine_costs('h100', MODEL, chips, 1) for chips in (1, 2))
    assert set(one.slowdown.values()) == {1.0}
    assert one.step(8, 8) == pytest.approx(2 * two.step(8, 8))


class CountedCosts:
    """Costs 1 per token of a step's program, and notes the programs."""

    host = 0.0

    def __init__(self):
        self.programs = []

    def mixed(self, tokens, last, fed):
        self.programs.append((tokens, int(np.sum(fed))))
        return float(tokens)


def test_a_step_without_prefill_takes_the_smallest_program_that_suffices():
    settings = Settings(
        slots=6, context=200, page=16, pages=99, token_budget=32, decode_buckets=(2, 4), burst=4
    )
    costs = CountedCosts()
    engine = Engine(Device(settings, costs), Tools(lambda: 1.0, 1))
    episodes = tuple(Episode(((length, 0),), end_token=True) for length in (3, 9, 17, 26, 30))
    engine.add(Group(20, episodes))
    for number in range(60):
        engine.round(float(number))
    assert engine.generated == sum(episode.written for episode in episodes)
    for tokens, fed in costs.programs:
        assert fed <= tokens
        if tokens < 32:
            assert tokens == (2 if fed <= 2 else 4)
    used = [tokens for tokens, _ in costs.programs]
    assert set(used) == {2, 4, 32}
    # Five rows are more than the largest bucket, fewer never take the whole step again.
    assert all(fed >= 5 for tokens, fed in costs.programs if tokens == 32)


SMALL = """
import json
from benchmarks import tpu_pages, tpu_programs
tpu_programs.prepare_tpu()
size = tpu_programs.sampler_config(16, page=64, pages=256, token_budget=64, decode_buckets=(8,))
out = {}
for tokens in (8, 64):
    lowered, arguments = tpu_pages.lower('qwen2.5-3b', 'v5e', size, tokens, 1)
    compiled = tpu_programs.compile_program(lowered)
    pages = [line for line in compiled.text.splitlines() if ' = bf16[128,64,2,128]' in line]
    copies = [line for line in pages if ' copy(' in line or ' copy-start(' in line]
    out[tokens] = [compiled.text.count('tpu_custom_call'), len(pages) > 0, len(copies)]
print(json.dumps(out))
"""


@pytest.mark.long
@pytest.mark.skipif(tpu_programs.tpu_compiler() is None, reason='libtpu is not installed')
def test_steps_compile_for_a_slice_and_copy_no_page():
    found = slice_compiler.last_line(SMALL, timeout=900)
    # One call for rows of one token; another for chunks where there may be some.
    assert found == {'8': [1, True, 0], '64': [2, True, 0]}
