"""Multi-turn rollouts and policy updates: ours, and on CPUs two other engines on the same work in the same run.

    python -m benchmarks.rollout                                # ours
    PEERS_PYTHON=/path/to/python python -m benchmarks.rollout   # ours, Tunix and transformers in turn

`benchmarks/peers/workload.py` defines the work: a 23-million-parameter Qwen3-shaped policy in float32; a batch of
scripted rollouts; and a clipped policy-gradient step on 16 × 256 tokens. All engines run on the same two cores.
--workload even: 32 rollouts of a 64-token prompt and three turns of 32 greedy tokens, with 96 observation tokens
between turns; uneven: 64 rollouts of one to five such turns with 20 to 300 observation tokens between them; large: 128
such rollouts with longer contexts, for GPUs (benchmarks/gpu.py).

PEERS_PYTHON is the interpreter of an environment with `benchmarks/peers/requirements.txt`. The scripts of the other
engines print '<name> rollout X generated tokens/s' and '<name> train X tokens/s'.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from benchmarks import command
from benchmarks.peers import workload
from benchmarks.peers.workload import TRAIN_BATCH, TRAIN_LEN, Rollouts, median_seconds
from zeroplay_jax.learner.batch import Batch, pack
from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.policy import sharding, transformer
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.rollout.call_syntax import TagSyntax
from zeroplay_jax.rollout.environment import Environment, Limits
from zeroplay_jax.rollout.requests import Request
from zeroplay_jax.rollout.sampler import Sampler, SamplerConfig
from zeroplay_jax.rollout.scheduler import Scheduler
from zeroplay_jax.rollout.slots import SlotPool
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.settings.schema import TrainedRole
from zeroplay_jax.tools.base import Tool, ToolResult
from zeroplay_jax.types import POLICY, PROMPT, Row, Trajectory, UserError

ROOT = pathlib.Path(__file__).parents[1]
PEERS = ('tunix', 'hf')
# The folder of their scripts.
PEERS_FOLDER = ROOT / 'benchmarks' / 'peers'

MODEL = ModelConfig(
    family='qwen3',
    vocab_size=workload.VOCAB_SIZE,
    hidden_size=workload.QWEN3['hidden_size'],
    intermediate_size=workload.QWEN3['intermediate_size'],
    layers=workload.QWEN3['num_hidden_layers'],
    heads=workload.QWEN3['num_attention_heads'],
    kv_heads=workload.QWEN3['num_key_value_heads'],
    head_dim=workload.QWEN3['head_dim'],
    rope_theta=workload.QWEN3['rope_theta'],
    norm_eps=workload.QWEN3['rms_norm_eps'],
    tied=workload.QWEN3['tie_word_embeddings'],
    # Of the update: blocks of 64 tokens leave out the pairs of the future.
    attention='blocked',
    logit_chunk=2048,
)


def sampler_config(rollouts: Rollouts, attention: str) -> SamplerConfig:
    """Returns the sampler's sizes: a slot per rollout, and bursts of half a turn; for 'ragged' also pages."""
    # Observations of equal rollouts arrive together, others a few at a time. Idle rows of a call cost time, too.
    has_equal_rollouts = len(set(rollouts.observation_tokens)) == 1
    pages: dict[str, Any] = {}
    if attention == 'ragged':
        # A step has a token of every slot and a piece of the observations; without observations it is smaller.
        pages = dict(page=64, token_budget=4 * len(rollouts), decode_buckets=(len(rollouts),))
    return SamplerConfig(
        slots=len(rollouts),
        context=rollouts.context,
        chunk=32,
        fill_rows=32 if has_equal_rollouts else 4,
        burst=rollouts.turn_tokens // 2,
        put_rows=32,
        put_tokens=96,
        attention=attention,
        **pages,
    )


class _Codec(Codec):
    """Every token reads 'x', so that the stop string of `_Syntax` ends a turn after a number of tokens."""

    def __init__(self, vocab_size: int):
        self.token_bytes = [b'x'] * vocab_size
        self.eos_ids = ()


class _Syntax(TagSyntax):
    """A call after every `turn_tokens` tokens."""

    def __init__(self, turn_tokens: int):
        self._turn_tokens = turn_tokens

    # A random policy writes no tags; the lengths of turns must be those of the other engines all the same.
    def stop_strings(self, tools):
        return ('x' * self._turn_tokens,)

    def read_call(self, text, tools):
        return 'search', {}, None


class _Search(Tool):
    """Returns nothing: `_Environment` knows the observations of its rollout."""

    name = 'search'
    description = 'token ids of the workload'
    parameters = {'type': 'object'}

    def run(self, calls):
        """Returns an empty result per call."""
        return [ToolResult(text='') for _ in calls]


@dataclasses.dataclass(frozen=True)
class _Environment(Environment):
    """The environment of one rollout; its observations are the token ids of the workload."""

    observations: Iterator[list[int]] = iter(())

    def observation(self, call, number=0):
        return np.array(next(self.observations), np.int32)


