"""Supervised training of a small checkpoint on demonstrations, stage by stage, and its folder.

All randomness derives from (seed, stage, step), and stages have a fixed number of steps: the same seed on the same
machine gives the same files, also when the training was killed and resumed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import pathlib
import shutil
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool

from zeroplay_jax.learner.checkpoint import Checkpointer
from zeroplay_jax.mini import batches
from zeroplay_jax.mini.demo import OBSERVATION_TOKENS, Demo, Role, render
from zeroplay_jax.mini.stages import Stage
from zeroplay_jax.policy import hf, transformer
from zeroplay_jax.retrieval import progress
from zeroplay_jax.rollout.tokens import Codec

LOG_EVERY = 100  # steps
WARMUP_STEPS = 40
DIAGNOSED_ROWS = 16  # at once


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
    x = transformer.hidden(config, params, batch['tokens'], batch['positions'], batch['segment'])
    # The last position of a row predicts nothing.
    x = x[:, :-1].reshape(-1, x.shape[-1])
    logits = transformer.logits(config, params, x)
    targets = batch['tokens'][:, 1:].reshape(-1)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)

    # Index t is the prediction of token t + 1. The first token of an episode is no target, because the token before it
    # is of another episode; neither is padding.
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

    Both learning rates rise linearly from a twentieth of their peak over WARMUP_STEPS, stay there, and fall linearly
    to a twentieth over the last `decay_share` of the steps.
    """

    def schedule(peak: float) -> optax.Schedule:
        decay_start = int(stage.steps * (1 - stage.decay_share))
        warmup = optax.linear_schedule(0.05 * peak, peak, WARMUP_STEPS)
        decay = optax.linear_schedule(peak, 0.05 * peak, stage.steps - decay_start)
        return optax.join_schedules([warmup, decay], [decay_start])

    def label(path: tuple, leaf: Array) -> str:
        # Muon orthogonalises updates, which suits linear maps but not embedding tables or scales.
        return 'matrix' if path[-1].key == 'kernel' else 'other'

    # The gradient is clipped first (below). Muon normalises each matrix anyway, but in AdamW's moments an outlier would
    # stay for many steps.
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
    roles: Mapping[str, Role],
    materials: Sequence[Any],
    seed: int,
    log: list[dict[str, Any]],
    checkpoints: StageCheckpoints | None = None,
) -> transformer.Params:
    """Trains one stage, or its remaining steps after a restart, and returns the parameters.

    Args:
      stage: the stage.
      config: the model.
      params: initial parameters; their buffers are donated.
      codec: tokenises the episodes.
      roles: roles of the stage's mixture, by name.
      materials: data from which roles write episodes, such as `Library`; one is drawn per episode.
      seed: seed of the training run.
      log: receives one dict per LOG_EVERY steps, with the mean metrics of these steps.
      checkpoints: saves parameters, moments and log every LOG_EVERY steps, and restores those of this stage, if there
        are any; None: nothing is saved.
    """
    # Each stage starts with fresh moments and its own warm-up.
    tx = optimiser(stage)
    state = tx.init(params)
    first_step = 0
    if checkpoints:
        params, state, first_step = checkpoints.restore(stage, params, state, log)
    stage_loss = functools.partial(loss, config, stage.context_weight)

    # Donation lets XLA update parameters and optimiser state in place.
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params, state, batch):
        gradient, metrics = jax.grad(stage_loss, has_aux=True)(params, batch)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, metrics

    recent_metrics = []
    with progress.bar(stage.steps, 'steps', stage.name, initial=first_step) as bar:
        for step in range(first_step, stage.steps):
            stream = batches.episodes(stage, roles, materials, codec, seed, step)
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
                if checkpoints:
                    checkpoints.save(stage, done_steps, params, state, log)
    return params


