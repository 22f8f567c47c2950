"""Plays training steps on the hosts of a machine: every host has an engine and its share of the prompts."""

from __future__ import annotations

import collections
import dataclasses
import heapq
from collections.abc import Iterator, Sequence

import numpy as np
from scipy import optimize

from benchmarks import slices_workload, tpu_pages
from benchmarks.slices_costs import ROUND_SECONDS, CallCosts, MachineCosts, Settings
from benchmarks.slices_engines import Device, Engine, Episode, Group, Tools
from benchmarks.slices_workload import Workload
from benchmarks.tpu_shapes import generation

ENGINES = ('slots', 'pages')
# Causes of a step's seconds, in the order in which they are printed.
CAUSES = (
    'prefill',
    'decode',
    'cache write',
    'host',
    'tool wait',
    'tail',
    'other hosts',
    'update',
    'exchange',
)
# Tool calls that run beside each other.
TOOL_THREADS = 16
# Steps of a decode call that the host reads while the next one runs.
OVERLAPPED_BURST = 4


@dataclasses.dataclass(frozen=True)
class Result:
    """One play.

    Attributes:
      seconds: seconds per step by cause, averaged over the hosts; all but 'update' and 'exchange' add up to the next.
      rollout_seconds: seconds in which a step samples.
      tokens_per_second: generated tokens per second of sampling, of all hosts.
      useful_rows: share of the steps of all rows of the decode programs whose token belongs to a rollout.
      useful_tokens: share of the tokens computed by prefill calls or paged steps that belong to a rollout.
      bound: seconds below which no scheduler comes, see `bound_seconds`.
      concurrent: most rollouts in progress on a host.
      evictions: rollouts per step that lost their pages.
    """

    seconds: dict[str, float]
    rollout_seconds: float
    tokens_per_second: float
    useful_rows: float
    useful_tokens: float
    bound: float
    concurrent: int
    evictions: float


class _Host:
    """A host during a play: its engine, its clock and its seconds by cause."""

    def __init__(self, engine: Engine, steps: list[list[Group]]):
        self.engine = engine
        self.steps = steps
        self.now = 0.0
        self.released = 0
        self.peak = 0
        self.concurrent = 0
        self.seconds: collections.defaultdict[str, float] = collections.defaultdict(float)

    def release(self, step: int) -> None:
        """Queues the groups of a step."""
        for group in self.steps[step]:
            self.engine.add(group)
        self.released = step + 1
        self.peak = 0

    @property
    def is_in_tail(self) -> bool:
        """Whether nothing is left to admit, and fewer than half of the rollouts are left."""
        return not self.engine.pool.queue and 2 * self.engine.pool.active < self.peak

    def round(self) -> float:
        """Plays one round; returns its seconds."""
        engine = self.engine
        before = engine.device.seconds.copy()
        seconds = engine.round(self.now)
        active = engine.pool.active
        self.peak = max(self.peak, active)
        self.concurrent = max(self.concurrent, active)
        is_in_tail = self.is_in_tail
        for cause, total in engine.device.seconds.items():
            self.seconds['tail' if is_in_tail else cause] += total - before[cause]
        self.now += seconds
        return seconds

    def idle(self, until: float) -> None:
        """Waits for a tool or for other hosts."""
        cause = 'other hosts'
        if self.engine.pool.active:
            cause = 'tail' if self.is_in_tail else 'tool wait'
        self.seconds[cause] += until - self.now
        self.now = until


