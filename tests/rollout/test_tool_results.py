"""Results of tools cost one device call per step."""

import dataclasses
import types

import numpy as np
import pytest
from counted_device import CountedDevice, CountedRole

from zeroplay_jax.rollout.requests import Request
from zeroplay_jax.rollout.sampler import SamplerConfig
from zeroplay_jax.rollout.scheduler import Scheduler
from zeroplay_jax.rollout.slots import SlotPool
from zeroplay_jax.selfplay.library import SearchableCorpus, TrainingCorpus
from zeroplay_jax.tools.search import SearchTool
from zeroplay_jax.types import ToolCall

CONFIG = SamplerConfig(
    slots=6, context=128, chunk=32, fill_rows=6, burst=8, put_rows=6, put_tokens=32
)
TURNS = 4


class Talk(CountedRole):
    """A role whose turns call the tool; every third rollout's calls are refused instead."""

    limits = types.SimpleNamespace(max_turns=TURNS, turn_tokens=20, response_tokens=0)

    def __init__(self, identity, tool):
        self.identity, self.tools = identity, {tool.name: tool}
        self.tool = tool.name

    def call(self):
        refused = 'malformed' if self.identity % 3 == 2 else None
        return ToolCall(self.tool, {'query_list': [str(self.identity)]}, error=refused)

    def with_result(self, call, result):
        return dataclasses.replace(call, text='found', error=result.error)

    def observation(self, call, number=0):
        return np.zeros(3 + self.identity % 5, np.int32)


class CountedPuts(CountedDevice):
    """Records the rows of every put, by step."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.puts = [[]]

    def put(self, rows):
        self.puts[-1].append([row.start for row in rows])
        super().put(rows)

    def decode(self, *arguments):
        self.puts.append([])
        return super().decode(*arguments)


def passages(queries):
    return [[{'id': '1', 'title': query, 'text': 'text'}] for query in queries]


class PromptWorkers:
    """Tools that have always answered by the next step."""

    futures = ()
    deterministic = True

    def __init__(self):
        self.waiting = []

    def submit(self, pool, calls):
        for rollout, call in calls:
            self.waiting.append((types.SimpleNamespace(pool=pool, rollout=rollout), call))

    def finished(self):
        finished, self.waiting = self.waiting, []
        return finished

    def abandon(self):
        pass


def test_results_refusals_and_new_requests_of_a_step_are_put_by_one_call():
    # Turns end at different steps; the first rollout's first turn ends before all others.
    device = CountedPuts(CONFIG, lambda rollout: [3 + 7 * min(rollout.identity[0], 2)] * TURNS)
    pool = device.pool = SlotPool(device, seed=0)
    scheduler = Scheduler({'policy': pool})
    scheduler.weights.publish('policy', {})
    scheduler.workers = PromptWorkers()
    tool, prompt = SearchTool(passages), np.zeros(9, np.int32)
    requests = [Request('policy', prompt, (i,), Talk(i, tool)) for i in range(18)]
    results = scheduler.run([scheduler.rollout(request) for request in requests])
    assert all(len(trajectory.turns) == TURNS for (trajectory,) in results)
    assert max(map(len, device.puts)) == 1
    # Some step put results of several tools and refused calls, and some step results and new prompts (from 0 on).
    rows_of_steps = [rows for puts in device.puts for rows in puts]
    assert any(sum(start > 0 for start in rows) >= 3 for rows in rows_of_steps)
    assert any(0 < sum(start > 0 for start in rows) < len(rows) for rows in rows_of_steps)


def test_an_index_of_this_process_gets_one_worker_and_a_server_its_connections():
    def corpus(**backend):
        client = types.SimpleNamespace(backend=types.SimpleNamespace(**backend))
        return SearchableCorpus(client, 3, 100)

    assert corpus().concurrent_requests == 1 and corpus(connections=16).concurrent_requests == 16


def test_a_text_in_place_of_queries_is_refused():
    for corpus in (SearchableCorpus(None, 3, 100), TrainingCorpus(None, 3, 100, None, 9)):
        with pytest.raises(
            TypeError, match=r"list of queries, not the text 'Lomi'; put it in \[ \]"
        ):
            corpus.search('Lomi')
