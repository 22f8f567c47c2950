"""Plays training steps on the hosts of a machine: every host has an engine and its share of the prompts."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import numpy as np
from scipy import optimize

from benchmarks.slices_costs import CallCosts, MachineCosts, Settings
from benchmarks.slices_engines import Device, Engine, Episode, Group, Tools
from benchmarks.slices_workload import Workload

# Tool calls that run beside each other.
TOOL_THREADS = 16


class _Host:
    """A host during a play: its engine, its share of the groups and its clock."""

    def __init__(self, engine: Engine, steps: list[list[Group]]):
        self.engine = engine
        self.steps = steps
        self.now = 0.0
        self.released = 0

    def release(self, step: int) -> None:
        """Queues the groups of a step."""
        for group in self.steps[step]:
            self.engine.add(group)
        self.released = step + 1


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
        seconds = host.engine.round(host.now)
        host.now += seconds
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
        host.now = min(known)
        return True

    def _end_steps(self) -> bool:
        """Notes the ends of steps without rollouts left; returns whether there was one."""
        before = len(self.ends)
        while len(self.ends) < self.count and not self.left[len(self.ends)]:
            # The host that ended the last rollout has the latest clock of those that took part.
            self.ends.append(max(host.now for host in self.hosts))
        return len(self.ends) > before


def play(
    machine: MachineCosts,
    settings: Settings,
    steps: Sequence[list[Group]],
    workload: Workload,
    ahead: int = 0,
    seed: int = 0,
) -> float:
    """Plays steps and returns the seconds in which one of them samples.

    Args:
      machine: costs.
      settings: of every host.
      steps: groups of every step. With `ahead` the first and the last step are not counted.
      workload: whose tools are called.
      ahead: steps that may begin before the current one has ended.
      seed: of the latencies.
    """
    costs = CallCosts(machine, settings)
    hosts = []
    for index, share in enumerate(shares(steps, machine.hosts)):
        tools = Tools(workload.latencies((seed, index)), TOOL_THREADS)
        hosts.append(_Host(Engine(Device(settings, costs), tools), share))
    game = _Play(hosts, steps, ahead)
    game.run()
    if not ahead:
        return game.ends[-1] / len(steps)
    # Between the first and the last step all hosts have work of two steps.
    return (game.ends[-2] - game.ends[0]) / (len(steps) - 2)


def shares(steps: Sequence[list[Group]], hosts: int) -> list[list[list[Group]]]:
    """Returns, per host, its groups of every step: they are dealt out in turn, see `runtime.hosts.Hosts.owns`."""
    return [[step[index::hosts] for step in steps] for index in range(hosts)]


def bound(
    machine: MachineCosts,
    settings: Settings,
    steps: Sequence[list[Group]],
    workload: Workload,
    ahead: int = 0,
) -> float:
    """Returns seconds of a step below which no scheduler over pages comes; arguments as of `play`."""
    costs = CallCosts(machine, settings)
    of_hosts = []
    for share in shares(steps, machine.hosts):
        seconds = []
        for groups in share[1:-1] if ahead else share:
            seconds.append(bound_seconds(costs, settings, groups, workload.latency[0], ahead))
        of_hosts.append(float(np.mean(seconds)))
    return max(of_hosts)


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
