"""Steps over pages compiled for TPU slices: what is stored and printed, and how the simulator reads it."""

import json

import numpy as np
import pytest
import slice_compiler

from benchmarks import slices_costs, tpu_aot, tpu_pages, tpu_shapes
from benchmarks.slices_costs import Settings
from benchmarks.slices_engines import Device, Engine, Episode, Group, Tools
from zeroplay_jax.configuration.planning import SHAPES

NAME = 'qwen2.5-7b'
SLICES = ('v5e:4x4', 'v5p:2x2x4')


def stored():
    return json.loads(tpu_aot.RESULTS.read_text())


@pytest.mark.parametrize('topology', SLICES)
def test_pages_take_the_memory_of_the_slots(topology):
    slots = tpu_pages.table_slots(stored(), NAME, topology)
    size = tpu_pages.sizes(topology, slots)
    assert size.slots >= slots
    assert size.pages * size.page <= slots * (4096 + 256)
    # Three times the rollouts of the slots, or 256, at 1,500 tokens each.
    assert size.slots == min(3 * slots, 256)


def test_the_table_of_the_page_is_what_was_found():
    pairs = [(NAME, topology) for topology in SLICES]
    lines = tpu_pages.table(stored(), pairs).split('\n')
    shapes = [SHAPES[topology.partition(':')[0]] for topology in SLICES]
    assert len(lines) == 2 + sum(1 + len(shape.buckets) for shape in shapes)
    rows = ['\t'.join(line.strip('| ').split(' | ')) for line in lines if '---' not in line]
    assert set(rows) <= set((tpu_aot.RESULTS.parent / 'tpu_pages.tsv').read_text().split('\n'))


@pytest.mark.parametrize('topology', SLICES)
def test_compiled_steps_take_no_less_than_their_least_time_and_fit(topology):
    table = stored()
    chip = tpu_shapes.TOPOLOGIES[topology].chip
    machine = slices_costs.machine_costs(topology, NAME)
    peak = slices_costs.machine_costs(topology, NAME, peak=True)
    shape = SHAPES[topology.partition(':')[0]]
    assert set(machine.pages) == {shape.budget, *shape.buckets} and not peak.pages
    for tokens, seconds in machine.pages.items():
        assert seconds >= max(peak.step + peak.head, tokens * peak.token)
        slots = tpu_pages.table_slots(table, NAME, topology)
        size = tpu_pages.sizes(topology, slots)
        step = table['pages'][tpu_pages.key(NAME, topology, size, tokens)]
        assert step['arguments'] + step['temporaries'] < chip.memory
        # A call per layer for rows of one token; in a step that prefills another one for chunks.
        assert step['kernels'] == 28 * (2 if tokens == shape.budget else 1)
        kernel, limit = tpu_pages.kernel_seconds(machine.kernel, size, tokens)
        assert 0 < kernel < 1 and limit in ('traffic', 'instructions')


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
from benchmarks import tpu_aot, tpu_pages, tpu_programs
tpu_aot.prepare()
size = tpu_programs.sampler_config(16, page=64, pages=256, token_budget=64, decode_buckets=(8,))
out = {}
for tokens in (8, 64):
    lowered, arguments = tpu_pages.lower('qwen2.5-3b', 'v5e:4x4', size, tokens, 1)
    compiled = tpu_programs.compile_program(lowered)
    pages = [line for line in compiled.text.splitlines() if ' = bf16[128,64,2,128]' in line]
    copies = [line for line in pages if ' copy(' in line or ' copy-start(' in line]
    out[tokens] = [compiled.text.count('tpu_custom_call'), len(pages) > 0, len(copies)]
print(json.dumps(out))
"""


@pytest.mark.long
@pytest.mark.skipif(tpu_aot.compiler_folder() is None, reason='libtpu is not installed')
def test_steps_compile_for_a_slice_and_copy_no_page():
    found = slice_compiler.last_line(SMALL, timeout=900)
    # One call for rows of one token; another for chunks where there may be some.
    assert found == {'8': [1, True, 0], '64': [2, True, 0]}
