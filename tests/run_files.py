"""What is read from the folder of a run."""

import json

CLOCKS = ('seconds', 'tokens_per_second')


def lines(workdir, name='metrics.jsonl'):
    text = (workdir / name).read_text(encoding='utf-8')
    return [json.loads(line) for line in text.split('\n') if line]


def count_steps(workdir):
    """The number of lines of the metrics, of a run that may not have begun."""
    path = workdir / 'metrics.jsonl'
    return path.read_text().count('\n') if path.exists() else 0


def without_clock(records):
    """Records of metrics without what another run of the same config has otherwise."""
    kept_records = []
    for record in records:
        kept = {name: x for name, x in record.items() if not any(c in name for c in CLOCKS)}
        kept_records.append(kept)
    return kept_records


def summary_of(workdir):
    return json.loads((workdir / 'summary.json').read_text())


def final_states(workdir):
    """Arrays and loop state of the newest checkpoint of a run."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    from zeroplay_jax.learner.checkpoint import saved_steps

    step = max(saved_steps(workdir / 'checkpoints'))
    folder = (workdir / 'checkpoints' / str(step)).resolve()
    reader = ocp.StandardCheckpointer()
    # On one device, however many the run had.
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    shapes = jax.tree.map(shape, reader.metadata(folder / 'states').item_metadata.tree)
    tree = reader.restore(folder / 'states', shapes)
    loop = json.loads((folder / 'loop' / 'metadata').read_text())
    loop.pop('seconds')
    return jax.tree.map(np.asarray, tree), loop


def check_same_run(whole, other):
    """Asserts that a run ended bit for bit as another one did, and that every line of its logs is there once."""
    import jax
    import numpy as np

    (states, loop), (other_states, other_loop) = final_states(whole), final_states(other)
    jax.tree.map(np.testing.assert_array_equal, states, other_states)
    assert loop == other_loop
    assert without_clock(lines(whole)) == without_clock(lines(other))
    for path in [*whole.glob('*s.jsonl'), *whole.glob('step*/*/*.safetensors')]:
        name = path.relative_to(whole)
        assert name.name == 'metrics.jsonl' or path.read_bytes() == (other / name).read_bytes()