def train_checkpoints(
    stages: Sequence[Stage],
    template: pathlib.Path,
    roles: Mapping[str, Role],
    materials: Sequence[Any],
    seed: int,
    diagnose: Callable[[Stage, transformer.ModelConfig, transformer.Params, Codec], Any],
    out: pathlib.Path,
    dtype: Any = jnp.float32,
    work: pathlib.Path | None = None,
) -> None:
    """Trains stages one after the other from random weights; writes a folder in `out` for each saved one.

    The stage after a saved one starts from the weights as they were written, so it can be repeated from the folder.

    Args:
      stages: the stages, in order.
      template: folder with config.json and the files of the tokenizer.
      roles: roles of the stages' mixtures, by name.
      materials: data from which roles write episodes, such as `Library`; one is drawn per episode.
      seed: seed of weights and episodes.
      diagnose: called with (stage, config, params, codec) after each saved stage; its JSON value is logged.
      out: folder of the checkpoint folders; existing ones are replaced.
      dtype: data type of the weights in the folders.
      work: folder of the training's own checkpoints, which a restart continues from; None writes none.
    """
    codec = Codec(template)
    config = hf.read_config(template)
    initial_params = transformer.init(config, jax.random.key(seed))
    params = zero_output_projections(initial_params)
    sizes = [leaf.size for leaf in jax.tree.leaves(params)]
    log: list[dict[str, Any]] = [{'seed': seed, 'parameters': sum(sizes)}]
    checkpoints = StageCheckpoints(work, stages) if work else None
    for stage in stages:
        # A finished stage needs no work: its folder was written before the next stage began, and the parameters that
        # it gave are restored with the first unfinished stage.
        if checkpoints and checkpoints.is_finished(stage):
            continue
        params = train(stage, config, params, codec, roles, materials, seed, log, checkpoints)
        if stage.saved:
            figures = diagnose(stage, config, params, codec)
            log.append({'stage': stage.name, 'teacher_forced': figures})
            print(f'{stage.name}: {json.dumps(figures, indent=2)}', flush=True)
            rounded = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
            save(out / (stage.folder or stage.name), config, rounded, template, log)
            params = jax.tree.map(_in_float32, rounded)
    if checkpoints:
        checkpoints.close()


def _in_float32(leaf: Array) -> Array:
    return leaf.astype(jnp.float32)


class StageCheckpoints:
    """The last parameters, moments and log of a training run, in a folder that a restart continues from."""

    def __init__(self, folder: pathlib.Path, stages: Sequence[Stage]):
        """Opens the folder; checkpoints are numbered by the steps of all `stages` together."""
        self._checkpointer = Checkpointer(folder, keep=1)
        self._first_step: dict[str, int] = {}
        total_steps = 0
        for stage in stages:
            self._first_step[stage.name] = total_steps
            total_steps += stage.steps

    def is_finished(self, stage: Stage) -> bool:
        """Whether steps of a later stage were saved.

        A stage of which all steps were saved does not count as finished: its diagnosis and its folder may be missing.
        """
        return (self._checkpointer.latest() or 0) > self._first_step[stage.name] + stage.steps

    def restore(
        self, stage: Stage, params: transformer.Params, state: Any, log: list[dict[str, Any]]
    ) -> tuple[transformer.Params, Any, int]:
        """Returns parameters, moments and the number of the stage's finished steps; replaces the log.

        If nothing of this stage was saved, the arguments and 0 are returned and the log stays.
        """
        saved_steps = self._checkpointer.latest() or 0
        done_steps = saved_steps - self._first_step[stage.name]
        if done_steps <= 0:
            return params, state, 0
        arrays, saved = self._checkpointer.restore({'params': params, 'state': state})
        log[:] = saved['log']
        return arrays['params'], arrays['state'], done_steps

    def save(
        self,
        stage: Stage,
        done_steps: int,
        params: transformer.Params,
        state: Any,
        log: Sequence[dict[str, Any]],
    ) -> None:
        """Saves the state after a number of steps of a stage."""
        step = self._first_step[stage.name] + done_steps
        self._checkpointer.save(step, {'params': params, 'state': state}, {'log': list(log)})

    def close(self) -> None:
        """Waits for the last save."""
        self._checkpointer.close()


def _mean_metrics(step_metrics: Sequence[dict[str, Array]]) -> dict[str, float]:
    """Returns the mean of each metric over steps."""
    means = {}
    for name in step_metrics[0]:
        values = [float(metrics[name]) for metrics in step_metrics]
        means[name] = float(np.mean(values))
    return means


# ---- diagnosis ---------------------------------------------------------------------------------------------


