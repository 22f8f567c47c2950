"""The simulator's rules against the real scheduler: the same lengths must give the same calls of the device."""

import concurrent.futures
import dataclasses
import itertools

import numpy as np
import pytest
import scripted_rollouts
from scripted_rollouts import ScriptedSampler, scripted_policy

from benchmarks.machines.costs import Settings
from benchmarks.machines.engines import Device, Engine, Episode, Group, Tools
from zeroplay_jax.policy import sharding
from zeroplay_jax.rollout.call_syntax import syntax_of
from zeroplay_jax.rollout.environment import Environment, Limits
from zeroplay_jax.rollout.requests import Request
from zeroplay_jax.rollout.scheduler import Scheduler
from zeroplay_jax.rollout.slots import SlotPool
from zeroplay_jax.rollout.tool_workers import ToolWorkers
from zeroplay_jax.tools.search import SearchTool
from zeroplay_jax.types import POLICY

SHAPES = [
    # slots, context, chunk, fill_rows, burst, put_rows, tool threads
    (5, 160, 8, 2, 4, 2, 1),
    (3, 200, 16, 3, 16, 2, 2),
    (12, 130, 8, 4, 8, 3, 1),
]
PAGED_SHAPE = (10, 160, 8, 2, 4, 2, 2)
# Pages of 16 tokens: a rollout fills ten of them.
PAGED = {
    'pages': dict(page=16, token_budget=24),
    'few pages': dict(page=16, token_budget=24, pages=24),
}
TURN_TOKENS = 40


@pytest.fixture(scope='module')
def policy(tmp_path_factory):
    with scripted_policy(tmp_path_factory.mktemp('scripted') / 'policy') as parts:
        yield parts


class Recording:
    """Notes the calls of a sampler in `trace`."""

    def extend(self, params, slots, adapter):
        self.trace.append(('extend', list(slots)))
        super().extend(params, slots, adapter)

    def clone(self, rows):
        for source, siblings in itertools.groupby(rows, lambda row: row.source):
            self.trace.append(('clone', source, [row.slot for row in siblings]))
        super().clone(rows)

    def decode(self, *arguments):
        chunk = super().decode(*arguments)
        counts = np.asarray(chunk.count)
        self.trace.append(('decode', [(slot, int(n)) for slot, n in enumerate(counts) if n]))
        return chunk


class RecordingSampler(Recording, ScriptedSampler):
    pass


class RecordingDevice(Recording, Device):
    pass


class CountedScheduler(Scheduler):
    """A round with a decode call takes one unit of the workers' clock."""

    def _round(self):
        has_worked = super()._round()
        self.workers.now += has_worked
        return has_worked


class InlinePool:
    """In place of a tool's threads: the call runs at once."""

    def submit(self, function):
        future = concurrent.futures.Future()
        future.set_result(function())
        return future


class InlinePools(dict):
    def __contains__(self, key):
        return True

    def __missing__(self, key):
        return InlinePool()


class CountedWorkers(ToolWorkers):
    """Real tool calls whose durations are counted in rounds, so that the simulator can repeat them."""

    def __init__(self, latency, threads):
        super().__init__(True, 30.0)
        self._pools = InlinePools()
        self.now = 0.0
        self.latency = latency
        self.free = [0.0] * threads
        self.ends = {}

    def _start(self, tool, pending_calls):
        before = set(self._batches)
        super()._start(tool, pending_calls)
        (future,) = set(self._batches) - before
        thread = int(np.argmin(self.free))
        # Calls start at the end of the round.
        self.free[thread] = max(self.now + 1, self.free[thread]) + self.latency()
        self.ends[future] = self.free[thread]

    def finished(self):
        hidden = {f: batch for f, batch in self._batches.items() if self.ends[f] > self.now}
        self._batches = {f: batch for f, batch in self._batches.items() if f not in hidden}
        ended = super().finished()
        assert not self._batches  # calls run at once, so none that is due can be in progress
        self._batches = hidden
        return ended

    @property
    def futures(self):
        """Read when nothing decodes: the clock goes on to the next end of a call."""
        if self._batches:
            self.now = max(self.now, min(self.ends[future] for future in self._batches))
        return super().futures


def latencies(seed):
    rng = np.random.default_rng(seed)
    return lambda: float(rng.choice([0.5, 1.5, 2.5, 4.5, 9.5]))


def scripts(codec, seed):
    """Groups of turns, as tokens: two to four samples each; turns end by a tag, the end token or the limit."""
    rng = np.random.default_rng(seed)
    filler = codec.encode('b')
    groups = []
    for _ in range(6):
        samples = []
        for _ in range(rng.integers(1, 5)):
            turns = []
            for _ in range(rng.integers(0, 3)):
                turns.append(filler * rng.integers(1, 12) + codec.encode('<search>q</search>'))
            ends = [codec.encode('<answer>a</answer>'), [codec.eos_ids[0]], filler * TURN_TOKENS]
            turns.append(filler * rng.integers(1, 12) + ends[rng.integers(3)])
            samples.append(turns)
        groups.append((rng.integers(2, 40), samples))
    return groups


