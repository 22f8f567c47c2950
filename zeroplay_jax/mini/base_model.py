"""Trains the tiny checkpoint from nothing: `python -m zeroplay_jax.mini.base_model [--out FOLDER] [--seed 0]`.

Four stages on written-out episodes (`mini/demos.py`): copying, reading, then every role, which gives `clean/`, the
ceiling: it plays all roles of its world well. The last goes on with demonstrations that go wrong on purpose
(`Uneven`) and gives `base/`, from which self-play starts: right form, uneven skill. Beside each lie its training
log and the hashes of its files.

Everything is counted in steps and drawn from (seed, stage, step): the same seed on the same machine gives the same
files.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import pathlib
import shutil
import sys
import tempfile
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zeroplay_jax.mini import demos, tokenizer, world
from zeroplay_jax.policy import hf, transformer
from zeroplay_jax.retrieval import progress
from zeroplay_jax.rollout import prompts
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.types import POLICY

HERE = pathlib.Path(__file__).parent
ARCHITECTURE = {
    'architectures': ['Qwen3ForCausalLM'],
    'model_type': 'qwen3',
    'hidden_size': 128,
    'intermediate_size': 384,
    'num_hidden_layers': 3,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'head_dim': 32,
    'hidden_act': 'silu',
    'rms_norm_eps': 1e-6,
    'rope_theta': 10000.0,
    'max_position_embeddings': 4096,
    'attention_bias': False,
    'attention_dropout': 0.0,
    'use_sliding_window': False,
    'tie_word_embeddings': True,
    'initializer_range': 0.1,
    'torch_dtype': 'float32',
}


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stretch of training.

    Attributes:
      name: of the stretch; where `saved`, also of the folder that its parameters go to.
      steps: optimiser steps.
      rows, tokens: shape of a packed batch.
      rate: peak of Muon's rate on matrices; `adam_rate`: AdamW's on embeddings and norms.
      decay: last share of the steps, over which the rates fall to a twentieth.
      uneven: what goes wrong in the demonstrations.
      other: weight of the tokens that the policy does not write.
      shares: the roles of the mixture; those of the table in demos.py where empty.
    """

    name: str
    steps: int
    rows: int = 6
    tokens: int = 512
    rate: float = 0.02
    adam_rate: float = 2e-3
    decay: float = 0.3
    other: float = 0.1
    saved: bool = False
    uneven: demos.Uneven = demos.Uneven()
    shares: dict[str, float] = dataclasses.field(default_factory=dict)


STAGES = (
    # Copying and reading first: without them the rest takes several times as long.
    Stage(
        'copying',
        1000,
        16,
        64,
        adam_rate=5e-3,
        decay=0.0,
        other=0.25,
        shares={'copy': 0.45, 'passage': 0.55},
    ),
    Stage(
        'reading',
        300,
        6,
        320,
        adam_rate=4e-3,
        decay=0.0,
        other=0.2,
        shares={'reading': 0.35, 'retelling': 0.3, 'solver': 0.35},
    ),
    Stage('clean', 600, adam_rate=3e-3, decay=0.35, saved=True),
    Stage(
        'base',
        220,
        rate=0.005,
        adam_rate=5e-4,
        decay=0.4,
        saved=True,
        uneven=demos.Uneven(early=0.65, confuse=0.75, no_think=0.4, hops=0.35, form=0.15),
        shares={
            'reading': 0.03,
            'solver': 0.35,
            'solver_with_path': 0.09,
            'proposer': 0.33,
            'proposer_from_answer': 0.08,
            'answer_from_documents': 0.05,
            'challenger': 0.035,
            'task_solver': 0.035,
        },
    ),
)
LIBRARIES = 8
LIBRARY_WORLDS = 20
INFO_EVERY = 100
DIAGNOSED = 64  # episodes per role in the diagnosis


def libraries(
    seed: int, split: str = 'train', count: int = LIBRARIES, worlds: int = LIBRARY_WORLDS
):
    """Libraries to draw episodes from: worlds of the split's names, each library with facts of its own."""
    available = world.worlds_available(split)
    for i in range(count):
        rng = np.random.default_rng([seed, i])
        seeds = rng.choice(available, size=min(worlds, available), replace=False)
        # Deal 0 holds the facts that self-play and evaluation meet; nothing here may know them.
        yield demos.Library(seeds.tolist(), split, deal=1 + i)


