"""Writes the trained weights of a run as folders that other libraries load, and tells which weights have changed."""

from __future__ import annotations

import functools
import pathlib
import shutil

import jax

from zeroplay_jax.learner.fingerprint import weights_fingerprint
from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.policy import adapter_folders, adapters, hf, sharding
from zeroplay_jax.policy.adapter_config import AdapterConfig
from zeroplay_jax.retrieval import progress
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.selfplay.engine import Engine
from zeroplay_jax.training import build
from zeroplay_jax.training.model_card import export_texts


def export(
    config,
    hosts: Hosts,
    workdir: pathlib.Path,
    context: build.RunContext,
    engine: Engine,
    shows_progress: bool,
    unchanged: list[str],
) -> None:
    """Writes the weights of each policy to workdir/policy/<name>, if that does not exist.

    The folder is one of Hugging Face with whole weights. With `policy.adapters` it is one of PEFT, and with
    `policy.adapters.merge` there is workdir/policy/<name>-merged too, with whole weights.

    Args:
      unchanged: policies that are not exported, because their weights are those of the start.
    """
    for name, learner in engine.learners.items():
        if name in unchanged:
            if hosts.is_first:
                print(f'policy {name} has the weights of the start and is not exported')
            continue
        folder = workdir / 'policy' / name
        texts = _texts(config, context, engine, name)
        writers = {folder: functools.partial(_write_whole, context, learner, texts)}
        if context.base is not None:
            writers = {folder: functools.partial(_write_adapter, config, context, learner)}
            if config.policy.adapters.merge:
                merged_folder = folder.with_name(f'{name}-merged')
                writers[merged_folder] = functools.partial(_write_merged, context, learner, texts)
        for destination, write in writers.items():
            # The first process decides for all, because writing is a collective call. A folder that exists is complete
            # (it is renamed when it is) and current (`remove_exports`).
            exists = hosts.gather(destination.exists())[0]
            if exists:
                continue
            with progress.clock(f'export {destination.name}', shows_progress):
                write(destination)


def _texts(config, context: build.RunContext, engine: Engine, weights: str) -> dict[str, str]:
    """Returns model card and generation config of a policy, for the roles that train it, the evaluated one first."""
    roles = []
    for role, name in engine.weights_of.items():
        if name == weights:
            position = 0 if role == engine.recipe.evaluated_role else len(roles)
            roles.insert(position, context.rollouts.roles[role])
    return export_texts(config, context.folder, roles, context.rollouts.prompts, weights)


def _write_whole(
    context: build.RunContext, learner: Learner, texts: dict[str, str], folder: pathlib.Path
) -> None:
    hf.save(folder, context.model, learner.params, like=context.folder, texts=texts)


def _write_adapter(
    config, context: build.RunContext, learner: Learner, folder: pathlib.Path
) -> None:
    settings = config.policy.adapters
    adapter_config = AdapterConfig(
        rank=settings.rank,
        alpha=settings.alpha,
        linears=tuple(sorted(settings.linears)),
        base=context.folder.resolve(),
    )
    adapter_folders.save(folder, context.model, adapter_config, learner.params)


def _write_merged(
    context: build.RunContext, learner: Learner, texts: dict[str, str], folder: pathlib.Path
) -> None:
    assert context.base is not None
    joined = adapters.join(context.base.params, learner.params)
    shapes = jax.eval_shape(adapters.merged, joined)
    layout = sharding.parameter_shardings(shapes, context.mesh, training_layout=True)
    whole = jax.jit(adapters.merged, out_shardings=layout)(joined)
    hf.save(folder, context.model, whole, like=context.folder, texts=texts)


def remove_exports(hosts: Hosts, workdir: pathlib.Path) -> None:
    """Removes the exported weights of a run that stopped and now continues: they will be outdated."""
    if hosts.is_first:
        shutil.rmtree(workdir / 'policy', ignore_errors=True)


def fingerprints(engine: Engine) -> dict[str, list[int]]:
    """Returns name of weights → their fingerprint."""
    return {
        name: weights_fingerprint(learner.params, learner.mesh)
        for name, learner in engine.learners.items()
    }


def unchanged_policies(engine: Engine, first_weights: dict[str, list[int]]) -> list[str]:
    """Returns the names of the learners whose weights have the fingerprints of the start, see `fingerprints`."""
    current_weights = fingerprints(engine)
    return [name for name, weights in current_weights.items() if weights == first_weights[name]]
