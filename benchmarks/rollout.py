"""Multi-turn rollouts and policy updates on a CPU: ours, and two other engines on the same work in the same run.

    python -m benchmarks.rollout                                # ours
    PEERS_PYTHON=/path/to/python python -m benchmarks.rollout   # ours, Tunix and transformers in turn

`benchmarks/peers/workload.py` defines the work: a 23-million-parameter Qwen3-shaped policy in float32; 32 rollouts of
a 64-token prompt and three turns of 32 greedy tokens with 96 observation tokens between turns; and a clipped
policy-gradient step on 16 × 256 tokens. All engines run on the same two cores.

PEERS_PYTHON is the interpreter of an environment with `benchmarks/peers/requirements.txt`. --peers names another folder
of `peer_tunix.py` and `peer_hf.py`: scripts that take the number of timed calls and print '<name> rollout X generated
tokens/s' and '<name> train X tokens/s'.

The matmul bound is the rate of a 2048³ product in this process, right before and after the rollouts. A rollout at the
bound would pass every token through the layers once and every generated token through the head once, and do nothing
else.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from benchmarks.peers import workload
from benchmarks.peers.timing import median_seconds
from benchmarks.peers.workload import (
    BATCH,
    GEN,
    LENGTH,
    TOOL,
    TRAIN_BATCH,
    TRAIN_LEN,
    TURNS,
)
from benchmarks.trained_rows import trained_row
from zeroplay_jax.configs import common
from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.learner.packing import pack
from zeroplay_jax.policy import sharding, transformer
from zeroplay_jax.rollout.call_syntax import TagSyntax
from zeroplay_jax.rollout.environment import Environment, Limits
from zeroplay_jax.rollout.requests import Request
from zeroplay_jax.rollout.sampler import Sampler
from zeroplay_jax.rollout.scheduler import Scheduler
from zeroplay_jax.rollout.slot_programs import SamplerConfig
from zeroplay_jax.rollout.slots import SlotPool
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.tools.base import Tool, ToolResult
from zeroplay_jax.types import POLICY, Trajectory, UserError

ROOT = pathlib.Path(__file__).parents[1]
PEERS = ('tunix', 'hf')

MODEL = transformer.ModelConfig(
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
    logit_chunk=2048,
)
# One slot per rollout, and bursts of half a turn.
SAMPLER = SamplerConfig(
    slots=BATCH, context=LENGTH, chunk=32, fill_rows=32, burst=16, put_rows=BATCH, put_tokens=TOOL
)


class _Codec(Codec):
    """Every token reads 'x', so that the stop string of `_Syntax` ends a turn after exactly GEN tokens."""

    def __init__(self):
        self.token_bytes = [b'x'] * MODEL.vocab_size
        self.eos_ids = ()


class _Syntax(TagSyntax):
    """A call every GEN tokens."""

    # A random policy writes no tags; the lengths of turns must be those of the other engines all the same.
    def stop_strings(self, tools):
        return ('x' * GEN,)

    def read_call(self, text, tools):
        return 'search', {}, None


class _Search(Tool):
    """Returns as the passage of each call the TOOL token ids of `observation` for its row and turn."""

    name = 'search'
    description = 'token ids of the workload'
    parameters = {'type': 'object'}

    def __init__(self):
        self._turns = iter(range(TURNS))

    def run(self, calls):
        """Returns a result per row with the token ids of the next turn's observation."""
        # All rows reach the end of a turn in the same decode chunk, in the order of their slots.
        assert len(calls) == BATCH
        rows = observation(next(self._turns))
        passages = [{'title': '', 'text': '', 'ids': ids} for ids in rows]
        return [ToolResult(text='', documents=((passage,),)) for passage in passages]


class _Environment(Environment):
    """The ids themselves are the observation."""

    def observation(self, call):
        return call.documents[0][0]['ids']


def prompts() -> np.ndarray:
    """Returns the prompts' token ids, int32 [BATCH, PROMPT]."""
    return np.array(workload.prompts(MODEL.vocab_size), np.int32)


def observation(turn: int) -> np.ndarray:
    """Returns the token ids that the search returns after a turn, int32 [BATCH, TOOL]."""
    return np.array(workload.observation(turn, MODEL.vocab_size), np.int32)


def rollout(scheduler: Scheduler) -> list[Trajectory]:
    """Returns the scripted rollouts of the real scheduler, search thread included."""
    # The limit is one token more than a turn has, so that the stop string ends the turn and not the limit.
    limits = Limits(max_turns=TURNS, turn_tokens=GEN + 1, observation_tokens=TOOL)
    env = _Environment(_Codec(), _Syntax(), limits, {'search': _Search()}, terminal_tags=())
    episodes = []
    for i, prompt in enumerate(prompts()):
        request = Request('policy', prompt, (i,), env, samples=1, temperature=0.0)
        episodes.append(scheduler.rollout(request))
    # Each request gives a list of one sample.
    trajectories = [samples[0] for samples in scheduler.run(episodes)]
    # A rollout that ended early would make the rates look better than they are.
    for trajectory in trajectories:
        assert len(trajectory.tokens) == LENGTH
        assert (trajectory.source == POLICY).sum() == GEN * TURNS
    return trajectories


