"""Writes trained weights as folders that other libraries load, and fingerprints of the weights of a run."""

from __future__ import annotations

import pathlib

import jax

from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.learner.weights_view import FrozenBase, weights_fingerprint
from zeroplay_jax.policy import adapter_folders, adapters, hf, sharding
from zeroplay_jax.policy.adapter_config import AdapterConfig
from zeroplay_jax.policy.config_fields import is_wrapped
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.selfplay.engine import Engine
from zeroplay_jax.training import build


def write_policy(
    config,
    context: build.RunContext,
    learner: Learner,
    texts: dict[str, str],
    adapter_texts: dict[str, str],
    folder: pathlib.Path,
) -> None:
    """Writes the weights of a learner to a folder; all processes must call it.

    It is a folder of Hugging Face with whole weights; with `policy.adapters` one of PEFT, and with
    `policy.adapters.merge` there is a folder of whole weights beside it, with '-merged' behind its name.

    Args:
      texts: further files of a folder with whole weights.
      adapter_texts: the same of a folder with an adapter.
      folder: must not exist. A folder beside it that exists is left as it is.
    """
    if context.base is None:
        hf.save(folder, context.model, learner.params, like=context.folder, texts=texts)
        return
    merged_folder = folder.with_name(f'{folder.name}-merged')
    hosts = context.rollouts.hosts
    # Written first, so that both are there when the other one is. The first process decides for all.
    if config.policy.adapters.merge and not hosts.gather(merged_folder.exists())[0]:
        write_merged(
            context.folder, context.model, context.base, learner.params, merged_folder, texts
        )
    write_adapter(config, context.folder, context.model, learner.params, folder, adapter_texts)


def write_adapter(
    config,
    base: pathlib.Path,
    model: ModelConfig,
    adapter: Params,
    folder: pathlib.Path,
    texts: dict[str, str] | None = None,
) -> None:
    """Writes an adapter of a run as a PEFT folder.

    Args:
      config: config of the run.
      base: folder of the base.
      model: its architecture.
      texts: further files of the folder.
    """
    settings = config.policy.adapters
    modules: tuple[str, ...] = ()
    if is_wrapped(base):
        modules = adapter_folders.wrapped_modules(model, settings.linears)
    adapter_config = AdapterConfig(
        rank=settings.rank,
        alpha=settings.alpha,
        linears=tuple(sorted(settings.linears)),
        base=base.resolve(),
        modules=modules,
    )
    adapter_folders.save(folder, model, adapter_config, adapter, texts)


def write_merged(
    like: pathlib.Path,
    model: ModelConfig,
    base: FrozenBase,
    adapter: Params,
    folder: pathlib.Path,
    texts: dict[str, str] | None = None,
) -> None:
    """Writes the weights of a base with an adapter, float32, as a folder of Hugging Face.

    Args:
      like: folder of the base.
      model: its architecture.
      base: its weights, as updates read them.
      texts: further files of the folder.
    """
    joined = adapters.join(base.params, adapter)
    shapes = jax.eval_shape(adapters.merged, joined)
    layout = sharding.parameter_shardings(shapes, base.mesh, training_layout=True)
    whole = jax.jit(adapters.merged, out_shardings=layout)(joined)
    hf.save(folder, model, whole, like=like, texts=texts)


def fingerprints(engine: Engine) -> dict[str, list[int]]:
    """Returns name of weights → their fingerprint."""
    return {
        name: weights_fingerprint(learner.params, learner.mesh)
        for name, learner in engine.learners.items()
    }
