"""Measures what a step costs a host to exchange its rollouts with the others.

    python -m benchmarks.exchange

Starts 2 and 4 processes on this machine, joined by gloo. Each makes its share of the rollouts of a step: a prompt,
turns, searches with passages. Every process gets all of them as bytes (selfplay/rows.py), packs the whole batch and
keeps the rows that its device holds. The bytes are those that a host receives from others, padding included. CPU
seconds are those of a process with all its threads, so they depend less on other work on the machine than the clock
does.
"""

import functools
import itertools
import os
import time
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from benchmarks import command
from zeroplay_jax.learner.batch import Batch, pack
from zeroplay_jax.policy import sharding
from zeroplay_jax.runtime import devices, hosts
from zeroplay_jax.runtime.disk import write_text
from zeroplay_jax.selfplay import rows
from zeroplay_jax.types import (
    ENV,
    POLICY,
    PROMPT,
    Outcome,
    Question,
    Row,
    RowInfo,
    ToolCall,
    Trajectory,
    Turn,
)

# What is varied: processes, rollouts of a step, and tokens of a rollout.
PROCESSES = (2, 4)
ROLLOUTS = (320, 1280)
TOKENS = (500, 1500)
# Counted repetitions.
ROUNDS = 3
SAMPLES = 5
MICRO_ROWS = 8
# A rollout as the workload of benchmarks.slices has it: about 270 tokens of prompt, 18 % of the policy's, three
# passages of 100 words per search.
PROMPT_TOKENS, POLICY_SHARE = 270, 0.18
PASSAGES, PASSAGE_WORDS, TURNS = 3, 100, 3


def make_outcome(number: int, mean_tokens: int) -> Outcome:
    """Returns one question with `SAMPLES` rollouts; a function of its arguments."""
    rng = np.random.default_rng(number)
    question = Question(f'Which river crosses the town number {number}?', ('Gumu', 'the Gumu'))
    rows = []
    for sample in range(SAMPLES):
        tokens = int(mean_tokens * rng.lognormal(-0.06, 0.35))
        tokens = min(max(tokens, PROMPT_TOKENS + 10), 2 * mean_tokens)
        source = np.full(tokens, ENV, np.int8)
        source[rng.random(tokens) < POLICY_SHARE] = POLICY
        source[:PROMPT_TOKENS] = PROMPT
        logp = np.where(source == POLICY, -rng.random(tokens), 0).astype(np.float32)
        trajectory = Trajectory(
            tokens=rng.integers(0, 150_000, tokens).astype(np.int32),
            source=source,
            logp=logp,
            turns=tuple(_turn(rng, turn) for turn in range(TURNS)),
            finish='answer',
            weights='policy',
            version=7,
            identity=(7, number, 0, sample),
        )
        reward = float(rng.integers(2))
        info = RowInfo(question=question, answer='Gumu', score=reward)
        parts = {'answer': reward, 'format': 1.0}
        rows.append(Row('solver', trajectory, reward, number, parts, info=info, advantage=0.5))
    return Outcome(rows, [question])


def _turn(rng: np.random.Generator, number: int) -> Turn:
    """Returns a turn with a search; the last turn of a rollout has none."""
    if number == TURNS - 1:
        return Turn('<think> so it is </think><answer> Gumu </answer>')
    passages: list[dict[str, Any]] = []
    for _ in range(PASSAGES):
        words = ' '.join(f'word{index}' for index in rng.integers(0, 5000, PASSAGE_WORDS))
        passage = {'id': str(rng.integers(10**7)), 'title': 'A town', 'text': words, 'score': 0.5}
        passages.append(passage)
    text = '\n'.join(passage['text'] for passage in passages)
    call = ToolCall('search', {'query_list': ['river of the town']}, text, (tuple(passages),))
    return Turn('<think> look it up </think><search> river of the town </search>', call)


class Step:
    """The rollouts of one step of this process, and the way to its rows of the packed batch."""

    def __init__(self, rollouts: int, mean_tokens: int):
        self.hosts = hosts.Hosts()
        self.mean_tokens = mean_tokens
        self.local: list[Outcome] = []
        for number in range(rollouts // SAMPLES):
            if self.hosts.owns((7, number)):
                self.local.append(make_outcome(number, mean_tokens))
        self.split = sharding.rows(sharding.make_mesh(replica=self.hosts.count))

    def batches(self) -> list[Batch]:
        """Gathers all rollouts, packs them and returns the local rows of the micro-batches."""
        all_rows: list[Row] = []
        for message in self.hosts.gather_bytes(rows.to_bytes(self.local)):
            for outcome in rows.from_bytes(message):
                all_rows += outcome.rows
        batches = pack(
            all_rows,
            micro_rows=MICRO_ROWS,
            tokens=2 * self.mean_tokens,
            mode='token',
            order='longest_first',
        )
        return [sharding.held_rows(batch, self.split) for batch in batches]


def count_received() -> list[int]:
    """Returns a list that gets the bytes that this process receives from others in each collective of `hosts`."""
    received: list[int] = []
    gather = multihost_utils.process_allgather

    def counted_gather(array, *arguments, **options):
        received.append((jax.process_count() - 1) * np.asarray(array).nbytes)
        return gather(array, *arguments, **options)

    hosts.multihost_utils.process_allgather = counted_gather
    return received


def measure(step: Step, received: list[int]) -> list[float]:
    """Returns what the exchange of a step cost: bytes, CPU seconds; it begins at once in all processes."""
    multihost_utils.sync_global_devices('start')
    received.clear()
    cpu = time.process_time()
    step.batches()
    return [sum(received), time.process_time() - cpu]


def measure_all(process: int, count: int, port: int) -> list[tuple]:
    """Returns the rows of the table, measured in one process of `count`; all of them have the same."""
    devices.connect('coordinator', f'localhost:{port}', count, process, 100)
    received = count_received()
    table = []
    for rollouts, tokens in itertools.product(ROLLOUTS, TOKENS):
        step = Step(rollouts, tokens)
        # The first round compiles and is not counted.
        costs = [measure(step, received) for _ in range(ROUNDS + 1)][1:]
        # Medians over the rounds, of the host with most of it.
        local = np.median(costs, axis=0).tolist()
        received_bytes, cpu = np.max(step.hosts.gather(local), axis=0)
        table.append((count, rollouts, tokens, f'{received_bytes / 1e6:.2f}', f'{cpu:.3f}'))
    return table


def main() -> None:
    """Starts the processes, and writes and prints the table."""
    command.parser('exchange', __doc__).parse_args()
    os.environ |= command.cpu_environment()
    rows = []
    for count in PROCESSES:
        with command.processes(count) as pool:
            measure_in = functools.partial(measure_all, count=count, port=command.free_port())
            of_this_count, *_ = pool.map(measure_in, range(count))
        rows += of_this_count
    columns = ('processes', 'rollouts', 'tokens', 'MB received', 'CPU s')
    text = command.tab_separated(columns, rows)
    write_text(command.RESULTS / 'exchange.tsv', text)
    print(text, end='')


if __name__ == '__main__':
    main()
