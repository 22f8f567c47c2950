"""The settings with which a policy in a checkpoint folder is asked and sampled."""

from __future__ import annotations

import pathlib

from ml_collections import ConfigDict

from zeroplay_jax.configs import common, drzero, english, quickstart
from zeroplay_jax.configuration.fields import default_config, leaves, read_stored_config
from zeroplay_jax.policy import shape
from zeroplay_jax.policy.adapter_config import base_folder
from zeroplay_jax.runtime import record as run_record
from zeroplay_jax.selfplay.recipe import trained_roles
from zeroplay_jax.settings.kinds import (
    BUILT_IN_CHECKPOINT,
    ENGLISH_CHECKPOINT,
    PARTS_CHECKPOINT,
)

# Fields that depend on the machine of a run.
_OF_MACHINE = """
mesh.replica mesh.fsdp mesh.model micro.rows offload policy.remat policy.attention policy.scan sampler.page
sampler.attention sampler.slots sampler.pages sampler.token_budget sampler.decode_buckets
""".split()


def settings(folder: pathlib.Path | str) -> ConfigDict:
    """Returns the config with whose prompts, tools and lengths a policy is asked.

    It is that of the policy's run if the folder lies in one (RUN/policy/NAME). Otherwise the tokenizer decides: the
    defaults, configs/quickstart.py or configs/english.py for our tokenizers, configs/drzero.py for any other and
    for the address of a server, a text.

    `policy.adapters` has its defaults, and no role starts from an adapter: a policy is loaded as whole weights, an
    adapter added to its base. Training on with this config is full fine-tuning of these weights.

    Raises:
      UserError: the folder lies in a run of another version, or has an adapter that is not supported.
    """
    if isinstance(folder, str):
        config = _instructed()
        config.policy.path = folder
        return config
    config = _settings_of_origin(folder)
    config.policy.adapters.update(default_config().policy.adapters)
    # A config without a rank that names adapters to start from would be refused.
    for role in trained_roles(config):
        config[role].adapter = ''
    return config


def _instructed() -> ConfigDict:
    """Returns the config of an instruction-tuned model, such as any other tokenizer belongs to: long prompts."""
    config = drzero.get_config()
    config.retrieval.update(kind='world', path='')
    return config


def _settings_of_origin(folder: pathlib.Path) -> ConfigDict:
    """Returns the config of the policy's run, or the one that belongs to its tokenizer."""
    run_record.check_export(folder)
    # A run exports its policies to WORKDIR/policy/ROLE.
    workdir = folder.absolute().parent.parent
    run_config = read_stored_config(workdir)
    if run_config is not None:
        # A policy is asked on any machine.
        defaults = leaves(default_config())
        run_config.update_from_flattened_dict({name: defaults[name] for name in _OF_MACHINE})
        return run_config
    # Tokenizer and architecture of an adapter are in the folder of its base.
    folder = base_folder(folder)
    # Policies that were trained from a checkpoint of this project keep its tokenizer.
    tokenizer = (folder / 'tokenizer.json').read_bytes()
    ours = {
        BUILT_IN_CHECKPOINT: common.get_config,
        PARTS_CHECKPOINT: quickstart.get_config,
        ENGLISH_CHECKPOINT: english.get_config,
    }
    for checkpoint, get_config in ours.items():
        if tokenizer == (checkpoint / 'tokenizer.json').read_bytes():
            return get_config()
    config = _instructed()
    positions, _ = shape.longest_context(folder)
    config.sampler.context = min(config.sampler.context, positions)
    return config