def make_request(rollouts: Rollouts, row: int, codec: Codec, search: Tool) -> Request:
    """Returns the request for a rollout of the workload."""
    vocab_size = len(codec.token_bytes)
    turns = rollouts.turns(row)
    # The limit is one token more than a turn has, so that the stop string ends the turn and not the limit.
    limits = Limits(
        max_turns=turns,
        turn_tokens=rollouts.turn_tokens + 1,
        observation_tokens=rollouts.context,
    )
    observations = []
    for turn in range(turns - 1):
        observations.append(rollouts.observation(row, turn, vocab_size))
    env = _Environment(
        codec,
        _Syntax(rollouts.turn_tokens),
        limits,
        {'search': search},
        terminal_tags=(),
        observations=iter(observations),
    )
    prompt = np.array(rollouts.prompt(row, vocab_size), np.int32)
    return Request('policy', prompt, (row,), env, samples=1, temperature=0.0)


class Engine:
    """Our engine with random weights: a scheduler with a slot per rollout, and a learner.

    Args:
      model: the policy.
      rollouts: the workload.
      attention: `sampler.attention`.
    """

    def __init__(self, model: ModelConfig, rollouts: Rollouts, attention: str = 'xla'):
        self.model = model
        self.rollouts = rollouts
        self.version = 0
        mesh = sharding.make_mesh()
        role = TrainedRole(weight_decay=1e-4)
        # Nothing else refers to these weights, so updates can free them.
        sizes = (TRAIN_BATCH, TRAIN_LEN)
        self.learner = Learner(model, mesh, {'solver': role}, random_weights(model), sizes)
        self.batches = full_batches(model.vocab_size, TRAIN_BATCH, TRAIN_LEN, TRAIN_BATCH)
        sampler = Sampler(model, sampler_config(rollouts, attention), mesh)
        self.scheduler = Scheduler({'policy': SlotPool(sampler, seed=0)})
        self._publish()

    def _publish(self) -> None:
        # An update invalidates what was published before.
        view = sharding.sampler_view(
            self.learner.sampler_weights(self.learner.view()), self.learner.mesh
        )
        self.version += 1
        self.scheduler.weights.publish('policy', view, self.version)

    def update(self) -> None:
        """Does one update step on TRAIN_BATCH × TRAIN_LEN random tokens, publishes the weights and waits for it."""
        self.learner.update('solver', self.batches)
        self._publish()

    def rollout(self) -> list[Trajectory]:
        """Returns the scripted rollouts of the real scheduler, search thread included."""
        rollouts = self.rollouts
        codec = _Codec(self.model.vocab_size)
        # One object for all rollouts, so that their calls are batched.
        search = _Search()
        episodes = []
        for row in range(len(rollouts)):
            episodes.append(self.scheduler.rollout(make_request(rollouts, row, codec, search)))
        # Each request gives a list of one sample.
        trajectories = [samples[0] for samples in self.scheduler.run(episodes)]
        # A rollout that ended early would make the rates look better than they are.
        for row, trajectory in enumerate(trajectories):
            assert len(trajectory.tokens) == rollouts.length(row)
            generated = (trajectory.source == POLICY).sum()
            assert generated == rollouts.turns(row) * rollouts.turn_tokens
        return trajectories

    def measure(self) -> dict[str, float]:
        """Returns 'generated_tokens_per_second' and 'update_tokens_per_second', of three timed batches and updates."""
        rollout_seconds = median_seconds(self.rollout, 3)
        update_seconds = median_seconds(self.update, 3)
        return dict(
            generated_tokens_per_second=self.rollouts.generated / rollout_seconds,
            update_tokens_per_second=TRAIN_BATCH * TRAIN_LEN / update_seconds,
        )


def random_weights(model: ModelConfig) -> Params:
    """Returns random weights, made on the device."""

    def make(key):
        # Smaller weights make the policy nearly uniform, as `full_batches` assumes: an entropy of 8.9 nats instead
        # of 6.3.
        return jax.tree.map(lambda x: x * 0.2 if x.ndim == 2 else x, transformer.init(model, key))

    return jax.jit(make)(jax.random.key(0))


def full_batches(vocab_size: int, rows: int, tokens: int, micro_rows: int) -> list[Batch]:
    """Returns full micro-batches of random tokens, on all of which but the first of a row the policy is trained.

    Their log-probs under the old policy are those of a uniform one, about those of small random weights: ratios far
    from 1 would be clipped and lose their gradient.
    """
    rng = np.random.default_rng(0)
    source = np.full(tokens, POLICY, np.int8)
    # No token before the first one predicts it, so it is not trained on.
    source[0] = PROMPT
    logp = np.where(source == POLICY, -np.log(vocab_size), 0.0).astype(np.float32)
    batch = []
    for number in range(rows):
        ids = rng.integers(10, vocab_size, tokens).astype(np.int32)
        trajectory = Trajectory(ids, source, logp, (), 'eos', 'policy', 0, (number,))
        advantage = float(rng.normal())
        batch.append(Row('policy', trajectory, reward=0.0, group=0, advantage=advantage))
    return pack(batch, micro_rows=micro_rows, tokens=tokens, mode='token')