def episodes(stage: Stage, stock, codec: Codec, seed: int, step: int):
    """Endless (tokens, source) of one step's mixture."""
    rng = np.random.default_rng([seed, zlib.crc32(stage.name.encode()), step])
    shares = stage.shares or {name: role.share for name, role in demos.ROLES.items()}
    names, share = list(shares), np.array(list(shares.values()))
    share = share / share.sum()
    while True:
        role = demos.ROLES[names[int(rng.choice(len(names), p=share))]]
        library = stock[int(rng.integers(len(stock)))]
        tokens, source = demos.render(codec, role.write(library, rng, stage.uneven))
        if len(tokens) <= stage.tokens:
            yield tokens, source


def pack(stage: Stage, stream) -> dict[str, np.ndarray]:
    """A batch of whole episodes, first fit: int32 [rows, tokens] each; segment 0 is empty."""
    shape = (stage.rows, stage.tokens)
    batch = {k: np.zeros(shape, np.int32) for k in ('tokens', 'positions', 'segment', 'policy')}
    used, segments, misses = [0] * stage.rows, [0] * stage.rows, 0
    while misses < 3:
        tokens, source = next(stream)
        row = next((r for r in range(stage.rows) if used[r] + len(tokens) <= stage.tokens), None)
        if row is None:
            misses += 1
            continue
        place = slice(used[row], used[row] + len(tokens))
        segments[row] += 1
        batch['tokens'][row, place] = tokens
        batch['positions'][row, place] = np.arange(len(tokens))
        batch['segment'][row, place] = segments[row]
        batch['policy'][row, place] = source == POLICY
        used[row] = place.stop
    return batch


def loss(config, other_weight, params, batch):
    """Mean negative log-likelihood of the policy's tokens plus `other_weight` times that of the others."""
    x = transformer.hidden(config, params, batch['tokens'], batch['positions'], batch['segment'])
    logits = transformer.logits(config, params, x[:, :-1].reshape(-1, x.shape[-1]))
    target = batch['tokens'][:, 1:].reshape(-1)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, target)
    inside = (
        (batch['segment'][:, 1:] == batch['segment'][:, :-1]) & (batch['segment'][:, 1:] > 0)
    ).reshape(-1)
    own = inside & (batch['policy'][:, 1:].reshape(-1) > 0)
    other = inside & ~own
    mean = lambda value, where: jnp.sum(value * where) / jnp.maximum(jnp.sum(where), 1)
    policy = mean(nll, own)
    right = mean(jnp.argmax(logits, -1) == target, own)
    return policy + other_weight * mean(nll, other), {'loss': policy, 'token_accuracy': right}


