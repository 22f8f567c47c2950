"""Two processes joined by gloo play what one would, from anybody's checkpoint, and nobody waits for the dead."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
from host_processes import HEARTBEAT, ROOT, RUN, finish, free_port, play, processes

from zeroplay_jax.learner import checksums
from zeroplay_jax.learner.checkpoint import Checkpointer
from zeroplay_jax.runtime import connect
from zeroplay_jax.types import UserError


@pytest.fixture(scope='module')
def two(tmp_path_factory):
    """Through the script that people use."""
    workdir = tmp_path_factory.mktemp('two') / 'run'
    command = ['launch/local_2proc.sh', '--', *RUN, f'--workdir={workdir}']
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {'XLA_FLAGS': ''}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return workdir, [done.stdout]


@pytest.fixture(scope='module')
def one(tmp_path_factory):
    workdir = tmp_path_factory.mktemp('one') / 'run'
    return workdir, finish(play(workdir, 1))


def read(workdir, name):
    return (workdir / name).read_text(encoding='utf-8')


def metrics(workdir):
    clocks = ('second', 'tokens_per')
    records = [json.loads(line) for line in read(workdir, 'metrics.jsonl').splitlines()]
    return [{k: v for k, v in r.items() if not any(c in k for c in clocks)} for r in records]


def moments(workdir):
    """Adam's first moments by checkpoint: running means of the gradients."""
    import jax
    import orbax.checkpoint as ocp

    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    for step in sorted(
        int(p.name) for p in (workdir / 'checkpoints').iterdir() if p.name.isdigit()
    ):
        path, reader = (
            (workdir / 'checkpoints' / str(step) / 'states').resolve(),
            ocp.StandardCheckpointer(),
        )
        tree = reader.restore(path, jax.tree.map(shape, reader.metadata(path).item_metadata.tree))
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        mu = [
            (str(path), np.asarray(x))
            for path, x in leaves
            if "'mu'" in str(path) or '.mu' in str(path)
        ]
        assert mu
        yield step, mu


def test_two_processes_play_what_one_plays(one, two):
    assert read(two[0], 'trajectories.jsonl') == read(one[0], 'trajectories.jsonl')
    reasons = {
        json.loads(line)['info'].get('rejected')
        for line in read(two[0], 'trajectories.jsonl').splitlines()
    }
    assert len(reasons - {None}) >= 1  # something was turned away, by both alike
    ours, theirs = metrics(two[0]), metrics(one[0])
    assert [r['step'] for r in ours] == list(range(len(theirs)))
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            near = (
                b[name] if isinstance(b[name], str) else pytest.approx(b[name], rel=2e-5, abs=1e-6)
            )
            assert a[name] == near, (a['step'], name)


def test_two_processes_learn_what_one_learns(one, two):
    learnt = 0
    for (step, ours), (again, theirs) in zip(moments(two[0]), moments(one[0]), strict=True):
        assert step == again
        for (name, a), (_, b) in zip(ours, theirs, strict=True):
            assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b), (step, name)
            learnt += bool(np.any(b))
    assert learnt


@pytest.mark.long
def test_a_signal_to_one_process_saves_the_same_step_in_all(two, tmp_path):
    """Whatever `checkpoint.every` is; the same command then ends as if nothing had happened."""
    workdir = tmp_path / 'run'
    running = play(workdir, 2, '--config.checkpoint.every=50')
    deadline = time.time() + 300
    while not (workdir / 'metrics.jsonl').exists() or len(metrics(workdir)) < 3:
        assert time.time() < deadline and all(p.poll() is None for p in running)
        time.sleep(0.05)
    running[1].send_signal(signal.SIGTERM)
    texts = [p.communicate(timeout=120)[0] for p in running]
    assert [p.returncode for p in running] == [75, 75], texts
    steps = [int(p.name) for p in (workdir / 'checkpoints').iterdir() if p.name.isdigit()]
    assert max(steps) == len(metrics(workdir))
    finish(play(workdir, 2))
    assert read(workdir, 'trajectories.jsonl') == read(two[0], 'trajectories.jsonl')
    assert metrics(workdir) == metrics(two[0])