class _Play:
    """Steps in progress on all hosts. Step s begins when step s - 1 - `ahead` has ended everywhere."""

    def __init__(self, hosts: list[_Host], steps: Sequence[list[Group]], ahead: int):
        self.hosts = hosts
        self.ahead = ahead
        self.count = len(steps)
        self.left = [sum(len(group.episodes) for group in step) for step in steps]
        # When each step ended.
        self.ends: list[float] = []

    def run(self) -> None:
        """Plays all steps."""
        waiting: list[int] = []
        # Hosts act in the order of their clocks.
        clocks = [(0.0, index) for index in range(len(self.hosts))]
        while clocks:
            _, index = heapq.heappop(clocks)
            host = self.hosts[index]
            if self._advance(host):
                heapq.heappush(clocks, (host.now, index))
            elif host.released < self.count:
                waiting.append(index)
            if self._end_steps():
                for other in waiting:
                    heapq.heappush(clocks, (self.hosts[other].now, other))
                waiting = []
        if len(self.ends) < self.count:
            raise RuntimeError('a rollout can never be served: the cache is too small for it')

    def _begins(self, step: int) -> float | None:
        """When a step may begin; None if that is not known yet."""
        needed = step - 1 - self.ahead
        if needed < 0:
            return 0.0
        return self.ends[needed] if needed < len(self.ends) else None

    def _advance(self, host: _Host) -> bool:
        """Plays one round or waits for the next event; returns False if the host has to wait for other hosts."""
        while host.released < self.count:
            begin = self._begins(host.released)
            if begin is None or begin > host.now:
                break
            host.release(host.released)
        seconds = host.round()
        for step in host.engine.ended:
            self.left[step] -= 1
        if seconds or host.engine.ended:
            return True
        events = [host.engine.tools.next_end]
        if host.released < self.count:
            events.append(self._begins(host.released))
        known = [event for event in events if event is not None]
        if not known:
            return False
        host.idle(min(known))
        return True

    def _end_steps(self) -> bool:
        """Notes the ends of steps without rollouts left; returns whether there was one."""
        before = len(self.ends)
        while len(self.ends) < self.count and not self.left[len(self.ends)]:
            # The host that ended the last rollout has the latest clock of those that took part.
            self.ends.append(max(host.now for host in self.hosts))
        return len(self.ends) > before


def default_settings(machine: MachineCosts, engine: str, **overrides) -> Settings:
    """Returns the settings of an engine: slots of the compile table, or pages that take their memory."""
    slots = Settings(**(dict(slots=machine.slots) | overrides))
    if engine == 'slots':
        return slots
    pages = tpu_pages.paged(slots, generation(machine.machine))
    return dataclasses.replace(
        pages,
        # Where steps were compiled, only those; elsewhere a step takes its tokens or its weights at the peak rate.
        decode_buckets=tuple(
            size for size in pages.decode_buckets if not machine.pages or size in machine.pages
        ),
        tool_threads=TOOL_THREADS,
        # Short calls, because the device does not wait for the host between them.
        overlap=True,
        burst=OVERLAPPED_BURST,
    )


def play(
    machine: MachineCosts,
    settings: Settings,
    steps: Sequence[list[Group]],
    workload: Workload,
    ahead: int = 0,
    seed: int = 0,
) -> Result:
    """Plays steps and returns the figures of one.

    Args:
      machine: costs.
      settings: of every host.
      steps: groups of every step. With `ahead` the first and the last step are not counted.
      workload: whose tools are called.
      ahead: steps that may begin before the current one has ended.
      seed: of the latencies.
    """
    costs = CallCosts(machine, settings, ROUND_SECONDS)
    hosts = []
    for index in range(machine.hosts):
        tools = Tools(workload.latencies((seed, index)), settings.tool_threads)
        # Episodes are dealt out in turn, see `runtime.hosts.Hosts.owns`.
        share = [step[index :: machine.hosts] for step in steps]
        hosts.append(_Host(Engine(Device(settings, costs), tools), share))
    game = _Play(hosts, steps, ahead)
    game.run()
    # Between the first and the last step all hosts have work of two steps.
    counted = list(steps[1:-1]) if ahead else list(steps)
    begin, end = (game.ends[0], game.ends[-2]) if ahead else (0.0, game.ends[-1])
    rollout_seconds = (end - begin) / len(counted)
    written = sum(slices_workload.tokens(step)[1] for step in counted)
    paged = settings if settings.is_paged else default_settings(machine, 'pages')
    costs = CallCosts(machine, paged, ROUND_SECONDS)
    bounds = []
    for host in hosts:
        share = host.steps[1:-1] if ahead else host.steps
        of_steps = [
            bound_seconds(costs, paged, groups, workload.latency[0], ahead) for groups in share
        ]
        bounds.append(sum(of_steps) / len(of_steps))
    return _result(machine, hosts, steps, rollout_seconds, written / len(counted), max(bounds))


