"""What two processes exchange: errors, shared results, rows, and checkpoints in one folder."""

import jax.numpy as jnp
from host_processes import finish, processes_of_script

from zeroplay_jax.learner import checkpoint
from zeroplay_jax.learner.checkpoint import Checkpointer

SCRIPT = """
import sys
from zeroplay_jax.runtime import hosts
from zeroplay_jax.runtime import devices
from zeroplay_jax.types import UserError
devices.connect('coordinator', f'localhost:{sys.argv[1]}', 2, int(sys.argv[2]), 10)
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
assert h.run_on_first(divmod, 7, 4) == [1, 3] and h.run_on_all(complex, imag=h.index).imag == h.index
assert h.gather_bytes(b'' if h.is_first else b'one' * 1000) == [b'', b'one' * 1000]
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
    h.run_on_all(breaks)
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
# Rows of several contexts, with and without a teacher's prompt, of which each process sampled every second one.
ROWS = """
import dataclasses
from zeroplay_jax.configs import common
from zeroplay_jax.learner.batch import pack
from zeroplay_jax.policy import sharding
from zeroplay_jax.selfplay.context import RolloutContext
from zeroplay_jax.types import Outcome, Row, Trajectory, Turn
def make_row(number):
    rng = np.random.default_rng(number)
    def trajectory(length, turns=()):
        source = np.minimum(np.arange(length) // 4, 2).astype(np.int8)
        tokens = rng.integers(0, 99, length, np.int32)
        logp = np.where(source == 1, rng.random(length, np.float32), 0).astype(np.float32)
        drawn = np.repeat(np.flatnonzero(source == 1), 2).astype(np.int32)
        kept = np.stack([drawn, rng.integers(0, 99, len(drawn), np.int32)], 1)
        return Trajectory(tokens, source, logp, turns, 'eos', 'w', 1, (0, number, 0), kept=kept)
    earlier = tuple(trajectory(9 + n) for n in range(number % 3))
    whole = dataclasses.replace(trajectory(10 + number, (Turn('said'),)), earlier=earlier)
    teacher_prompt = np.arange(3, dtype=np.int32) if number % 2 else None
    return Row('solver', whole, number % 2, number // 4, advantage=0.5, teacher_prompt=teacher_prompt)
whole = [make_row(number) for number in range(16)]
identities = [(0, number) for number in range(16)]
class Scheduler:
    def wait(self, run, on_episode_end, also=None):
        while also is not None and not also():
            pass
        return [Outcome([row]) for row, identity in zip(whole, identities) if h.owns(identity)]
context = RolloutContext(Scheduler(), {}, {}, hosts=h)
for has_others in (False, True):
    outcomes = context.await_episodes(identities, lambda: None, has_others)
    rows = [row for outcome in outcomes for row in outcome.rows]
    assert [row.trajectory.identity for row in rows] == [(0, number, 0) for number in range(16)]
    assert [row.trajectory.turns for row in rows] == [(Turn('said'),)] * 16
mesh = sharding.make_mesh(replica=2)
part = [[0, 1], [2, 3]][h.index]
options = dict(micro_rows=4, tokens=40, mode='token', total=99.0, teacher_tokens=50)
options |= dict(teacher_total=50.0, order='longest_first')
expected = pack(whole, **options)
packed = [sharding.held_rows(batch, sharding.rows(mesh)) for batch in pack(rows, **options)]
assert len(packed) == len(expected) > 1
gathered = jax.jit(lambda x: x, out_shardings=sharding.replicated(mesh))
for ours, theirs in zip(packed, expected):
    np.testing.assert_array_equal(ours.rollout, theirs.rollout[part])
    ours, theirs = ours.for_devices(2), theirs.for_devices(2)
    assert (theirs.kept >= 0).any()
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y[part]), ours, theirs)
    placed = sharding.put_rows(ours, sharding.rows(mesh))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(gathered(x)), y), placed, theirs)
    jax.tree.map(np.testing.assert_array_equal, sharding.local_rows(jax.tree.leaves(placed)), jax.tree.leaves(ours))
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


def test_exchanges_between_two_processes(tmp_path):
    checkpoints = Checkpointer(tmp_path, keep=3)
    for step in (2, 4):
        checkpoints.save(step, {'w': jnp.full(8, float(step))}, {'cursor': step})
    checkpoints.close()
    newest = tmp_path / 'checkpoints' / '4'
    names = checkpoint._names(newest)
    # Of these files the second process reads every second one, beginning with the second.
    name = names[1::2][-1]
    content = bytearray((newest / name).read_bytes())
    content[0] ^= 1
    (newest / name).write_bytes(content)
    script = SCRIPT + ROWS + DAMAGED + "print('fine')"
    out = finish(processes_of_script(script, str(tmp_path), name))
    assert all(text.strip().endswith('fine') for text in out), out
    assert (tmp_path / 'damaged' / '4').is_dir()