@pytest.mark.long
@pytest.mark.parametrize('writers', [1, 2])
def test_a_checkpoint_serves_either_number_of_processes(writers, one, two, tmp_path):
    whole = (one, two)[writers - 1][0]
    workdir = tmp_path / 'run'
    shutil.copytree(whole, workdir)
    steps = sorted(
        (p for p in (workdir / 'checkpoints').iterdir() if p.name.isdigit()),
        key=lambda p: int(p.name),
    )
    for path in steps[2:]:
        shutil.rmtree(path)
    shutil.rmtree(workdir / 'policy')
    out = finish(play(workdir, 3 - writers))
    assert f'resumes at step {steps[1].name} of' in out[0]
    assert read(workdir, 'trajectories.jsonl') == read(whole, 'trajectories.jsonl')
    assert (workdir / 'policy' / 'policy' / 'model.safetensors').exists()


def test_when_a_process_dies_the_other_stops(tmp_path):
    running = play(tmp_path / 'run', 2, '--config.solver.steps=1000')
    deadline = time.time() + 300
    while not (tmp_path / 'run' / 'checkpoints' / '2').exists() and time.time() < deadline:
        assert all(p.poll() is None for p in running), running[0].communicate()[0][-2000:]
        time.sleep(0.2)
    running[1].send_signal(signal.SIGKILL)
    killed = time.time()
    out = running[0].communicate(timeout=300)[0]
    assert running[0].returncode != 0, out[-2000:]
    # The runtime notices within the heartbeat; then it unwinds.
    assert time.time() - killed < 3 * HEARTBEAT + 15


