"""Supervised training of a small checkpoint on demonstrations, stage by stage, and its folder.

All randomness derives from (seed, stage, step), and stages have a fixed number of steps: the same seed on the same
machine gives the same files.
"""

from __future__ import annotations

import functools
import hashlib
import json
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from tools.checkpoints import batches
from tools.checkpoints.demo import Role
from tools.checkpoints.stages import Stage
from zeroplay_jax.policy import hf, transformer
from zeroplay_jax.retrieval import progress
from zeroplay_jax.rollout.tokens import Codec

LOG_EVERY = 100  # steps
WARMUP_STEPS = 40


def loss(
    config: transformer.ModelConfig,
    context_weight: float,
    params: transformer.Params,
    batch: dict[str, Any],
) -> tuple[Array, dict[str, Array]]:
    """Returns the training loss and its metrics.

    Args:
      config: the model.
      context_weight: weight of the mean over the tokens that the policy does not write.
      params: parameters of the model.
      batch: int arrays [rows, tokens], see `batches.pack`.

    Returns:
      (loss, metrics): mean negative log-likelihood of the policy's tokens plus `context_weight` times that of the
      other tokens; and {'loss': the first of these two means, 'token_accuracy': share of the policy's tokens that the
      model finds most probable}.
    """
    logits = _next_token_logits(config, params, batch)
    targets = batch['tokens'][:, 1:].reshape(-1)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)

    # Index t is the prediction of token t + 1. The first token of an episode is no target, because the token before it
    # is of another episode; neither is padding.
    segment = batch['segment']
    is_target = (segment[:, 1:] == segment[:, :-1]) & (segment[:, 1:] > 0)
    is_target = is_target.reshape(-1)
    is_policy = is_target & (batch['policy'][:, 1:].reshape(-1) > 0)

    policy_loss = _masked_mean(nll, is_policy)
    total_loss = policy_loss + context_weight * _masked_mean(nll, is_target & ~is_policy)
    token_accuracy = _masked_mean(jnp.argmax(logits, -1) == targets, is_policy)
    return total_loss, {'loss': policy_loss, 'token_accuracy': token_accuracy}


def _next_token_logits(
    config: transformer.ModelConfig, params: transformer.Params, batch: dict[str, Array]
) -> Array:
    """Returns the logits [rows · (tokens − 1), vocabulary] of all tokens but the first of each row."""
    tokens = batch['tokens']
    x = transformer.hidden(config, params, tokens, batch['positions'], batch['segment'])
    # The last position of a row predicts nothing.
    x = x[:, :-1].reshape(-1, x.shape[-1])
    return transformer.logits(config, params, x)


def _masked_mean(values: Array, mask: Array) -> Array:
    # A batch may lack one kind of token; its mean is then 0 instead of NaN.
    return jnp.sum(values * mask) / jnp.maximum(jnp.sum(mask), 1)


def optimiser(stage: Stage) -> optax.GradientTransformation:
    """Returns Muon (Jordan et al. 2024) for matrices and AdamW for embeddings and norms.

    Both learning rates rise linearly from a twentieth of their peak over WARMUP_STEPS, stay there, and fall linearly
    to a twentieth over the last `decay_share` of the steps.
    """
    decay_start = int(stage.steps * (1 - stage.decay_share))

    def schedule(peak: float) -> optax.Schedule:
        low = 0.05 * peak
        warmup = optax.linear_schedule(low, peak, WARMUP_STEPS)
        decay = optax.linear_schedule(peak, low, stage.steps - decay_start)
        return optax.join_schedules([warmup, decay], [decay_start])

    def label(path: tuple, leaf: Array) -> str:
        # Muon orthogonalises updates, which suits linear maps but not embedding tables or scales.
        return 'matrix' if path[-1].key == 'kernel' else 'other'

    transforms = {
        'matrix': optax.contrib.muon(schedule(stage.muon_rate)),
        'other': optax.adamw(schedule(stage.adam_rate), b2=0.98, weight_decay=0.0),
    }
    labels = functools.partial(jax.tree_util.tree_map_with_path, label)
    # Muon normalises each matrix anyway, but in AdamW's moments an outlier would stay for many steps.
    clip = optax.clip_by_global_norm(1.0)
    return optax.chain(clip, optax.multi_transform(transforms, labels))


