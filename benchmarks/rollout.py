"""Multi-turn rollouts and policy updates on a CPU, ours beside two peers on the same work in one run.

    python -m benchmarks.rollout                                # ours
    PEERS_PYTHON=/path/to/python python -m benchmarks.rollout   # and Tunix and transformers in turn

The work: a 23-million-parameter Qwen3-shaped policy in float32; 32 rollouts of a 64-token prompt and three turns of
32 greedy tokens with 96 observation tokens between turns; and a clipped policy-gradient step on 16 × 256 tokens.
PEERS_PYTHON is an interpreter with google-tunix, torch and transformers; --peers is the folder of `peer_tunix.py` and
`peer_hf.py`, which print '<name> rollout X generated tokens/s' and '<name> train X tokens/s'. Everybody is held to the
same two cores.

The matmul bound is what a 2048³ product runs at in this process, right before and after: a rollout at the bound would
push every token through the layers once, every generated token through the head once, and do nothing else.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from zeroplay_jax.configs import common
from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.learner.packing import pack
from zeroplay_jax.policy import sharding, transformer
from zeroplay_jax.rollout.sampler import Sampler, SamplerConfig
from zeroplay_jax.rollout.scheduler import Lane, Request, Scheduler
from zeroplay_jax.rollout.search import Limits, SearchEnv
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.rollout.tools import SearchR1
from zeroplay_jax.types import POLICY, Row, Trajectory

MODEL = transformer.ModelConfig(
    'qwen3',
    8192,
    512,
    1536,
    layers=6,
    heads=8,
    kv_heads=4,
    head_dim=64,
    rope_theta=1e6,
    logit_chunk=2048,
)
BATCH, PROMPT, GEN, TOOL, TURNS = 32, 64, 32, 96, 3
TRAIN_BATCH, TRAIN_LEN = 16, 256
LENGTH = PROMPT + GEN * TURNS + TOOL * (TURNS - 1)
SAMPLER = SamplerConfig(
    slots=BATCH, context=LENGTH, chunk=32, fill_rows=32, burst=16, put_rows=BATCH, put_tokens=TOOL
)


class _Codec(Codec):
    """Every token reads 'x', so that the stop string below ends a turn after exactly GEN tokens."""

    def __init__(self):
        self.token_bytes, self.eos_ids = [b'x'] * MODEL.vocab_size, ()


class _Tools(SearchR1):
    """A call every GEN tokens; a document is the TOOL ids of its row."""

    call_stop = 'x' * GEN

    def parse(self, text):
        return (text,), None

    def observation(self, codec, documents, limit):
        return documents[0][0]['ids']


def prompts() -> np.ndarray:
    """int32 [BATCH, PROMPT]."""
    return np.random.default_rng(0).integers(10, MODEL.vocab_size, (BATCH, PROMPT)).astype(np.int32)


def observation(turn: int) -> np.ndarray:
    """int32 [BATCH, TOOL]."""
    return (
        np.random.default_rng(100 + turn)
        .integers(10, MODEL.vocab_size, (BATCH, TOOL))
        .astype(np.int32)
    )


def rollout(scheduler: Scheduler) -> list[Trajectory]:
    """The scripted rollouts through the real scheduler, search thread included."""
    turns = iter(range(TURNS))

    def search(queries):
        assert (
            len(queries) == BATCH
        )  # all rows come to their turn's end in the same burst, in slot order
        return [[{'ids': ids}] for ids in observation(next(turns))]

    env = SearchEnv(_Codec(), _Tools(), Limits(TURNS, GEN + 1, TOOL), search, finals=())
    requests = [Request('policy', p, (i,), env, temperature=0.0) for i, p in enumerate(prompts())]
    out = [group[0] for group in scheduler.run([scheduler.rollout(r) for r in requests])]
    assert all(len(t.tokens) == LENGTH and (t.source == POLICY).sum() == GEN * TURNS for t in out)
    return out


def make_scheduler(params) -> Scheduler:
    """One lane with these weights."""
    scheduler = Scheduler({'policy': Lane(Sampler(MODEL, SAMPLER, sharding.make_mesh()), seed=0)})
    scheduler.publish('policy', params, 0)
    return scheduler


def matmul_rate() -> float:
    """float32 operations per second of a 2048³ product."""
    a = jnp.ones((2048, 2048), jnp.float32)
    product = jax.jit(lambda x, y: x @ y)
    return 2 * 2048**3 / _median(lambda: jax.block_until_ready(product(a, a)), 5)


def useful_operations() -> float:
    """Operations of one rollout batch: matrix products only."""
    m = MODEL
    attention = 2 * m.hidden_size * (m.heads + m.kv_heads) * m.head_dim
    layers = m.layers * (attention + 3 * m.hidden_size * m.intermediate_size)
    return 2.0 * BATCH * (LENGTH * layers + GEN * TURNS * m.hidden_size * m.vocab_size)


def make_update(params):
    """A function that does one update step on TRAIN_BATCH × TRAIN_LEN tokens."""
    role = ml_collections.ConfigDict(common.get_config().solver.to_dict() | dict(weight_decay=1e-4))
    learner = Learner(
        MODEL, sharding.make_mesh(), {'solver': role}, params, (TRAIN_BATCH, TRAIN_LEN)
    )
    rng = np.random.default_rng(0)
    rows = []
    for i in range(TRAIN_BATCH):
        tokens = rng.integers(10, MODEL.vocab_size, TRAIN_LEN).astype(np.int32)
        source = np.full(TRAIN_LEN, POLICY, np.int8)
        source[0] = 0
        logp = np.where(source == POLICY, -9.0, 0.0).astype(np.float32)
        t = Trajectory(tokens, source, logp, (), 'eos', 'policy', 0, (i,))
        rows.append(Row('policy', t, 0.0, 0, advantage=float(rng.normal())))
    batches = pack(rows, micro_rows=TRAIN_BATCH, tokens=TRAIN_LEN, mode='token')
    assert len(batches) == 1
    return lambda: learner.update('solver', batches)


def _median(call, times: int) -> float:
    call()
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def peer(name: str, folder: pathlib.Path) -> dict[str, float]:
    """A peer's figures, from a process of its own."""
    out = subprocess.run(
        [os.environ['PEERS_PYTHON'], str(folder / f'peer_{name}.py'), '1'],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return {kind: float(re.findall(rf'{kind} ([\d.]+)', out)[0]) for kind in ('rollout', 'train')}


def measure(scheduler, update) -> dict[str, float]:
    """Our figures of one round."""
    before = matmul_rate()
    seconds = _median(lambda: rollout(scheduler), 3)
    rate = (
        before + matmul_rate()
    ) / 2  # right before and right after: a shared machine's speed drifts
    trained = _median(update, 3)
    return dict(
        rollout=BATCH * GEN * TURNS / seconds,
        train=TRAIN_BATCH * TRAIN_LEN / trained,
        bound=useful_operations() / rate / seconds,
        gflops=rate / 1e9,
    )


def shares(scheduler) -> dict[str, float]:
    """Where the time of a rollout goes when the host waits for every device call."""
    scheduler.stats.clear()
    scheduler.profile = True
    rollout(scheduler)
    scheduler.profile = False
    s = scheduler.stats
    device = s['prefill_seconds'] + s['decode_seconds']
    return dict(
        prefill=s['prefill_seconds'] / s['seconds'],
        decode=s['decode_seconds'] / s['seconds'],
        host=1 - device / s['seconds'],
    )


def main(argv=None) -> None:
    """Prints a line per round, then one JSON line."""
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.rollout',
        description=__doc__.split('\n')[0],
        epilog='example:\n  python -m benchmarks.rollout --rounds 1',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        '--rounds', type=int, default=3, help='rounds of ours and every peer in turn'
    )
    home = pathlib.Path(__file__).parents[2] / 'shared' / 'peers'
    parser.add_argument(
        '--peers', type=pathlib.Path, default=home, help='folder of peer_tunix.py and peer_hf.py'
    )
    args = parser.parse_args(argv)
    os.sched_setaffinity(
        0, sorted(os.sched_getaffinity(0))[:2]
    )  # before JAX counts the cores; peers inherit it
    os.environ['JAX_PLATFORMS'] = 'cpu'
    jax.config.update('jax_platforms', 'cpu')
    peers = ('tunix', 'hf') if args.peers.is_dir() and os.environ.get('PEERS_PYTHON') else ()
    if not peers:
        print(
            f'peers are left out: PEERS_PYTHON is not set or {args.peers} is not there',
            file=sys.stderr,
        )
    params = jax.tree.map(
        lambda x: x * 0.2 if x.ndim == 2 else x, transformer.init(MODEL, jax.random.key(0))
    )
    scheduler, update = make_scheduler(params), make_update(params)
    ours, ratios = [], {}
    for i in range(args.rounds):
        ours.append(measure(scheduler, update))
        print(
            f'round {i + 1}: ' + ', '.join(f'{k} {v:.4g}' for k, v in ours[-1].items()), flush=True
        )
        for name in peers:
            theirs = peer(name, args.peers)
            print(
                f'  {name}: rollout {theirs["rollout"]:.0f}, train {theirs["train"]:.0f} tokens/s',
                flush=True,
            )
            ratios.setdefault(f'rollout_vs_{name}', []).append(
                ours[-1]['rollout'] / theirs['rollout']
            )
            ratios.setdefault(f'update_vs_{name}', []).append(ours[-1]['train'] / theirs['train'])
    figures = {name: statistics.median(values) for name, values in ratios.items()}
    figures |= dict(
        share_of_matmul_bound=statistics.median(o['bound'] for o in ours),
        generated_tokens_per_second=statistics.median(o['rollout'] for o in ours),
        update_tokens_per_second=statistics.median(o['train'] for o in ours),
        **{f'share_{k}': v for k, v in shares(scheduler).items()},
        rounds=args.rounds,
        cores=len(os.sched_getaffinity(0)),
        jax=jax.__version__,
    )
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}))


if __name__ == '__main__':
    main()