SCRIPT = """
import sys
from zeroplay_jax.runtime import connect, hosts
from zeroplay_jax.types import UserError
connect.connect('coordinator', f'localhost:{sys.argv[1]}', 2, int(sys.argv[2]), 10)
import asyncio
import jax, jax.numpy as jnp, numpy as np
h = hosts.Hosts()
# Unequal numbers of device calls between two exchanges.
x = jnp.ones(4)
for _ in range(3 if h.is_first else 17):
    x = jax.jit(jnp.cos)(x)
assert h.gather({'at': h.index, 'x': np.float32(1.5)}) == [{'at': 0, 'x': 1.5}, {'at': 1, 'x': 1.5}]
assert h.gather('é' * (1 + 1000 * h.index)) == ['é', 'é' * 1001]
assert h.run_on_all_and_gather(lambda: h.index) == [0, 1]
# Unequal messages, none, and one to oneself.
messages = [b'to 0', b'to 1' * 1000] if h.is_first else [b'', b'mine']
assert h.exchange(messages) == ([b'to 0', b''] if h.is_first else [b'to 1' * 1000, b'mine'])
assert h.exchange([b'', b'']) == [b'', b'']
assert h.collect({'at': h.index}) == ([{'at': 0}, {'at': 1}] if h.is_first else [])
def fails():
    if not h.is_first:
        raise UserError('no room')
try:
    h.run_on_all_and_gather(fails)
    raise SystemExit('nothing was raised')
except UserError as error:
    assert str(error) == ('process 1: no room' if h.is_first else 'no room'), error
def breaks():
    if not h.is_first:
        raise KeyError('gone')
try:
    h.run_on_all_and_gather(breaks)
    raise SystemExit('nothing was raised')
except (RuntimeError, KeyError) as error:
    assert (str(error) == "process 1: 'gone'") if h.is_first else isinstance(error, KeyError), error
async def board():
    mine, other = (7, h.index), (7, 1 - h.index)
    waiting = asyncio.ensure_future(h.await_shared(other))
    await asyncio.sleep(0.2 * h.index)
    h.share(mine, ['from', h.index])
    h.share(mine, 'too late')
    assert await h.await_shared(mine) == ['from', h.index]
    assert await waiting == ['from', 1 - h.index]
for _ in range(2):  # names can be used again once the board was cleared
    asyncio.run(board())
    h.gather(None)
    h.clear_shared(keep=7)  # of a step in progress nothing is lost
    assert set(h._shared) == {(7, h.index)} and asyncio.run(h.await_shared((7, 1 - h.index)))
    h.gather(None)
    h.clear_shared(keep=8)
    assert not h._shared
    h.gather(None)
# A meeting is complete when all have arrived, and nobody waits for it.
import time
for _ in range(2):
    meeting = h.meeting()
    if h.is_first:
        assert not meeting.is_complete()
    h.gather(None)
    meeting.arrive()
    while not meeting.is_complete():
        time.sleep(0.01)
    h.gather(None)
    meeting.close()
"""
# Rows of several contexts, with and without a teacher's prompt, of which each process has every second one.
ROWS = """
import dataclasses, json
from zeroplay_jax.configs import common
from zeroplay_jax.learner.packing import pack
from zeroplay_jax.policy import sharding
from zeroplay_jax.selfplay import batch_filter, row_exchange
from zeroplay_jax.selfplay.row_metrics import rows_per_context
from zeroplay_jax.types import Outcome, Row, Trajectory, TrajectorySummary, Turn
def make_row(number):
    rng = np.random.default_rng(number)
    def trajectory(length, turns=()):
        source = np.minimum(np.arange(length) // 4, 2).astype(np.int8)
        tokens = rng.integers(0, 99, length, np.int32)
        logp = np.where(source == 1, rng.random(length, np.float32), 0).astype(np.float32)
        return Trajectory(tokens, source, logp, turns, 'eos', 'w', 1, (0, number, 0))
    earlier = tuple(trajectory(9 + n) for n in range(number % 3))
    whole = dataclasses.replace(trajectory(10 + number, (Turn('said'),)), earlier=earlier)
    teacher_prompt = np.arange(3, dtype=np.int32) if number % 2 else None
    return Row('solver', whole, number % 2, number // 4, advantage=0.5, teacher_prompt=teacher_prompt)
whole = [make_row(number) for number in range(16)]
local = {number: Outcome([row]) for number, row in enumerate(whole) if h.owns((0, number))}
summaries = [[number, row_exchange.outcome_summary(outcome)] for number, outcome in local.items()]
rows = [None] * len(whole)
for process, gathered in enumerate(h.gather(summaries)):
    for number, summary in gathered:
        (rows[number],) = row_exchange.whole_outcome(summary, process, local.get(number)).rows
        rows[number].advantage = 0.5
assert sum(isinstance(row.trajectory, TrajectorySummary) for row in rows) == 8
mesh = sharding.make_mesh(replica=2)
part = row_exchange.batch_part(h, mesh, 4)
assert part.rows == [[0, 1], [2, 3]][h.index]
options = dict(micro_rows=4, tokens=40, mode='token', total=99.0, teacher_tokens=50)
options |= dict(teacher_total=50.0, order='longest_first')
expected = pack(rows_per_context(whole), **options)
packed = pack(rows_per_context(rows), part=part, **options)
assert len(packed) == len(expected) > 1
gathered = jax.jit(lambda x: x, out_shardings=sharding.replicated(mesh))
for ours, theirs in zip(packed, expected):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y[part.rows]), ours, theirs)
    placed = sharding.put_rows(ours, sharding.rows(mesh))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(gathered(x)), y), placed, theirs)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(sharding.local_rows(x), y), placed, ours)
# Groups that the filter carries over stay where they are; a checkpoint gets all of them, and restores them everywhere.
config = common.get_config()
config.solver.update(batch=1, filter_groups=True)
group_filter = batch_filter.GroupFilter(config, h)
group_filter.select('solver', rows, 1)
state = group_filter.state()
assert len(state['solver']) == (12 if h.is_first else 0)
state = h.gather(json.loads(json.dumps(state)))[0]
assert [row['trajectory']['identity'][1] for row in state['solver']] == list(range(4, 16))
again = batch_filter.GroupFilter(config, h)
again.restore(state)
(restored, _, _), (kept, _, _) = again.select('solver', [], 1), group_filter.select('solver', [], 1)
assert [row.process for row in restored] == [None] * 4 and [row.process for row in kept] == [0, 1] * 2
for row in restored:
    row.advantage = 0.5
for ours, theirs in zip(pack(rows_per_context(restored), part=part, **options),
                        pack(rows_per_context(whole[4:8]), **options), strict=True):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y[part.rows]), ours, theirs)
"""
# A damaged newest checkpoint: each process reads half of the files, and all fall back to the same step.
DAMAGED = """
import pathlib
from zeroplay_jax.learner.checkpoint import Checkpointer, set_damaged_aside
workdir = pathlib.Path(sys.argv[3])
(line,) = set_damaged_aside(h, workdir)
assert line.startswith(f'checkpoint 4 is damaged: {sys.argv[4]} differs from its checksum'), line
assert h.gather(line) == [line] * 2
checkpoints = Checkpointer(workdir, keep=3)
like = {'w': jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding.replicated(mesh))}
states, loop = checkpoints.restore(like)
np.testing.assert_array_equal(np.asarray(states['w']), np.full(8, 2.0))
assert loop == {'cursor': 2} and set_damaged_aside(h, workdir) == []
# The step can be saved again.
checkpoints.save(4, states, {'cursor': 4})
checkpoints.close()
assert set_damaged_aside(h, workdir) == []
"""
# A run in a bucket: each process has a folder of its own and saves its own shards; other machines get those of both.
FOLDERS = """
import pathlib
sys.path.insert(0, 'tests')
from folder_bucket import FolderBucket
from zeroplay_jax.configs import quickstart
from zeroplay_jax.learner import checksums, mirror_restore
from zeroplay_jax.retrieval import objects
from zeroplay_jax.training import remote_run
import orbax.checkpoint as ocp
root = pathlib.Path(sys.argv[3])
bucket = FolderBucket(root / 'bucket')
objects.open_bucket = lambda name: bucket
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
def play(name, steps):
    config.bucket.spool = str(root / name)
    with remote_run.opened(h, 'gs://bucket/runs/a', config) as place:
        place.workdir.mkdir(parents=True, exist_ok=True)
        (place.workdir / 'config.json').write_text('{}')
        checkpoints = Checkpointer(place.workdir, 2, is_shared=place.is_shared)
        restored = None
        if checkpoints.latest():
            like = jax.tree.map(ocp.utils.to_shape_dtype_struct, states_of(0))
            restored = checkpoints.restore(like)
        for step in steps:
            checkpoints.save(step, states_of(step), {'cursor': step})
            checkpoints.wait()
            place.wait()
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
create = checksums.SealedTemporaryPath.create
async def create_late(path):
    await asyncio.sleep(0.2 * h.index)
    return await create(path)
checksums.SealedTemporaryPath.create = create_late
place, restored = play('one', [2, 4])
checksums.SealedTemporaryPath.create = create
assert restored is None and place.damage_lines == []
# On the same machines, and on two others.
for name in ('one', 'two'):
    place, restored = play(name, [])
    check(restored, 4)
    # The folder has the files of both processes, with their checksums.
    assert checksums.find_damage(place.workdir / 'checkpoints' / '4') == ''
assert place.workdir.name == 'a' and place.workdir.parent.name.endswith(f'.process_{h.index}')
# A full disk of one process ends both with its line.
install = mirror_restore._install
def install_in_full_folder(*paths):
    raise OSError(28, 'No space left on device')
if not h.is_first:
    mirror_restore._install = install_in_full_folder
try:
    play('full', [])
    raise AssertionError('no error')
except UserError as error:
    assert 'No space left on device' in str(error), error
    assert str(error).startswith('process 1: ') == h.is_first, error
mirror_restore._install = install
# A missing shard of one process: both go back to the step before.
h.gather(None)
(shard,) = [entry.name for entry in bucket.list('runs/a/checkpoints/4-') if '/split/1' in entry.name]
h.gather(None)
if h.is_first:
    bucket.delete(shard)
place, restored = play('three', [6])
check(restored, 2)
assert len(place.damage_lines) == h.is_first
for line in place.damage_lines:
    assert 'checkpoint 4 of gs://bucket/runs/a is damaged' in line and 'split/1' in line, line
assert sorted(place.mirror._remote.manifests()) == [2, 6]
print('fine')
"""


