"""The weights of a run: which role has which, loading them, and the learners that train them."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping

from jax.sharding import Mesh

from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.learner.value_network import ValueNetwork
from zeroplay_jax.learner.weights_view import FrozenBase
from zeroplay_jax.policy import adapter_config, adapter_folders, adapters, hf
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.selfplay.recipe import trained_roles
from zeroplay_jax.settings.errors import fail


def weights_of_roles(config) -> dict[str, str]:
    """Returns trained role → name of its weights: the role's name, or 'policy' unless config.weights='separate'."""
    weights: dict[str, str] = {}
    for role in trained_roles(config):
        weights[role] = role if config.weights == 'separate' else 'policy'
    return weights


def check_base(config) -> None:
    """Raises ConfigError if the base of a training run with adapters is an adapter itself."""
    # Not a rule about configs: an evaluation with the same config takes the folder of a trained adapter.
    if adapter_config.is_adapter(config.policy.path):
        problem = 'this is an adapter, and new ones need a base'
        fix = 'name the folder of its base, and the adapter in <role>.adapter'
        fail('policy.path', config.policy.path, problem, fix)


def load_weights(
    config,
    folder: pathlib.Path,
    model: ModelConfig,
    mesh: Mesh,
    uses_adapters: bool,
    shows_progress: bool,
) -> tuple[Params, FrozenBase | None]:
    """Returns (whole weights in the learner's layout, None) or, with adapters, ({}, the base)."""
    if not uses_adapters:
        return hf.load(folder, model, mesh, training_layout=True, progress=shows_progress), None
    settings = config.policy.adapters
    # Updates and samplers read the same arrays, so there is no float32 copy.
    params = hf.load(
        folder,
        model,
        mesh,
        progress=shows_progress,
        matrix_dtype=model.dtype,
        quantized=settings.quantize == 'int8',
    )
    base = FrozenBase.of(
        params,
        mesh,
        settings.alpha / settings.rank,
        weight_decay=settings.weight_decay,
    )
    return {}, base


def initial_adapter(config, base: FrozenBase, model: ModelConfig, weights: str) -> Params:
    """Returns the adapter that weights of a name start from: the one in a folder, or a fresh one."""
    # Roles that share their weights name the same folder (configuration/adapter_rules.py).
    folders = {
        config[role].adapter for role, name in weights_of_roles(config).items() if name == weights
    }
    folder = folders.pop()
    if folder:
        return adapter_folders.load(folder, model)
    settings = config.policy.adapters
    return adapters.init(base.params, settings.linears, settings.rank, config.seed, weights)


def versions_in_use(config, weights: Mapping[str, str]) -> dict[str, int]:
    """Returns name of weights → number of versions that `AdapterPoolWeights` has to hold of them."""
    versions: dict[str, int] = {}
    for name in weights.values():
        # With `rollout.ahead` the rollouts in progress are at most one training step old, and a step makes one version
        # for each role that trains the weights.
        if name not in versions or config.rollout.ahead:
            versions[name] = versions.get(name, 1 if config.rollout.ahead else 0) + 1
    return versions


def build_learners(
    config, model: ModelConfig, mesh: Mesh, params: Params, base: FrozenBase | None
) -> dict[str, Learner]:
    """Returns one learner per set of trained weights, by name, all initialised with the loaded weights."""
    roles_of_weights: dict[str, dict] = {}
    for role, weights in weights_of_roles(config).items():
        roles_of_weights.setdefault(weights, {})[role] = config[role]
    micro_batch_shape = (config.micro.rows, config.micro.tokens)
    # One device needs no layout constraints, and the compiled program is simpler without them.
    model = dataclasses.replace(model, mesh=mesh if mesh.size > 1 else None)
    # Each learner copies `params`, because an update donates the buffers of its weights.
    learners: dict[str, Learner] = {}
    for weights, roles in roles_of_weights.items():
        initial = params
        if base is not None:
            initial = initial_adapter(config, base, model, weights)
        learners[weights] = Learner(
            model,
            mesh,
            roles,
            initial,
            micro_batch_shape,
            shared_optimizer=config.shared_optimizer,
            teacher_tokens=config.privileged.tokens,
            offload=config.offload,
            weights=config.micro.weights,
            keeps_views=bool(config.rollout.ahead),
            base=base,
        )
    return learners


def build_value_networks(
    config, model: ModelConfig, mesh: Mesh, params: Params
) -> dict[str, ValueNetwork]:
    """Returns the value network of every role with `baseline=value`, initialised with the loaded weights."""
    model = dataclasses.replace(model, mesh=mesh if mesh.size > 1 else None)
    networks: dict[str, ValueNetwork] = {}
    for role in trained_roles(config):
        if config[role].baseline == 'value':
            settings = config.value_network.copy_and_resolve_references()
            settings.learning_rate = settings.learning_rate or 10 * config[role].learning_rate
            networks[role] = ValueNetwork(model, mesh, settings, params, offload=config.offload)
    return networks