def peer(name: str, workload_name: str) -> dict[str, float]:
    """Returns the rates of another engine, measured in a separate process.

    Args:
      name: 'tunix' or 'hf', the engine whose script `peer_<name>.py` is run.
      workload_name: batch of rollouts.

    Returns:
      Tokens per second of 'rollout' (generated tokens) and 'train' (tokens of the update).

    Raises:
      UserError: the script failed, with the last line of its error output.
    """
    command = [os.environ['PEERS_PYTHON'], str(PEERS_FOLDER / f'peer_{name}.py')]
    command += ['--workload', workload_name]
    # The scripts import benchmarks.peers, and Python puts only a script's own folder on its path.
    environment = os.environ | {'PYTHONPATH': str(ROOT)}
    # A separate process is needed, because two versions of JAX, and PyTorch, cannot share an interpreter.
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    if process.returncode:
        error_lines = process.stderr.strip().split('\n')
        raise UserError(
            f'{command[1]} failed in the environment of PEERS_PYTHON ({command[0]}): {error_lines[-1]}; '
            'install benchmarks/peers/requirements.txt there'
        )
    rates = {}
    for kind in ('rollout', 'train'):
        rates[kind] = float(re.findall(rf'{kind} ([\d.]+)', process.stdout)[0])
    return rates


def compare(engine, arguments) -> tuple[list[dict[str, float]], dict[str, list[float]]]:
    """Measures our engine and the others in turn, and prints a line per engine and round.

    Returns:
      Our figures of `measure` by round; and 'rollout_vs_<engine>' or 'update_vs_<engine>' → our rate divided by that of
      the engine, by round.
    """
    our_figures = []
    ratios: dict[str, list[float]] = {}
    # Engines take turns within a round, because the speed of a shared machine drifts.
    for round_index in range(arguments.rounds):
        figures = engine.measure()
        our_figures.append(figures)
        printed_figures = ', '.join(f'{name} {value:.4g}' for name, value in figures.items())
        print(f'round {round_index + 1}: {printed_figures}', flush=True)
        for name in available_peers():
            rates = peer(name, arguments.workload)
            print(
                f'  {name}: rollout {rates["rollout"]:.0f}, train {rates["train"]:.0f} tokens/s',
                flush=True,
            )
            rollout_ratio = figures['generated_tokens_per_second'] / rates['rollout']
            update_ratio = figures['update_tokens_per_second'] / rates['train']
            ratios.setdefault(f'rollout_vs_{name}', []).append(rollout_ratio)
            ratios.setdefault(f'update_vs_{name}', []).append(update_ratio)
    return our_figures, ratios


def available_peers() -> tuple[str, ...]:
    """Returns the names of the other engines; none without PEERS_PYTHON."""
    return PEERS if os.environ.get('PEERS_PYTHON') else ()


def parse_arguments(argv) -> argparse.Namespace:
    """Returns the parsed command line."""
    parser = command.parser('rollout', __doc__)
    parser.add_argument('--rounds', type=int, default=3, help='rounds of all engines in turn')
    parser.add_argument(
        '--workload', choices=workload.WORKLOADS, default='even', help='batch of rollouts (even)'
    )
    parser.add_argument(
        '--attention', choices=('xla', 'used'), default='xla', help='sampler.attention (xla)'
    )
    return parser.parse_args(argv)


def cpu_model() -> ModelConfig:
    """Returns the policy of all engines; limits this process to the cores that every engine may use."""
    # Set before JAX counts the cores; the processes of the other engines inherit the limit.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: workload.CORES])
    os.environ['JAX_PLATFORMS'] = 'cpu'
    jax.config.update('jax_platforms', 'cpu')
    if not available_peers():
        print('other engines are left out: PEERS_PYTHON is not set', file=sys.stderr)
    return MODEL


def main(argv=None) -> None:
    """Prints a line per engine and round, then one JSON line."""
    arguments = parse_arguments(argv)
    with command.one_line_errors('benchmarks.rollout'):
        model = cpu_model()
        engine = Engine(model, workload.WORKLOADS[arguments.workload], arguments.attention)
        our_figures, ratios = compare(engine, arguments)
    # Ratios are taken within a round and their median afterwards, so that slow rounds cancel.
    summary = {name: statistics.median(values) for name, values in ratios.items()}
    for name in our_figures[0]:
        summary[name] = statistics.median(figures[name] for figures in our_figures)
    rounded_summary = {name: round(value, 4) for name, value in summary.items()}
    flags = ('workload', 'rounds', 'attention')
    facts = {name: getattr(arguments, name) for name in flags}
    device = jax.devices()[0].device_kind
    facts |= dict(cores=len(os.sched_getaffinity(0)), device=device, jax=jax.__version__)
    print(json.dumps(rounded_summary | facts))


if __name__ == '__main__':
    main()