def make_scheduler(params) -> Scheduler:
    """Returns a scheduler with BATCH slots that sample with these weights."""
    scheduler = Scheduler(
        {'policy': SlotPool(Sampler(MODEL, SAMPLER, sharding.make_mesh()), seed=0)}
    )
    scheduler.publish_weights('policy', params, 0)
    return scheduler


def matmul_rate() -> float:
    """Returns the float32 operations per second of a 2048³ product."""
    # The product is large enough to reach the peak rate of the cores.
    a = jnp.ones((2048, 2048), jnp.float32)
    product = jax.jit(lambda x, y: x @ y)
    return 2 * 2048**3 / median_seconds(lambda: jax.block_until_ready(product(a, a)), 5)


def useful_operations() -> float:
    """Returns the operations of one rollout batch that the matmul bound counts: products with weight matrices only."""
    m = MODEL
    # Counts the projections of queries, keys, values and output; the product with the cache is small and left out.
    attention = 2 * m.hidden_size * (m.heads + m.kv_heads) * m.head_dim
    layers = m.layers * (attention + 3 * m.hidden_size * m.intermediate_size)
    return 2.0 * BATCH * (LENGTH * layers + GEN * TURNS * m.hidden_size * m.vocab_size)


def make_update(params):
    """Returns a function that does one update step on TRAIN_BATCH × TRAIN_LEN random tokens and waits for its end."""
    role = ml_collections.ConfigDict(common.get_config().solver.to_dict() | dict(weight_decay=1e-4))
    learner = Learner(
        MODEL, sharding.make_mesh(), {'solver': role}, params, (TRAIN_BATCH, TRAIN_LEN)
    )
    rng = np.random.default_rng(0)
    rows = []
    for i in range(TRAIN_BATCH):
        tokens = rng.integers(10, MODEL.vocab_size, TRAIN_LEN).astype(np.int32)
        # About the log-prob of a uniform policy: ratios far from 1 would be clipped and lose their gradient.
        rows.append(trained_row(i, tokens, logp=-9.0, advantage=float(rng.normal())))
    batches = pack(rows, micro_rows=TRAIN_BATCH, tokens=TRAIN_LEN, mode='token')
    assert len(batches) == 1
    return lambda: learner.update('solver', batches)


def peer(name: str, folder: pathlib.Path, cache_tokens: int) -> dict[str, float]:
    """Returns the rates of another engine, measured in a separate process.

    Args:
      name: 'tunix' or 'hf', the engine whose script `peer_<name>.py` is run.
      folder: the folder of the scripts.
      cache_tokens: places of Tunix's key/value cache per rollout.

    Returns:
      Tokens per second of 'rollout' (generated tokens) and 'train' (tokens of the update).

    Raises:
      UserError: the script failed, with the last line of its error output.
    """
    command = [os.environ['PEERS_PYTHON'], str(folder / f'peer_{name}.py'), '1']
    if name == 'tunix':
        command += ['--cache-tokens', str(cache_tokens)]
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


def measure(scheduler, update) -> dict[str, float]:
    """Measures our engine once, with three timed rollout batches and three updates.

    Returns:
      'rollout' and 'train', generated tokens and update tokens per second; 'bound', the speed of the rollouts as a
      share of the matmul bound; 'gflops', the matmul rate behind the bound, in 10⁹ operations per second.
    """
    # The matmul rate is measured right before and right after the rollouts: the speed of a shared machine drifts.
    rate_before = matmul_rate()
    rollout_seconds = median_seconds(lambda: rollout(scheduler), 3)
    rate_after = matmul_rate()
    rate = (rate_before + rate_after) / 2
    update_seconds = median_seconds(update, 3)
    return dict(
        rollout=BATCH * GEN * TURNS / rollout_seconds,
        train=TRAIN_BATCH * TRAIN_LEN / update_seconds,
        bound=useful_operations() / rate / rollout_seconds,
        gflops=rate / 1e9,
    )


