"""Local folders of runs that upload their checkpoints, for tests of `extras.buckets`."""

import contextlib
import shutil
import time

import jax.numpy as jnp

from zeroplay_jax.learner.checkpoint import Checkpointer


def save_checkpoints(folder):
    """Saves the checkpoints 2, 4 and 6 in a folder; returns it."""
    checkpoints = Checkpointer(folder, keep=3)
    for step in (2, 4, 6):
        checkpoints.save(step, {'w': jnp.full(5, step)}, {'cursor': step})
    checkpoints.close()
    return folder


def save(steps, folder, step, change=None):
    """What a run leaves in its local folder when it has saved a step, whose files `change` may change."""
    draft = folder / 'checkpoints' / f'{step}.part'
    shutil.copytree(steps / 'checkpoints' / str(step), draft)
    if change is not None:
        change(draft)
    (folder / 'run.json').write_text('{}')
    with (folder / 'metrics.jsonl').open('w') as file:
        file.writelines(f'{{"step": {number}}}\n' for number in range(step))
    draft.rename(draft.with_suffix(''))


@contextlib.contextmanager
def uploading(remote, folder, keep=2, seconds=30.0):
    """The uploads of a run from its local folder; the run has the lease meanwhile."""
    from zeroplay_jax.extras.buckets.lease import Lease
    from zeroplay_jax.extras.buckets.mirror import Mirror

    lease = Lease(remote.bucket, remote.name('lease.json'))
    mirror = Mirror(remote, folder, lease.id, lease, remote.manifests(), keep, seconds)
    try:
        yield mirror
    finally:
        mirror.close()
        lease.release()


def upload(remote, folder, steps=None, *numbers):
    """Saves steps of these numbers in a folder and uploads each as a run does at its end; or the newest one there."""
    for number in numbers or (None,):
        if number is not None:
            save(steps, folder, number)
        with uploading(remote, folder) as mirror:
            wait(mirror)


def wait(mirror):
    wait_for(lambda: not mirror.is_pending())


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def names(remote, prefix=''):
    return [entry.name for entry in remote.bucket.list(remote.name(prefix))]