def test_exchanges_between_two_processes(tmp_path):
    checkpoints = Checkpointer(tmp_path, keep=3)
    for step in (2, 4):
        checkpoints.save(step, {'w': jnp.full(8, float(step))}, {'cursor': step})
    checkpoints.close()
    newest = tmp_path / 'checkpoints' / '4'
    names = checksums._names(newest)
    # Of these files the second process reads every second one, beginning with the second.
    name = names[1::2][-1]
    content = bytearray((newest / name).read_bytes())
    content[0] ^= 1
    (newest / name).write_bytes(content)

    def joined(port, i):
        return [str(port), str(i), str(tmp_path), name]

    out = finish(processes(['-c', SCRIPT + ROWS + DAMAGED + FOLDERS], 2, joined))
    assert all(text.strip().endswith('fine') for text in out), out
    assert (tmp_path / 'damaged' / '4').is_dir()
    # One process resumes what two have saved in folders of their own.
    (folder,) = (tmp_path / 'two').glob('*.process_0/a')
    like = {'split': jnp.zeros((2, 3)), 'equal': jnp.zeros((4, 4), int), 'count': jnp.int32(0)}
    states, loop = Checkpointer(folder, keep=2).restore(like)
    np.testing.assert_array_equal(states['split'], np.arange(6).reshape(2, 3) + 4)
    assert loop == {'cursor': 4} and states['count'] == 4 and (states['equal'] == 4).all()


