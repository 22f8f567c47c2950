"""Trains the tiny checkpoints from scratch: `python -m zeroplay_jax.mini.base_model [--out FOLDER] [--seed 0]`.

Training is supervised, on the demonstrations of `mini/demos.py`, in four stages: copying; reading; all roles, which
gives `clean/`, the upper bound that plays every role well; and demonstrations with deliberate errors
(`demos.ErrorRates`), which gives `base/`, the start of self-play: correct format, imperfect skill. Each folder also
contains its training log and the hashes of its files.

All randomness derives from (seed, stage, step), and stages have a fixed number of steps: the same seed on the same
machine gives the same files.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import pathlib
import shutil
import sys
import tempfile
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from zeroplay_jax.mini import batches, demos, tokenizer
from zeroplay_jax.mini.demo import render
from zeroplay_jax.mini.library import Library
from zeroplay_jax.mini.stages import STAGES, Stage
from zeroplay_jax.policy import hf, transformer
from zeroplay_jax.retrieval import progress
from zeroplay_jax.rollout import prompts
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.types import ENV

HERE = pathlib.Path(__file__).parent
# A Qwen3 configuration, so that any tool that reads Hugging Face folders loads the checkpoints.
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

LIBRARY_COUNT = 8
WORLDS_PER_LIBRARY = 20
LOG_EVERY = 100  # steps
DIAGNOSED_EPISODES = 64  # per role
DIAGNOSED_TOKENS = 640  # longest episode of the diagnosis
WARMUP_STEPS = 40


# ---- training ----------------------------------------------------------------------------------------------


def loss(
    config: transformer.ModelConfig,
    context_weight: float,
    params: transformer.Params,
    batch: dict[str, Any],
) -> tuple[Array, dict[str, Array]]:
    """Returns the training loss and its metrics.

    Args:
      config: the model.
      context_weight: weight of the tokens that the policy does not write.
      params: parameters of the model.
      batch: see `batches.pack`.

    Returns:
      (loss, metrics): mean negative log-likelihood of the policy's tokens plus `context_weight` times that of the
      other tokens, and {'loss': the first of the two, 'token_accuracy': share of policy tokens predicted greedily}.
    """
    x = transformer.hidden(config, params, batch['tokens'], batch['positions'], batch['segment'])
    # The last position of a row predicts nothing.
    x = x[:, :-1].reshape(-1, x.shape[-1])
    logits = transformer.logits(config, params, x)
    targets = batch['tokens'][:, 1:].reshape(-1)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)

    # The first token of an episode has no context, and padding is no target.
    segment = batch['segment']
    same_episode = segment[:, 1:] == segment[:, :-1]
    is_episode = segment[:, 1:] > 0
    is_target = (same_episode & is_episode).reshape(-1)
    policy_flags = batch['policy'][:, 1:].reshape(-1)
    is_policy = is_target & (policy_flags > 0)
    is_context = is_target & ~is_policy

    policy_loss = _masked_mean(nll, is_policy)
    predictions = jnp.argmax(logits, -1)
    token_accuracy = _masked_mean(predictions == targets, is_policy)
    total_loss = policy_loss + context_weight * _masked_mean(nll, is_context)
    return total_loss, {'loss': policy_loss, 'token_accuracy': token_accuracy}


def _masked_mean(values: Array, mask: Array) -> Array:
    # A batch may lack one kind of token; its mean is then 0 instead of NaN.
    total = jnp.sum(values * mask)
    return total / jnp.maximum(jnp.sum(mask), 1)


def optimiser(stage: Stage) -> optax.GradientTransformation:
    """Returns Muon (Jordan et al. 2024) for matrices and AdamW for embeddings and norms.

    Both learning rates are warmed up, held, and decayed at the end of the stage.
    """

    def schedule(peak: float) -> optax.Schedule:
        decay_start = int(stage.steps * (1 - stage.decay_share))
        warmup = optax.linear_schedule(0.05 * peak, peak, WARMUP_STEPS)
        decay = optax.linear_schedule(peak, 0.05 * peak, stage.steps - decay_start)
        return optax.join_schedules([warmup, decay], [decay_start])

    def label(path: tuple, leaf: Array) -> str:
        # Muon orthogonalises updates, which suits linear maps but not embedding tables or scales.
        return 'matrix' if path[-1].key == 'kernel' else 'other'

    # Clipping comes first: Muon normalises each matrix anyway, but AdamW's moments remember an outlier.
    transforms = {
        'matrix': optax.contrib.muon(schedule(stage.muon_rate)),
        'other': optax.adamw(schedule(stage.adam_rate), b2=0.98, weight_decay=0.0),
    }
    labels = functools.partial(jax.tree_util.tree_map_with_path, label)
    clip = optax.clip_by_global_norm(1.0)
    return optax.chain(clip, optax.multi_transform(transforms, labels))


def train(
    stage: Stage,
    config: transformer.ModelConfig,
    params: transformer.Params,
    codec: Codec,
    stock: Sequence[Library],
    seed: int,
    log: list[dict[str, Any]],
) -> transformer.Params:
    """Trains one stage and returns the parameters.

    Args:
      stage: the stage.
      config: the model.
      params: initial parameters; their buffers are donated.
      codec: tokenises the episodes.
      stock: libraries to draw episodes from.
      seed: seed of the training run.
      log: receives one dict per LOG_EVERY steps, with the mean metrics of these steps.
    """
    # Each stage starts with fresh moments and its own warm-up.
    tx = optimiser(stage)
    state = tx.init(params)
    stage_loss = functools.partial(loss, config, stage.context_weight)

    # Donation lets XLA update parameters and optimiser state in place.
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params, state, batch):
        gradient, metrics = jax.grad(stage_loss, has_aux=True)(params, batch)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, metrics

    recent_metrics = []
    with progress.bar(stage.steps, 'steps', stage.name) as bar:
        for step in range(stage.steps):
            stream = batches.episodes(stage, stock, codec, seed, step)
            batch = batches.pack(stage, stream)
            params, state, metrics = update(params, state, batch)
            # Kept on the device: reading the values here would wait for every step.
            recent_metrics.append(metrics)
            bar.update()
            done_steps = step + 1
            if done_steps % LOG_EVERY == 0 or done_steps == stage.steps:
                means = _mean_metrics(recent_metrics)
                log.append({'stage': stage.name, 'step': done_steps, **means})
                # The bar's own method prints above the bar instead of into it.
                bar.write(json.dumps(log[-1]))
                sys.stdout.flush()
                recent_metrics = []
    return params


def _mean_metrics(step_metrics: Sequence[dict[str, Array]]) -> dict[str, float]:
    means = {}
    for name in step_metrics[0]:
        values = [float(metrics[name]) for metrics in step_metrics]
        means[name] = float(np.mean(values))
    return means


# ---- diagnosis ---------------------------------------------------------------------------------------------


def diagnose(
    config: transformer.ModelConfig, params: transformer.Params, codec: Codec, seed: int
) -> dict[str, dict[str, float]]:
    """Measures teacher-forced accuracy on error-free episodes with held-out names.

    Returns:
      Role → {'tokens': share of policy tokens that greedy decoding predicts, 'episodes': share of episodes in which
      it predicts all of them}; the solver's 'episodes' also by hop count. A solver's 'episodes' approximates its
      exact match with greedy decoding.
    """
    (heldout_library,) = batches.libraries(seed, 'evaluation', 1, WORLDS_PER_LIBRARY)

    @jax.jit
    def predicted_correctly(params, batch):
        x = transformer.hidden(
            config, params, batch['tokens'], batch['positions'], batch['segment']
        )
        targets = batch['tokens'][:, 1:]
        logits = transformer.logits(config, params, x[:, :-1].reshape(-1, x.shape[-1]))
        predictions = jnp.argmax(logits, -1)
        return predictions.reshape(targets.shape) == targets

    figures = {}
    for name, role in demos.ROLES.items():
        # A stream per role: a new role does not change the episodes of another one.
        role_key = zlib.crc32(name.encode())
        rng = np.random.default_rng([seed, role_key])
        # One episode per row, so that a row of the result is an episode.
        batch = batches.empty_batch(DIAGNOSED_EPISODES, DIAGNOSED_TOKENS)
        hops = np.zeros(DIAGNOSED_EPISODES, np.int32)
        for row in range(DIAGNOSED_EPISODES):
            demo = role.write(heldout_library, rng, demos.ErrorRates())
            episode = render(codec, demo)
            batches.write_episode(batch, row, start=0, segment=1, episode=episode)
            # A solver searches once per hop.
            hops[row] = sum(part.source == ENV for part in demo.parts)
        is_policy = batch['policy'][:, 1:] > 0
        # Tokens outside the policy's text count as neither right nor wrong.
        is_correct = np.asarray(predicted_correctly(params, batch)) & is_policy
        whole_episode = is_correct.sum(1) == is_policy.sum(1)
        figures[name] = {
            'tokens': float(is_correct.sum() / is_policy.sum()),
            'episodes': float(whole_episode.mean()),
        }
        if name == 'solver':
            for hop_count in np.unique(hops):
                share = float(whole_episode[hops == hop_count].mean())
                figures[f'solver, {hop_count} hops'] = {'episodes': share}
    return figures


# ---- checkpoint folders ------------------------------------------------------------------------------------


def write_config_and_tokenizer(folder: pathlib.Path) -> None:
    """Writes a checkpoint folder without weights: config.json and the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    prompt_texts = [*prompts.BUILT_IN_FORMS.values(), 'Describe the']
    trained_tokenizer = tokenizer.train(prompt_texts)
    tokenizer.write(folder, trained_tokenizer)
    # A multiple of 64 divides over devices. Like large models, it has more rows than the tokenizer has tokens.
    vocab_size = -(-trained_tokenizer.get_vocab_size() // 64) * 64
    config = {
        **ARCHITECTURE,
        'vocab_size': vocab_size,
        'eos_token_id': trained_tokenizer.token_to_id(tokenizer.END),
        'pad_token_id': trained_tokenizer.token_to_id(tokenizer.PAD),
    }
    (folder / 'config.json').write_text(json.dumps(config, indent=2) + '\n')


def _save(
    folder: pathlib.Path,
    config: transformer.ModelConfig,
    params: transformer.Params,
    template: pathlib.Path,
    log: Sequence[dict[str, Any]],
) -> None:
    """Replaces a checkpoint folder; `template` is the folder with the config and the tokenizer."""
    # Files of an older layout must not stay in the folder.
    if folder.exists():
        shutil.rmtree(folder)
    hf.save(folder, config, params, like=template)
    log_lines = [json.dumps(entry) + '\n' for entry in log]
    (folder / 'training.jsonl').write_text(''.join(log_lines))
    # The format of sha256sum, so that `sha256sum --check` verifies a folder.
    hash_lines = []
    for file in sorted(folder.iterdir()):
        if file.is_file():
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            hash_lines.append(f'{digest}  {file.name}\n')
    (folder / 'SHA256SUMS').write_text(''.join(hash_lines))


def _zero_output_projections(params: transformer.Params) -> transformer.Params:
    """Returns parameters with which every layer is the identity.

    At first, random layer outputs would only add noise to the embeddings, which the layers learn to copy.
    """

    def zero_if_output(path: tuple, leaf: Array) -> Array:
        if len(path) >= 2 and path[-2].key in ('o', 'down'):
            return leaf * 0
        return leaf

    return jax.tree_util.tree_map_with_path(zero_if_output, params)


def build(out: pathlib.Path, seed: int, stages: Sequence[Stage] = STAGES) -> None:
    """Trains all stages and writes `out`/<name> for each saved one, replacing existing folders."""
    with tempfile.TemporaryDirectory() as temporary_folder:
        # hf.save copies config and tokenizer from a folder, which here is only needed during training.
        template = pathlib.Path(temporary_folder)
        write_config_and_tokenizer(template)
        codec = Codec(template)
        config = hf.read_config(template)
        initial_params = transformer.init(config, jax.random.key(seed))
        params = _zero_output_projections(initial_params)
        sizes = [leaf.size for leaf in jax.tree.leaves(params)]
        stock = list(batches.libraries(seed, 'train', LIBRARY_COUNT, WORLDS_PER_LIBRARY))
        log: list[dict[str, Any]] = [{'seed': seed, 'parameters': sum(sizes)}]
        for stage in stages:
            params = train(stage, config, params, codec, stock, seed, log)
            if stage.saved:
                figures = diagnose(config, params, codec, seed)
                log.append({'stage': stage.name, 'teacher_forced': figures})
                print(f'{stage.name}: {json.dumps(figures, indent=2)}', flush=True)
                _save(out / stage.name, config, params, template, log)


def main() -> None:
    """Parses the command line and trains."""
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
        help='folder for clean/ and base/; by default the ones of the repository are replaced',
    )
    parser.add_argument('--seed', type=int, default=0, help='seed of weights and episodes (0)')
    args = parser.parse_args()
    build(args.out, args.seed)


if __name__ == '__main__':
    main()