class Predicted(NamedTuple):
    """Teacher-forced predictions of episodes; index t belongs to the token at position t + 1.

    Attributes:
      is_policy: bool [episodes, tokens − 1], whether the policy wrote the token.
      is_correct: bool [episodes, tokens − 1], whether it wrote the token and the model finds this token most probable.
    """

    is_policy: Bool[np.ndarray, 'episodes tokens']
    is_correct: Bool[np.ndarray, 'episodes tokens']

    @property
    def whole_episodes(self) -> Bool[np.ndarray, ' episodes']:
        """Whether all policy tokens of an episode are predicted."""
        return self.is_correct.sum(1) == self.is_policy.sum(1)

    def figures(self) -> dict[str, float]:
        """Returns the shares of predicted policy tokens and of episodes with all of them predicted.

        Keys: 'tokens' and 'episodes', the shares; 'count', the number of episodes.
        """
        # Episodes that were too long have no tokens here; they would count as predicted.
        fits = self.is_policy.any(1)
        return {
            'tokens': float(self.is_correct.sum() / self.is_policy.sum()),
            'episodes': float(self.whole_episodes[fits].mean()),
            'count': int(fits.sum()),
        }


def fixed_demos(
    name: str, role: Role, material: Any, errors: Any, seed: int, count: int
) -> list[Demo]:
    """Returns `count` demonstrations of a role, always the same ones for a seed, to diagnose checkpoints with.

    Args:
      name: name of the role, from which its random numbers derive.
      role: writes the demonstrations.
      material: what they are written from, see `Role`; not part of the training.
      errors: deliberate errors, see `Role`.
    """
    # One random stream per role, so that a new role does not change the episodes of another one.
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return [role.write(material, rng, errors) for _ in range(count)]


def teacher_forced(
    config: transformer.ModelConfig,
    params: transformer.Params,
    codec: Codec,
    demonstrations: Sequence[Demo],
    tokens: int,
    observation_tokens: int = OBSERVATION_TOKENS,
) -> Predicted:
    """Predicts every token of demonstrations from the correct tokens before it.

    Args:
      demonstrations: the episodes.
      tokens: tokens of a row; the row of a longer episode stays empty.
      observation_tokens: longest search result.
    """
    episodes = [render(codec, demo, observation_tokens) for demo in demonstrations]
    # One episode per row, so that a row of the result is an episode.
    batch = batches.empty_batch(len(demonstrations), tokens)
    for row, episode in enumerate(episodes):
        if len(episode.tokens) <= tokens:
            batches.write_episode(batch, row, start=0, segment=1, episode=episode)
    is_policy = batch['policy'][:, 1:] > 0
    is_correct = np.zeros_like(is_policy)
    # In parts, because logits and attention of long episodes would take gigabytes.
    for start in range(0, len(demonstrations), DIAGNOSED_ROWS):
        rows = slice(start, start + DIAGNOSED_ROWS)
        part = {name: values[rows] for name, values in batch.items()}
        is_correct[rows] = _predicted_correctly(config, params, part)
    # Tokens outside the policy's text, padding included, are left out of the statistics.
    return Predicted(is_policy, is_correct & is_policy)


@functools.partial(jax.jit, static_argnums=0)
def _predicted_correctly(
    config: transformer.ModelConfig, params: transformer.Params, batch: dict[str, Array]
) -> Array:
    """Returns whether the most probable next token is the actual one, bool [episodes, tokens − 1]."""
    x = transformer.hidden(config, params, batch['tokens'], batch['positions'], batch['segment'])
    targets = batch['tokens'][:, 1:]
    logits = transformer.logits(config, params, x[:, :-1].reshape(-1, x.shape[-1]))
    predictions = jnp.argmax(logits, -1)
    return predictions.reshape(targets.shape) == targets


# ---- parameters and folders --------------------------------------------------------------------------------


def zero_output_projections(params: transformer.Params) -> transformer.Params:
    """Returns the parameters with the output projections of attention and MLP set to 0: every layer is the identity.

    At the start of training, random outputs of layers would only add noise to the embeddings, which the layers learn to
    copy.
    """

    def zero_if_output(path: tuple, leaf: Array) -> Array:
        if len(path) >= 2 and path[-2].key in ('o', 'down'):
            return leaf * 0
        return leaf

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
    log_lines = [json.dumps(entry) + '\n' for entry in log]
    (folder / 'training.jsonl').write_text(''.join(log_lines))
    # The format of sha256sum, so that `sha256sum --check` verifies a folder.
    hash_lines = []
    for file in sorted(folder.iterdir()):
        if file.is_file():
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            hash_lines.append(f'{digest}  {file.name}\n')
    (folder / 'SHA256SUMS').write_text(''.join(hash_lines))