def test_what_goes_wrong_in_one_process_ends_both_with_its_line(tmp_path):
    """Evaluation questions are too long to be asked: one process reports it, the other names that process."""
    started = time.time()
    running = play(
        tmp_path / 'run', 2, '--config.rollout.prompt_tokens=26', '--config.eval.questions=1'
    )
    out = [p.communicate(timeout=300)[0] for p in running]
    assert [p.returncode for p in running] == [2, 2], out
    assert all('config.rollout.prompt_tokens=26: too short for ' in text for text in out)
    assert sum('process ' in text.strip().split('\n')[-1] for text in out) == 1
    assert time.time() - started < 200


@pytest.mark.long
def test_two_processes_that_train_nothing_both_stop_with_status_3(tmp_path):
    workdir = tmp_path / 'run'
    # Every rollout ends after its first token, and those that end at a limit are not trained on.
    running = play(
        workdir,
        2,
        '--config.rollout.turn_tokens=1',
        '--config.rollout.truncated=drop',
        '--config.stop_after_empty_steps=2',
    )
    out = [p.communicate(timeout=600)[0] for p in running]
    assert [p.returncode for p in running] == [3, 3], out
    summary = json.loads(read(workdir, 'summary.json'))
    assert summary['trained'] is False and '2 steps in a row' in summary['stopped']
    assert any(summary['stopped'] in text for text in out)
    assert not (workdir / 'policy').exists()


BREAKS = """
import sys
from zeroplay_jax.runtime import connect, hosts
from zeroplay_jax.configuration import entry
connect.connect('coordinator', f'localhost:{sys.argv[1]}', 2, int(sys.argv[2]), 10)
def main(_):
    h = hosts.Hosts()
    h.gather(None)
    if not h.is_first:
        raise ValueError('nobody thought of this')
    h.gather(None)
entry.command_line.parse_flags = lambda argv: entry.app.flags.FLAGS(argv[:1])
entry.run_command('breaks', main)
"""


def test_an_error_that_nobody_shares_does_not_hold_its_process_up():
    started = time.time()
    running = processes(['-c', BREAKS], 2, lambda port, i: [str(port), str(i)])
    out = running[1].communicate(timeout=120)[0]
    assert running[1].returncode == 1 and 'nobody thought of this' in out
    assert running[0].wait(timeout=120) != 0
    assert time.time() - started < 100  # JAX's own end would wait for five minutes


def test_a_port_that_is_taken_is_one_line(tmp_path):
    with socket.socket() as taken:
        taken.bind(('', 0))
        taken.listen()
        place = f'localhost:{taken.getsockname()[1]}'
        fields = dict(mode='coordinator', coordinator=place, processes=2, process=0)
        extra = [f'--config.distributed.{k}={v}' for k, v in fields.items()]
        (alone,) = processes(
            ['-m', 'zeroplay_jax.main', *RUN, f'--workdir={tmp_path}/run', *extra], 1, lambda *_: []
        )
        out = alone.communicate(timeout=120)[0]
    assert (
        alone.returncode == 2 and 'process 0 cannot open that port' in out.strip().split('\n')[-1]
    )


def test_a_process_zero_that_never_comes_is_one_line(monkeypatch):
    place = f'localhost:{free_port()}'
    monkeypatch.setattr(connect, 'JOIN_SECONDS', 0.1)
    with pytest.raises(UserError, match=f'coordinator={place}: process 0 did not answer'):
        connect.connect('coordinator', place, 2, 1, HEARTBEAT)


def test_processes_that_never_come_are_one_line():
    lines = (
        'from zeroplay_jax.runtime import connect',
        'connect.JOIN_SECONDS = 3.0',
        "connect.connect('coordinator', '{}', 2, 0, 10)",
    )
    code = '\n'.join(lines)
    call = [sys.executable, '-c', code.format(f'localhost:{free_port()}')]
    alone = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert alone.returncode == 2 and alone.stderr.count('\n') == 1, alone.stderr
    assert 'not all processes came together within 3 s' in alone.stderr


def test_a_process_zero_that_comes_late_is_waited_for():
    with socket.socket() as late:
        late.bind(('localhost', 0))
        place = f'localhost:{late.getsockname()[1]}'
        opens = threading.Timer(1.0, late.listen)
        opens.start()
        started = time.monotonic()
        connect._wait_until_open(place, 60.0)
        opens.join()
        assert 0.9 < time.monotonic() - started < 30


def test_a_workdir_that_is_taken_is_one_line_in_every_process(tmp_path):
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / 'thesis.tex').write_text('mine')
    running = play(tmp_path / 'run', 2)
    out = [p.communicate(timeout=120)[0] for p in running]
    assert [p.returncode for p in running] == [2, 2]
    assert all("holds 'thesis.tex' but no config.json" in text for text in out)
