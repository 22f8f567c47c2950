"""benchmarks.machines.true_shapes: where its seconds and bytes are counted. No run of its size."""

import pytest

from benchmarks.machines import true_shapes

pytestmark = pytest.mark.results


def test_stages_are_cut_by_the_log_and_memory_counts_from_the_weights_on():
    steps = [(0, 1, 0, False, -1), (1, 2, 1, True, -1), (2, 4, 3, True, -1), (3, 5, 5, False, 0)]
    steps += [(5, 8, 6, False, 1), (9, 20, 9, False, 1), (10, 22, 6, False, 2)]
    steps += [(11, 23, 6, False, 2)]
    gib = true_shapes.GIB
    samples = [true_shapes.Sample(*step[:2], step[2] * gib, *step[3:]) for step in steps]
    records = [
        {'phase': 'evaluation', 'seconds/save': 0.0},
        {'phase': 'solver', 'seconds/save': 1.0, 'seconds/update': 2.0},
    ]
    stages = true_shapes.stages_of_run(samples, records)
    assert [stage.name for stage in stages] == [
        'load',
        'step 0, evaluation: rollouts',
        'save after step 0',
        'step 1, solver: rollouts',
        'step 1, solver: update',
        'last save, export, report',
    ]
    update = stages[4]
    assert (update.wall, update.cpu, update.resident) == (1, 2, 9 * gib)
    assert true_shapes.before_weights(samples) == 0
    rows = true_shapes.table(stages, {'rollouts': 6.0, 'update': 8.0}, gib)
    assert rows[4] == ['step 1, solver: update', '1', '2', '9.00', '8.00', '8.00', '+0%']
    assert rows[0][4:] == ['', '', '']