def shares(scheduler) -> dict[str, float]:
    """Runs one more rollout batch; returns the shares of its time in 'prefill', in 'decode' and on the 'host'."""
    scheduler.stats.clear()
    # With `profile` the host waits for every device call. That prevents overlap, so only the shares of these seconds
    # are meaningful, not their sum.
    scheduler.profile = True
    rollout(scheduler)
    scheduler.profile = False
    total_seconds = scheduler.stats['seconds']
    prefill_seconds = scheduler.stats['prefill_seconds']
    decode_seconds = scheduler.stats['decode_seconds']
    return dict(
        prefill=prefill_seconds / total_seconds,
        decode=decode_seconds / total_seconds,
        host=1 - (prefill_seconds + decode_seconds) / total_seconds,
    )


def compare(scheduler, update, arguments) -> tuple[list[dict[str, float]], dict[str, list[float]]]:
    """Measures our engine and the others in turn, and prints a line per engine and round.

    Returns:
      Our figures of `measure` by round; and 'rollout_vs_<engine>' or 'update_vs_<engine>' → our rate divided by that of
      the engine, by round.
    """
    our_figures = []
    ratios: dict[str, list[float]] = {}
    # Engines take turns within a round, because the speed of a shared machine drifts.
    for round_index in range(arguments.rounds):
        figures = measure(scheduler, update)
        our_figures.append(figures)
        printed_figures = ', '.join(f'{name} {value:.4g}' for name, value in figures.items())
        print(f'round {round_index + 1}: {printed_figures}', flush=True)
        for name in available_peers(arguments.peers):
            rates = peer(name, arguments.peers, arguments.tunix_cache)
            print(
                f'  {name}: rollout {rates["rollout"]:.0f}, train {rates["train"]:.0f} tokens/s',
                flush=True,
            )
            rollout_ratio = figures['rollout'] / rates['rollout']
            update_ratio = figures['train'] / rates['train']
            ratios.setdefault(f'rollout_vs_{name}', []).append(rollout_ratio)
            ratios.setdefault(f'update_vs_{name}', []).append(update_ratio)
    return our_figures, ratios


def available_peers(folder: pathlib.Path) -> tuple[str, ...]:
    """Returns the names of the other engines; none without PEERS_PYTHON or without the folder of their scripts."""
    if folder.is_dir() and os.environ.get('PEERS_PYTHON'):
        return PEERS
    return ()


def parse_arguments(argv) -> argparse.Namespace:
    """Returns the parsed command line."""
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.rollout',
        description=__doc__.split('\n')[0],
        epilog='example:\n  python -m benchmarks.rollout --rounds 1',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('--rounds', type=int, default=3, help='rounds of all engines in turn')
    parser.add_argument(
        '--peers',
        type=pathlib.Path,
        default=ROOT / 'benchmarks' / 'peers',
        help='folder of peer_tunix.py and peer_hf.py',
    )
    parser.add_argument(
        '--tunix-cache',
        type=int,
        default=1024,
        help=f"places of Tunix's key/value cache per rollout; the workload needs {LENGTH}",
    )
    return parser.parse_args(argv)


def main(argv=None) -> None:
    """Prints a line per engine and round, then one JSON line."""
    arguments = parse_arguments(argv)
    # Set before JAX counts the cores; the processes of the other engines inherit the limit.
    cores = sorted(os.sched_getaffinity(0))[: workload.CORES]
    os.sched_setaffinity(0, cores)
    os.environ['JAX_PLATFORMS'] = 'cpu'
    jax.config.update('jax_platforms', 'cpu')
    if not available_peers(arguments.peers):
        print(
            f'other engines are left out: PEERS_PYTHON is not set or {arguments.peers} does not exist',
            file=sys.stderr,
        )
    # Smaller weights make the policy nearly uniform, as `make_update` assumes: an entropy of 8.9 nats instead of 6.3.
    params = jax.tree.map(
        lambda x: x * 0.2 if x.ndim == 2 else x, transformer.init(MODEL, jax.random.key(0))
    )
    scheduler = make_scheduler(params)
    update = make_update(params)
    try:
        our_figures, ratios = compare(scheduler, update, arguments)
    except UserError as error:
        sys.exit(f'benchmarks.rollout: {error}')
    # Ratios are taken within a round and their median afterwards, so that slow rounds cancel.
    summary = {name: statistics.median(values) for name, values in ratios.items()}
    summary |= dict(
        share_of_matmul_bound=statistics.median(figures['bound'] for figures in our_figures),
        generated_tokens_per_second=statistics.median(
            figures['rollout'] for figures in our_figures
        ),
        update_tokens_per_second=statistics.median(figures['train'] for figures in our_figures),
    )
    for name, share in shares(scheduler).items():
        summary[f'share_{name}'] = share
    rounded_summary = {name: round(value, 4) for name, value in summary.items()}
    facts = dict(rounds=arguments.rounds, cores=len(cores), jax=jax.__version__)
    print(json.dumps(rounded_summary | facts))


if __name__ == '__main__':
    main()