def _result(
    machine: MachineCosts,
    hosts: list[_Host],
    steps: Sequence[list[Group]],
    rollout_seconds: float,
    written: float,
    bound: float,
) -> Result:
    """Returns the figures of a play from its hosts."""
    totals: collections.defaultdict[str, float] = collections.defaultdict(float)
    for host in hosts:
        for cause, spent in host.seconds.items():
            totals[cause] += spent
    # Hosts that end early wait for the slowest one.
    longest = max(host.now for host in hosts)
    totals['other hosts'] += sum(longest - host.now for host in hosts)
    scale = rollout_seconds / sum(totals.values())
    seconds = {cause: totals[cause] * scale for cause in CAUSES if totals[cause]}
    prompts, wrote, read = slices_workload.tokens(steps[0])
    rollouts = sum(len(group.episodes) for group in steps[0])
    seconds['update'] = machine.update_seconds(prompts + wrote + read)
    seconds['exchange'] = machine.exchange_seconds(rollouts)
    engines = [host.engine for host in hosts]
    devices = [engine.device for engine in engines]
    row_steps = sum(device.row_steps for device in devices)
    computed = sum(device.computed for device in devices)
    evictions = sum(engine.pool.placement.stats['evictions'] for engine in engines)
    return Result(
        seconds=seconds,
        rollout_seconds=rollout_seconds,
        tokens_per_second=written / rollout_seconds,
        useful_rows=sum(engine.generated for engine in engines) / row_steps,
        useful_tokens=sum(device.wanted for device in devices) / computed,
        bound=bound,
        concurrent=max(host.concurrent for host in hosts),
        evictions=evictions / len(steps),
    )


def bound_seconds(
    costs: CallCosts,
    settings: Settings,
    groups: Sequence[Group],
    latency: float = 0.0,
    ahead: int = 0,
) -> float:
    """Returns seconds below which no scheduler, even one that knows all lengths, plays a host's rollouts over pages.

    The larger one of two bounds. (1) The steps of all rollouts: every token is computed once, prefilled ones in steps
    of the whole budget, and a step samples at most one token of a rollout, so there are as many steps as the longest
    rollout needs. The least seconds of so many steps with so much room, in which parts of steps count too, are a linear
    program over the numbers of steps of every size. Attention is added. (2) A rollout alone: its own steps, the
    smallest that do it, and its tools.

    Args:
      costs, settings: of a paged engine.
      groups: of the host.
      latency: least seconds of a tool call.
      ahead: training steps that may begin before the current one has ended: a rollout lasts one period more for each.
    """
    budget = settings.token_budget
    sizes = np.array((*settings.decode_buckets, budget))
    none = np.zeros(0, int)
    seconds = []
    for size in sizes:
        seconds.append(costs.mixed(size, none, none))
    tokens = prefilled = sampled = most_steps = 0
    attention = longest = 0.0
    for group in groups:
        for sample, episode in enumerate(group.episodes):
            own_steps, own_seconds = 0, latency * (len(episode.turns) - 1)
            for start, read, end in _turns(group.prompt, episode):
                steps = -(-(read - start) // budget) + end - read
                # The last token alone needs no step that prefills.
                prefills = -(-(read - start - 1) // budget)
                own_steps += steps
                own_seconds += prefills * seconds[-1] + (steps - prefills) * min(seconds)
                own_seconds += costs.attention(start, read, end)
                # Samples share the prompt but for its last token.
                new = read - 1 if sample and not start else start
                tokens += end - new
                prefilled += read - 1 - new
                sampled += end - read + 1
                attention += costs.attention(new, read, end)
            most_steps = max(most_steps, own_steps)
            longest = max(longest, own_seconds)
    periods = 1 + ahead
    room = np.stack([sizes, sizes * (sizes == budget), np.ones(len(sizes))])
    needed = np.array([tokens, prefilled, max(most_steps / periods, sampled / settings.slots)])
    # The constraints of linprog are upper bounds.
    work = optimize.linprog(seconds, A_ub=-room, b_ub=-needed).fun
    return max(float(work) + attention, longest / periods)


def _turns(prompt: int, episode: Episode) -> Iterator[tuple[int, int, int]]:
    """Yields three places of every turn: it reads from the first to the second, then computes a token at a time."""
    start, read = 0, prompt
    for written, observed in episode.turns:
        # The last token of a turn is computed with the observation.
        end = read + written - 1
        yield start, read, end
        start, read = end, end + 1 + observed
