"""The simulator of a plan's time: what it conserves, and the programs that it takes."""

import numpy as np
import pytest

from benchmarks.machines import costs, plan_time
from benchmarks.machines import workload as workloads
from benchmarks.machines.costs import Settings
from benchmarks.machines.engines import Device, Engine, Episode, Group, Tools
from benchmarks.machines.workload import Part, Workload

pytestmark = pytest.mark.results

SMALL = Workload(groups=8, samples=3)
PAGES = Settings(context=4096, token_budget=64, page=16, pages=256, slots=9)
SETTINGS = {'slots': Settings(slots=7, context=4096), 'pages': PAGES}


def machine(hosts=1):
    return costs.machine_costs('v5e', costs.published_model('qwen2.5-7b'), 4, hosts)


@pytest.mark.parametrize('name', SETTINGS)
@pytest.mark.parametrize('hosts', [1, 3])
def test_every_token_is_generated_once_and_every_rollout_ends_once(name, hosts, monkeypatch):
    engines = []

    class Spy(Engine):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            engines.append(self)

    monkeypatch.setattr(plan_time, 'Engine', Spy)
    groups = SMALL.draw(0)
    seconds = plan_time.play(machine(hosts), SETTINGS[name], groups, SMALL)
    assert sum(engine.generated for engine in engines) == workloads.tokens(groups)[1]
    assert len(engines) == hosts and sum(engine.ended for engine in engines) == 24
    # A rollout alone computes a token per step.
    longest = max(episode.written for group in groups for episode in group.episodes)
    assert longest * machine().step(1, 1) < seconds


def test_a_run_takes_the_seconds_of_its_parts():
    part = Part(groups=2, samples=3, trained=True, scored=2.0, repeat=5)
    host_costs = machine(hosts=2)
    workload = Workload(groups=2, samples=3)
    groups = workload.draw(plan_time.SEED)
    rollouts = plan_time.play(host_costs, PAGES, groups, workload)
    tokens = 5 * sum(workloads.tokens(groups))
    # A scored token takes one of the four passes of a trained one.
    update = 1.5 * tokens / costs.UPDATE_TOKENS / costs.PACKED * host_costs.update
    exchange = 5 * 6 * costs.EXCHANGE_SECONDS
    seconds = plan_time.run_seconds(host_costs, PAGES, SMALL, [part])
    assert seconds == pytest.approx(5 * rollouts + update + exchange)


class CountedCosts:
    """Costs 1 per token of a step's program, and notes the programs."""

    host = 0.0

    def __init__(self):
        self.programs = []

    def mixed(self, tokens, last, fed):
        self.programs.append((tokens, int(np.sum(fed))))
        return float(tokens)


def test_a_step_without_prefill_takes_the_smallest_program_that_suffices():
    settings = Settings(
        slots=6, context=200, page=16, pages=99, token_budget=32, decode_buckets=(2, 4), burst=4
    )
    counted = CountedCosts()
    engine = Engine(Device(settings, counted), Tools(lambda: 1.0, 1))
    episodes = tuple(Episode(((length, 0),), end_token=True) for length in (3, 9, 17, 26, 30))
    engine.add(Group(20, episodes))
    for number in range(60):
        engine.round(float(number))
    assert {tokens for tokens, _ in counted.programs} == {2, 4, 32}
    # Five rows are more than the largest bucket, fewer never take the whole step again.
    for tokens, fed in counted.programs:
        assert tokens == (32 if fed >= 5 else 2 if fed <= 2 else 4)