def optimiser(stage: Stage) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) on matrices, AdamW on embeddings and norms, both warmed up and decayed."""

    def schedule(peak):
        flat = int(stage.steps * (1 - stage.decay))
        return optax.join_schedules(
            [
                optax.linear_schedule(0.05 * peak, peak, 40),
                optax.linear_schedule(peak, 0.05 * peak, stage.steps - flat),
            ],
            [flat],
        )

    labels = functools.partial(
        jax.tree_util.tree_map_with_path,
        lambda path, x: 'matrix' if path[-1].key == 'kernel' else 'other',
    )
    transforms = {
        'matrix': optax.contrib.muon(schedule(stage.rate)),
        'other': optax.adamw(schedule(stage.adam_rate), b2=0.98, weight_decay=0.0),
    }
    return optax.chain(optax.clip_by_global_norm(1.0), optax.multi_transform(transforms, labels))


def train(stage: Stage, config, params, codec: Codec, stock, seed: int, log):
    """Runs a stage; returns parameters. `log`: list that receives one dict per INFO_EVERY steps."""
    tx = optimiser(stage)
    state = tx.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params, state, batch):
        gradient, info = jax.grad(functools.partial(loss, config, stage.other), has_aux=True)(
            params, batch
        )
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, info

    seen = []
    with progress.bar(stage.steps, 'steps', stage.name) as bar:
        for step in range(stage.steps):
            params, state, info = update(
                params, state, pack(stage, episodes(stage, stock, codec, seed, step))
            )
            seen.append(info)
            bar.update()
            if (step + 1) % INFO_EVERY == 0 or step + 1 == stage.steps:
                means = {k: float(np.mean([float(i[k]) for i in seen])) for k in seen[0]}
                log.append({'stage': stage.name, 'step': step + 1, **means})
                bar.write(json.dumps(log[-1]))  # above the bar, where there is one
                sys.stdout.flush()
                seen = []
    return params


def diagnose(config, params, codec: Codec, seed: int) -> dict[str, dict[str, float]]:
    """Teacher-forced figures on clean episodes of held-out names, per role (the solver's also per hop count).

    Returns:
      name → {'tokens': share of policy tokens that greedy decoding gets right, 'episodes': share of episodes in
      which it gets all of them right}. A solver's 'episodes' comes near its exact match with greedy decoding.
    """
    (library,) = libraries(seed, 'evaluation', count=1)

    @jax.jit
    def right(params, batch):
        x = transformer.hidden(
            config, params, batch['tokens'], batch['positions'], batch['segment']
        )
        guess = jnp.argmax(
            transformer.logits(config, params, x[:, :-1].reshape(-1, x.shape[-1])), -1
        )
        return guess.reshape(x.shape[0], -1) == batch['tokens'][:, 1:]

    figures = {}
    for name, role in demos.ROLES.items():
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        shape = (DIAGNOSED, 640)
        batch = {k: np.zeros(shape, np.int32) for k in ('tokens', 'positions', 'segment', 'policy')}
        hops = []
        for row in range(DIAGNOSED):
            demo = role.write(library, rng, demos.Uneven())
            tokens, source = demos.render(codec, demo)
            n = len(tokens)
            batch['tokens'][row, :n], batch['policy'][row, :n] = tokens, source == POLICY
            batch['positions'][row, :n], batch['segment'][row, :n] = np.arange(n), 1
            hops.append(sum(isinstance(part, list) for part, _ in demo.parts))
        own = batch['policy'][:, 1:] > 0
        hit = np.asarray(right(params, batch)) & own
        whole = hit.sum(1) == own.sum(1)
        figures[name] = {'tokens': float(hit.sum() / own.sum()), 'episodes': float(whole.mean())}
        if name == 'solver':
            for h in sorted(set(hops)):
                figures[f'solver, {h} hops'] = {
                    'episodes': float(whole[np.array(hops) == h].mean())
                }
    return figures


def write_blank(folder: pathlib.Path) -> None:
    """Writes everything of a checkpoint folder but the weights: config.json and the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    learnt = tokenizer.train([*prompts.PROMPTS['mini'].values(), 'Describe the'])
    tokenizer.write(folder, learnt)
    eos, pad = (learnt.token_to_id(t) for t in (tokenizer.END, tokenizer.PAD))
    # Room for more tokens, as large models have it, and a size that divides over devices.
    size = -(-learnt.get_vocab_size() // 64) * 64
    config = {**ARCHITECTURE, 'vocab_size': size, 'eos_token_id': eos, 'pad_token_id': pad}
    (folder / 'config.json').write_text(json.dumps(config, indent=2) + '\n')


def _save(folder: pathlib.Path, config, params, blank: pathlib.Path, log) -> None:
    """Writes a checkpoint folder in place of the one there was, with its log and the hashes of its files."""
    if folder.exists():
        shutil.rmtree(folder)
    hf.save(folder, config, params, like=blank)
    (folder / 'training.jsonl').write_text(''.join(json.dumps(entry) + '\n' for entry in log))
    files = sorted(f for f in folder.iterdir() if f.is_file())
    lines = [f'{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}\n' for f in files]
    (folder / 'SHA256SUMS').write_text(''.join(lines))


def _quiet(params):
    """Layers begin as the identity: what they would add at first only drowns the embeddings they must learn to move."""
    still = lambda path, x: x * 0 if path[-2:-1] and path[-2].key in ('o', 'down') else x
    return jax.tree_util.tree_map_with_path(still, params)


def build(out: pathlib.Path, seed: int, stages=STAGES) -> None:
    """Trains all stages and writes `out`/<name> for each saved one, replacing what stands there."""
    with tempfile.TemporaryDirectory() as staging:
        blank = pathlib.Path(staging)
        write_blank(blank)
        codec, config = Codec(blank), hf.read_config(blank)
        params = _quiet(transformer.init(config, jax.random.key(seed)))
        stock = list(libraries(seed))
        log = [{'seed': seed, 'parameters': sum(x.size for x in jax.tree.leaves(params))}]
        for stage in stages:
            params = train(stage, config, params, codec, stock, seed, log)
            if stage.saved:
                figures = diagnose(config, params, codec, seed)
                log.append({'stage': stage.name, 'teacher_forced': figures})
                print(f'{stage.name}: {json.dumps(figures, indent=2)}', flush=True)
                _save(out / stage.name, config, params, blank, log)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog='python -m zeroplay_jax.mini.base_model',
        description=__doc__.split('\n')[0],
        epilog='example:\n  python -m zeroplay_jax.mini.base_model --out again',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        '--out',
        type=pathlib.Path,
        default=HERE,
        help='where clean/ and base/ go; without it over the ones that ship',
    )
    parser.add_argument('--seed', type=int, default=0, help='of weights and episodes (0)')
    args = parser.parse_args()
    build(args.out, args.seed)


if __name__ == '__main__':
    main()
