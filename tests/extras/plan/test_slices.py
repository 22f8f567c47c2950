"""The simulator of a plan's time: what it conserves."""

import pytest

from benchmarks.machines import costs, plan_time
from benchmarks.machines import workload as workloads
from benchmarks.machines.costs import Settings
from benchmarks.machines.engines import Engine
from benchmarks.machines.workload import Workload

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