def train(
    stage: Stage,
    config: transformer.ModelConfig,
    params: transformer.Params,
    codec: Codec,
    roles: Mapping[str, Role],
    materials: Sequence[Any],
    seed: int,
    log: list[dict[str, Any]],
) -> transformer.Params:
    """Trains one stage and returns the parameters.

    Args:
      stage: the stage.
      config: the model.
      params: initial parameters; their buffers are donated.
      codec: tokenises the episodes.
      roles: roles of the stage's mixture, by name.
      materials: data from which roles write episodes, such as `Library`; one is drawn per episode.
      seed: seed of the training run.
      log: receives one dict per LOG_EVERY steps, with the mean metrics of these steps.
    """
    # Each stage starts with fresh moments and its own warm-up.
    tx = optimiser(stage)
    state = tx.init(params)
    loss_gradient = jax.grad(functools.partial(loss, config, stage.context_weight), has_aux=True)

    # Donation lets XLA update parameters and optimiser state in place.
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params, state, batch):
        gradient, metrics = loss_gradient(params, batch)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, metrics

    recent_metrics = []
    with progress.Bar(stage.steps, 'steps', stage.name) as bar:
        for step in range(1, stage.steps + 1):
            stream = batches.episodes(stage, roles, materials, codec, seed, step - 1)
            params, state, metrics = update(params, state, batches.pack(stage, stream))
            # Kept on the device: reading the values here would wait for every step.
            recent_metrics.append(metrics)
            bar.update()
            if step % LOG_EVERY == 0 or step == stage.steps:
                log.append({'stage': stage.name, 'step': step} | _mean_metrics(recent_metrics))
                print(json.dumps(log[-1]), flush=True)
                recent_metrics = []
    return params


def train_checkpoints(
    stages: Sequence[Stage],
    template: pathlib.Path,
    roles: Mapping[str, Role],
    materials: Sequence[Any],
    seed: int,
    out: pathlib.Path,
    dtype: Any = jnp.float32,
    start: pathlib.Path | None = None,
) -> None:
    """Trains stages one after the other; writes a folder in `out` for each that names one.

    The stage after such a one starts from the weights as they were written, so it can be repeated from the folder.

    Args:
      stages: the stages, in order.
      template: folder with config.json and the files of the tokenizer.
      roles: roles of the stages' mixtures, by name.
      materials: data from which roles write episodes, such as `Library`; one is drawn per episode.
      seed: seed of weights and episodes.
      out: folder of the checkpoint folders; existing ones are replaced.
      dtype: data type of the weights in the folders.
      start: folder of the weights that training starts from; None: random weights.
    """
    codec = Codec(template)
    config = hf.read_config(template)
    if start:
        params = hf.load(start, config)
    else:
        params = zero_output_projections(transformer.init(config, jax.random.key(seed)))
    parameter_count = sum(leaf.size for leaf in jax.tree.leaves(params))
    log: list[dict[str, Any]] = [{'seed': seed, 'parameters': parameter_count}]
    for stage in stages:
        params = train(stage, config, params, codec, roles, materials, seed, log)
        if stage.folder:
            written_params = optax.tree.cast(params, dtype)
            save(out / stage.folder, config, written_params, template, log)
            params = optax.tree.cast(written_params, jnp.float32)


def _mean_metrics(step_metrics: Sequence[dict[str, Array]]) -> dict[str, float]:
    """Returns the mean of each metric over steps."""
    return {
        name: float(np.mean([float(metrics[name]) for metrics in step_metrics]))
        for name in step_metrics[0]
    }


def zero_output_projections(params: transformer.Params) -> transformer.Params:
    """Returns the parameters with the output projections of attention and MLP set to 0: every layer is the identity.

    At the start of training, random outputs of layers would only add noise to the embeddings, which the layers learn to
    copy.
    """

    def zero_if_output(path: tuple, leaf: Array) -> Array:
        # The last key is that of the array, such as 'kernel'.
        return leaf * 0 if len(path) > 1 and path[-2].key in ('o', 'down') else leaf

    return jax.tree_util.tree_map_with_path(zero_if_output, params)


def save(
    folder: pathlib.Path,
    config: transformer.ModelConfig,
    params: transformer.Params,
    template: pathlib.Path,
    log: Sequence[dict[str, Any]],
) -> None:
    """Writes a checkpoint folder with its training log and the hashes of its files; an existing folder is deleted.

    Args:
      folder: the folder.
      config: the model.
      params: its parameters.
      template: folder that config.json and the tokenizer are copied from.
      log: entries of training.jsonl.
    """
    # Files of an older layout must not stay in the folder.
    if folder.exists():
        shutil.rmtree(folder)
    hf.save(folder, config, params, like=template)
    log_lines = [f'{json.dumps(entry)}\n' for entry in log]
    (folder / 'training.jsonl').write_text(''.join(log_lines))
    # The format of sha256sum, so that `sha256sum --check` verifies a folder.
    hash_lines = [
        f'{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n'
        for file in sorted(folder.iterdir())
    ]
    (folder / 'SHA256SUMS').write_text(''.join(hash_lines))
