"""A damaged checkpoint is never loaded: wherever a byte is flipped, the one before is taken, and a line says so."""

import json
import random
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zeroplay_jax.learner import checkpoint
from zeroplay_jax.learner.checkpoint import (
    Checkpointer,
    remove_after,
    saved_steps,
    set_damaged_aside,
)
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.types import UserError

LIKE = {'solver': {'params': {'w': jnp.zeros((64, 32)), 'b': jnp.zeros(7)}, 'step': jnp.int32(0)}}


def state(step):
    return jax.tree.map(lambda x: x + step, LIKE)


def save(workdir, *steps):
    checkpoints = Checkpointer(workdir, keep=3)
    for step in steps:
        checkpoints.save(step, state(step), {'cursor': step, 'pool': ['a question'] * 50})
    checkpoints.close()


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    workdir = tmp_path_factory.mktemp('saved')
    save(workdir, 2, 4)
    return workdir


@pytest.fixture
def workdir(saved, tmp_path):
    shutil.copytree(saved, tmp_path / 'run')
    return tmp_path / 'run'


def files(workdir, step=4):
    return sorted(p for p in (workdir / 'checkpoints' / str(step)).rglob('*') if p.is_file())


def resumed_step(workdir):
    """(the step that a restart takes, the lines that it prints)."""
    lines = set_damaged_aside(Hosts(), workdir)
    restored, loop = Checkpointer(workdir, keep=3).restore(LIKE)
    step = loop['cursor']
    jax.tree.map(np.testing.assert_array_equal, restored, state(step))
    return step, lines


def test_bytes_flipped_at_200_places_are_found(workdir):
    rng = random.Random(0)
    folder = workdir / 'checkpoints' / '4'
    paths = files(workdir)
    sizes = [path.stat().st_size for path in paths]
    for number in range(200):
        # Half of the places are spread over bytes, half over files, most of which are small.
        path = rng.choices(paths, sizes if number % 2 else None)[0]
        whole = path.read_bytes()
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        assert checkpoint.find_damage(folder), path
        path.write_bytes(whole)
    assert not checkpoint.find_damage(folder)


def test_each_file_that_is_cut_or_missing_is_found(workdir):
    folder = workdir / 'checkpoints' / '4'
    for path in files(workdir):
        whole = path.read_bytes()
        for cut in (0, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:cut])
            assert checkpoint.find_damage(folder), (path, cut)
        path.unlink()
        assert checkpoint.find_damage(folder), path
        path.write_bytes(whole)
    (folder / 'states' / 'more').write_text('x')
    assert 'states/more is not in' in checkpoint.find_damage(folder)


@pytest.mark.parametrize('name', ['states/manifest.ocdbt', 'loop/metadata', 'checksums.sha256'])
def test_the_checkpoint_before_is_taken_and_a_line_says_what_is_lost(workdir, name):
    path = workdir / 'checkpoints' / '4' / name
    path.write_bytes(path.read_bytes()[:-3])
    step, (line,) = resumed_step(workdir)
    assert step == 2 and line.startswith(f'checkpoint 4 is damaged: {name}')
    assert line.endswith('the run resumes from 2, and steps 2 to 3 are run again')
    assert (workdir / 'damaged' / '4').is_dir()
    # The run saves that step again, and it is then whole.
    save(workdir, 4)
    assert resumed_step(workdir) == (4, [])


@pytest.mark.parametrize('newest_is_whole', [True, False])
def test_an_older_damaged_step_behind_a_whole_one_stays(workdir, newest_is_whole):
    save(workdir, 6)
    damaged_steps = [2] if newest_is_whole else [2, 6]
    for number in damaged_steps:
        (workdir / 'checkpoints' / str(number) / 'loop' / 'metadata').unlink()
    step, lines = resumed_step(workdir)
    assert (step, len(lines)) == ((6, 0) if newest_is_whole else (4, 1))
    assert 2 in saved_steps(workdir / 'checkpoints')


def test_processes_share_the_files_and_find_what_one_finds(workdir):
    folder = workdir / 'checkpoints' / '4'
    path = folder / 'loop' / 'metadata'
    path.write_bytes(b'x' + path.read_bytes()[1:])
    damage = [checkpoint.find_damage(folder, process, 3) for process in range(3)]
    assert sorted(map(bool, damage)) == [False, False, True]


def test_if_all_are_damaged_nothing_is_moved(workdir):
    for step in (2, 4):
        (workdir / 'checkpoints' / str(step) / 'loop' / 'metadata').unlink()
    with pytest.raises(
        UserError, match='all checkpoints are damaged .checkpoint 4 .*loop/metadata'
    ):
        set_damaged_aside(Hosts(), workdir)
    assert saved_steps(workdir / 'checkpoints') == [2, 4]


def test_a_step_that_is_not_newer_is_not_skipped_silently(workdir):
    with pytest.raises(RuntimeError, match='step 3 was not saved, because step 4 is there'):
        save(workdir, 3)
    assert remove_after(Hosts(), workdir / 'checkpoints', 3) == [2]
    save(workdir, 3)
    assert resumed_step(workdir) == (3, [])


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(shutil, 'disk_usage', lambda _: types.SimpleNamespace(free=1000))
        with pytest.raises(OSError, match='No space left on device: .*/checkpoints'):
            save(tmp_path, 1)
        # A folder that processes share needs room for all shards, another one for those of its process.
        patch.setattr(checkpoint, '_own_bytes', lambda array: 0)
        with pytest.raises(OSError, match='No space left'):
            save(tmp_path, 1)
        checkpoints = Checkpointer(tmp_path / 'of_a_process', keep=2, is_shared=False)
        checkpoints.save(1, state(1), {'cursor': 1})
        checkpoints.close()
        # Compressed, a checkpoint is smaller than its arrays.
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(LIKE))
        patch.undo()
        patch.setattr(shutil, 'disk_usage', lambda _: types.SimpleNamespace(free=size))
        save(tmp_path, 1)
    assert saved_steps(tmp_path / 'checkpoints') == [1]


def test_a_process_killed_while_it_hashes_leaves_no_step(tmp_path, monkeypatch):
    """The step gets its name after its checksums, and what is left of it is no obstacle."""

    def killed(folder):
        raise OSError('killed')

    checkpoints = Checkpointer(tmp_path, keep=2)
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(checkpoint, 'write', killed)
        checkpoints.save(1, state(1), {'cursor': 1})
        checkpoints.wait()
    assert saved_steps(tmp_path / 'checkpoints') == []
    assert Checkpointer(tmp_path, keep=2).latest() is None
    save(tmp_path, 1)
    assert resumed_step(tmp_path) == (1, [])
    loop = json.loads((tmp_path / 'checkpoints/1/loop/metadata').read_text())
    assert loop['cursor'] == 1