def play_for_real(policy, shape, seed, overlap=False, **pages):
    """Returns the calls of the real scheduler, the rollouts by group, and its counters."""
    codec, model, params = policy
    slots, context, chunk, fill_rows, burst, put_rows, threads = shape
    sizes = dict(slots=slots, context=context, chunk=chunk, fill_rows=fill_rows, burst=burst)
    sizes |= dict(put_rows=put_rows, eos=codec.eos_ids)
    config = dataclasses.replace(scripted_rollouts.CONFIG, **sizes, **pages)
    sampler = RecordingSampler(model, config, sharding.make_mesh())
    pool = SlotPool(sampler, seed=0)
    groups = scripts(codec, seed)
    numbered = [(i, *each) for i, (_, samples) in enumerate(groups) for each in enumerate(samples)]
    sampler.script(pool, {(index, sample): script for index, sample, script in numbered})
    sampler.trace = []
    scheduler = CountedScheduler({'policy': pool}, overlap=overlap)
    scheduler.workers = CountedWorkers(latencies(seed), threads)
    scheduler.weights.publish('policy', params, 0)
    lengths = np.random.default_rng(seed)

    passage = lambda: {'id': 0, 'title': 't', 'text': 'c' * int(lengths.integers(1, 40))}
    search = SearchTool(lambda queries: [[passage()] for _ in queries])
    limits = Limits(4, TURN_TOKENS, 60)
    env = Environment(codec, syntax_of('search_r1'), limits, {'search': search})
    filler = codec.encode('b')
    requests = []
    for index, (prompt, samples) in enumerate(groups):
        tokens = np.array(filler * prompt, np.int32)
        requests.append(Request('policy', tokens, (index,), env, len(samples)))
    results = scheduler.run([scheduler.rollout(request) for request in requests])
    return sampler.trace, results, scheduler.stats


class CountedCosts:
    """The host takes one unit of time in a round with a decode call, everything else none."""

    host = 1.0

    def extend(self):
        return 0.0

    def decode(self, steps):
        return 0.0

    def mixed(self, *arguments):
        return 0.0


def lengths_of(results, codec):
    """The lengths that the simulator gets: runs of tokens by one author, from the real rollouts."""
    groups = []
    for group in results:
        episodes = []
        for rollout in group:
            edges = np.flatnonzero(np.diff(rollout.source)) + 1
            prompt, *others = map(len, np.split(rollout.tokens, edges))
            is_full = rollout.finish == 'context'
            # The observation that did not fit is not in the tokens; a longer one than the slot stands for it.
            others += [1000 * is_full] * (len(others) % 2)
            turns = (*zip(others[::2], others[1::2]), *[(1, 0)] * is_full)
            episodes.append((turns, rollout.finish))
        groups.append((prompt, episodes))
    return groups


def simulated(groups, shape, seed, **options):
    slots, context, chunk, fill_rows, burst, _, threads = shape
    sizes = dict(slots=slots, context=context, chunk=chunk, fill_rows=fill_rows, burst=burst)
    settings = Settings(turn_tokens=TURN_TOKENS, **sizes, **options)
    device = RecordingDevice(settings, CountedCosts())
    device.trace = []
    engine = Engine(device, Tools(latencies(seed), threads))
    for prompt, episodes in groups:
        rollouts = tuple(Episode(turns, finish == 'eos') for turns, finish in episodes)
        engine.add(Group(prompt, rollouts))
    now = 0.0
    while engine.pool.active or engine.pool.queue:
        seconds = engine.round(now)
        # Nothing decodes: the next event is the end of a call.
        now = now + seconds if seconds else max(now, engine.tools.next_end or now)
    return engine


@pytest.mark.parametrize('shape', SHAPES, ids=str)
@pytest.mark.parametrize('seed', [1, 2])
def test_same_lengths_give_the_calls_of_the_real_scheduler(policy, shape, seed):
    trace, results, _ = play_for_real(policy, shape, seed)
    groups = lengths_of(results, policy[0])
    engine = simulated(groups, shape, seed)
    assert trace == engine.device.trace
    assert {call[0] for call in trace} == {'extend', 'clone', 'decode'}
    assert engine.generated == written_tokens(results)


def written_tokens(results):
    return sum(sum(rollout.source == POLICY) for group in results for rollout in group)


def without_empty_calls(trace):
    return [call for call in trace if call[0] == 'decode' and call[1]]


@pytest.mark.parametrize('overlap', [False, True])
@pytest.mark.parametrize('layout', PAGED)
def test_same_lengths_give_the_decode_calls_of_the_real_pages(policy, layout, overlap):
    slots, context, *_ = PAGED_SHAPE
    options = PAGED[layout]
    trace, results, stats = play_for_real(policy, PAGED_SHAPE, 3, overlap, **options)
    groups = lengths_of(results, policy[0])
    pages = dict(pages=slots * context // options['page']) | options
    engine = simulated(groups, PAGED_SHAPE, 3, overlap=overlap, **pages)
    assert without_empty_calls(trace) == without_empty_calls(engine.device.trace)
    assert engine.generated == written_tokens(results)
    evictions = engine.pool.placement.stats['evictions']
    assert evictions == stats['evictions']
    assert bool(evictions) == (layout == 'few pages')
