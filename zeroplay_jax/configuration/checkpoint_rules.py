"""Rules about policy folders and files, on the disk or on the Hugging Face Hub (hf://…), and their download."""

from __future__ import annotations

import pathlib

from ml_collections import ConfigDict

from zeroplay_jax.policy.adapter_config import base_folder
from zeroplay_jax.retrieval import hub, object_cache
from zeroplay_jax.retrieval.suggestions import similar_path
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.selfplay.recipe import Recipe
from zeroplay_jax.settings.errors import ConfigError, fail
from zeroplay_jax.settings.paths import BUILT_IN_CHECKPOINT
from zeroplay_jax.types import UserError

# Fields that may be a name on the Hub: of a model, or of a file of a dataset.
_MODEL_FIELDS = ('policy.path', 'retrieval.encoder')
_FILE_FIELDS = ('eval.file', 'eval.tasks', 'inputs.questions', 'inputs.answers', 'inputs.tasks')


def check_checkpoint(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses a policy folder that is not a checkpoint.

    Raises:
      ConfigError: one line; what is missing.
    """
    if hub.is_name(config.policy.path):
        _check_name('policy.path', config.policy.path)
        return
    try:
        # Of an adapter, the folder of its base.
        folder = base_folder(config.policy.path or BUILT_IN_CHECKPOINT)
    except UserError as error:
        raise ConfigError(f'config.policy.path: {error}') from None
    path_text = config.policy.path or "'' (the built-in checkpoint)"
    fix = 'name a Hugging Face checkpoint folder (config.json, tokenizer.json, *.safetensors)'
    if not config.policy.path:
        fix = 'train it with python -m tools.checkpoints.base_model'
    if not folder.is_dir():
        fail('policy.path', path_text, 'no such folder', fix + similar_path(folder))
    for pattern in ('config.json', 'tokenizer.json', '*.safetensors'):
        if not any(folder.glob(pattern)):
            fail('policy.path', path_text, f'the folder has no {pattern}', fix)


def file_exists(field: str, path: str) -> bool:
    """Returns whether a file exists, or may: nothing is asked over the network.

    Raises:
      ConfigError: a name on the Hub that names no file of a dataset.
    """
    if hub.is_name(path):
        _check_name(field, path, is_file=True)
        return True
    return pathlib.Path(path).is_file()


def _check_name(field: str, name: str, is_file: bool = False) -> None:
    """Raises ConfigError for a name on the Hub of a wrong form."""
    try:
        hub.check_name(name, is_file)
    except RetrievalError as error:
        raise ConfigError(f'config.{field}: {error}') from None


def download(config: ConfigDict) -> None:
    """Replaces names on the Hub by the paths of what they name, in place; downloads what is not in the cache.

    Call it after the config was checked: a model may take minutes. Prints a line with the size before.

    Raises:
      ConfigError: one line; what could not be fetched.
    """
    for field in _MODEL_FIELDS:
        section, name = field.split('.')
        config[section][name] = fetch_model(f'config.{field}', config[section][name])
    for field in _FILE_FIELDS:
        section, name = field.split('.')
        try:
            config[section][name] = hub.fetch_file(config[section][name])
        except RetrievalError as error:
            raise ConfigError(f'config.{field}: {error}') from None


def fetch_model(flag: str, path: str) -> str:
    """Returns the local folder of a model of the Hub or in a bucket, downloaded if need be; a path as it is.

    Args:
      flag: the flag or field, for the error.
      path: a name of the Hub, gs://bucket/path, or a path.

    Raises:
      ConfigError: one line; it could not be fetched.
    """
    try:
        return hub.fetch_model(object_cache.fetch(path))
    except RetrievalError as error:
        raise ConfigError(f'{flag}: {error}') from None
