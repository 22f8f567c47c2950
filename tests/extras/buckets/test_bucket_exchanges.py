"""Checkpoints of two processes in a bucket: each has a folder of its own, and other machines get the shards of both."""

import jax.numpy as jnp
import numpy as np
from host_processes import finish, processes_of_script

from zeroplay_jax.learner.checkpoint import Checkpointer

FOLDERS = """
import asyncio, contextlib, pathlib, sys
from zeroplay_jax.runtime import devices, hosts
from zeroplay_jax.types import UserError
devices.connect('coordinator', f'localhost:{sys.argv[1]}', 2, int(sys.argv[2]), 10)
import jax, jax.numpy as jnp, numpy as np
from zeroplay_jax.learner.checkpoint import Checkpointer
from zeroplay_jax.policy import sharding
h = hosts.Hosts()
mesh = sharding.make_mesh(replica=2)
from zeroplay_jax.configs import quickstart
from zeroplay_jax.learner import checkpoint
from zeroplay_jax.extras.buckets import objects
from zeroplay_jax.runtime import workdir
from zeroplay_jax.extras.buckets import run as bucket_run
import orbax.checkpoint as ocp
root = pathlib.Path(sys.argv[3])
bucket = objects.open_bucket('bucket')
config = quickstart.get_config()
config.checkpoint.keep = 2
def states_of(step):
    rows = np.arange(6, dtype=np.float32).reshape(2, 3) + step
    kinds = {
        'split': (rows, sharding.rows(mesh)),
        'equal': (np.full((4, 4), step), sharding.replicated(mesh)),
        'count': (np.int32(step), sharding.replicated(mesh)),
    }
    return {
        name: jax.make_array_from_callback(values.shape, placed, lambda index: values[index])
        for name, (values, placed) in kinds.items()
    }
lines = []
bucket_run.warn = lines.append
mirrors = []
class Mirror(bucket_run.Mirror):
    def __init__(self, *arguments):
        mirrors.append(self)
        super().__init__(*arguments)
bucket_run.Mirror = Mirror
def play(name, steps):
    lines.clear()
    config.bucket.spool = str(root / name)
    with bucket_run.opened(h, 'gs://bucket/runs/a', config) as place:
        place.workdir.mkdir(parents=True, exist_ok=True)
        (place.workdir / 'run.json').write_text('{}')
        checkpoints = Checkpointer(place.workdir, 2, is_shared=place.is_shared)
        restored = None
        if checkpoints.latest():
            like = jax.tree.map(ocp.utils.to_shape_dtype_struct, states_of(0))
            restored = checkpoints.restore(like)
            # As --from does between two saves of a run.
            assert set(checkpoint.stored_tree(place.workdir / 'checkpoints' / str(checkpoints.latest()))) == set(like)
        for step in steps:
            checkpoints.save(step, states_of(step), {'cursor': step})
            checkpoints.wait()
            bucket_run.wait(h, mirrors[-1])
        checkpoints.close()
        return place, restored
def check(restored, step):
    states, loop = restored
    assert loop == {'cursor': step}
    for name, array in states.items():
        wanted = states_of(step)[name]
        for shard, wanted_shard in zip(array.addressable_shards, wanted.addressable_shards, strict=True):
            np.testing.assert_array_equal(shard.data, wanted_shard.data)
# The folders of process 1 are created late, as on a slow disk.
create = checkpoint.SealedTemporaryPath.create
async def create_late(path):
    await asyncio.sleep(0.2 * h.index)
    return await create(path)
checkpoint.SealedTemporaryPath.create = create_late
place, restored = play('one', [2, 4])
checkpoint.SealedTemporaryPath.create = create
assert restored is None and lines == []
# On the same machines, and on two others.
for name in ('one', 'two'):
    place, restored = play(name, [])
    check(restored, 4)
    # The folder has the files of both processes, with their checksums.
    assert checkpoint.find_damage(place.workdir / 'checkpoints' / '4') == ''
assert place.workdir.name == 'a' and place.workdir.parent.name.endswith(f'.process_{h.index}')
# While another run has the folder of process 1, none of both processes touches its folder.
left = sorted(path.name for path in place.workdir.rglob('*'))
config.distributed.heartbeat, bucket_run._STOP_SECONDS = 1, 0
taken = contextlib.nullcontext() if h.is_first else workdir.locked(place.workdir.parent)
with taken:
    try:
        play('two', [6])
        raise AssertionError('no error')
    except UserError as error:
        line = str(error)
        assert 'another process has the local folder' in line and '.process_1 on ' in line, line
assert sorted(path.name for path in place.workdir.rglob('*')) == left
h.gather(None)
# A full disk of one process ends both with its line.
install = bucket_run._install
def install_in_full_folder(*paths):
    raise OSError(28, 'No space left on device')
if not h.is_first:
    bucket_run._install = install_in_full_folder
try:
    play('full', [])
    raise AssertionError('no error')
except UserError as error:
    assert 'No space left on device' in str(error), error
    assert str(error).startswith('process 1: ') == h.is_first, error
bucket_run._install = install
# A missing shard of one process: both go back to the step before.
h.gather(None)
(shard,) = [entry.name for entry in bucket.list('runs/a/checkpoints/4-') if '/split/1' in entry.name]
h.gather(None)
if h.is_first:
    bucket.delete(shard)
place, restored = play('three', [6])
check(restored, 2)
if h.is_first:
    (line,) = lines
    assert 'checkpoint 4 of gs://bucket/runs/a is damaged' in line and 'split/1' in line, line
assert sorted(mirrors[-1]._remote.manifests()) == [2, 6]
print('fine')
"""


def test_two_processes_save_their_shards_and_other_machines_get_those_of_both(emulator, tmp_path):
    out = finish(processes_of_script(FOLDERS, str(tmp_path)))
    assert all(text.strip().endswith('fine') for text in out), out
    # One process resumes what two have saved in folders of their own.
    (folder,) = (tmp_path / 'two').glob('*.process_0/a')
    like = {'split': jnp.zeros((2, 3)), 'equal': jnp.zeros((4, 4), int), 'count': jnp.int32(0)}
    states, loop = Checkpointer(folder, keep=2).restore(like)
    np.testing.assert_array_equal(states['split'], np.arange(6).reshape(2, 3) + 4)
    assert loop == {'cursor': 4} and states['count'] == 4 and (states['equal'] == 4).all()
