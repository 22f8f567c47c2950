"""The config.json of a checkpoint folder as checked fields, and the family that it belongs to.

Imports no JAX, because texts are encoded where none is loaded.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeroplay_jax.policy import known_fields
from zeroplay_jax.policy.adapter_config import base_folder
from zeroplay_jax.policy.family_table import FAMILIES, REFUSED, SUPPORTED
from zeroplay_jax.retrieval import json_text
from zeroplay_jax.types import UserError

# Sizes several times those of the largest models.
_LARGEST_SIZE = 1 << 20
_LARGEST = {
    'num_hidden_layers': 2048,
    'vocab_size': 1 << 23,
    'max_position_embeddings': 1 << 40,
    'original_max_position_embeddings': 1 << 40,
    'sliding_window': 1 << 40,
}


# What to do about a value that is damaged, and about one that the decoder does not implement.
OTHER_CONFIG = 'correct it, or take the config.json that belongs to the weights'
OTHER_CHECKPOINT = 'the decoder does not compute it; take a checkpoint without it'


class CheckpointError(UserError):
    """A checkpoint folder that cannot be used; the message names the file or field."""


@dataclasses.dataclass(frozen=True)
class Fields:
    """A JSON object of config.json.

    Attributes:
      path: path of config.json, for error messages.
      values: the object.
      prefix: its location in the file, such as 'rope_parameters.', for error messages.
    """

    path: Path
    values: dict[str, Any]
    prefix: str = ''

    def error(self, message: str, fix: str = OTHER_CONFIG) -> CheckpointError:
        return CheckpointError(f'{self.path}: {message}; {fix}')

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        """Returns the object with values for the fields that are absent or null."""
        values = dict(self.values)
        for name, default in defaults.items():
            if values.get(name) is None:
                values[name] = default
        return Fields(self.path, values, self.prefix)

    def section(self, name: str) -> Fields:
        """Returns a nested object; null and absent count as empty."""
        values = self.get(name) or {}
        if not isinstance(values, dict):
            raise self.error(f'{self.prefix}{name}={values!r} must be an object')
        return Fields(self.path, values, f'{self.prefix}{name}.')

    def positive_int(self, name: str, default: int | None = None) -> int:
        value = self._positive(name, default, int)
        most = _LARGEST.get(name, _LARGEST_SIZE)
        # Refused here, before anything of that size is made.
        if value > most:
            raise self.error(
                f'{self.prefix}{name}={value} is larger than in any model (at most {most})'
            )
        return value

    def positive_float(self, name: str, default: float | None = None) -> float:
        return self._positive(name, default, float)

    def boolean(self, name: str, default: bool) -> bool:
        """Returns true or false; null and absent count as the default."""
        value = self.get(name)
        if value is None:
            return default
        # A text such as "no" would count as true.
        if not isinstance(value, bool):
            raise self.error(f'{self.prefix}{name}={value!r} must be true or false')
        return value

    def _positive(self, name: str, default, kind: type):
        """Returns a positive number; null and absent count as the default, if there is one."""
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(f'{self.prefix}{name} is missing')
        # JSON may write a float without a fraction, hence int for both; bool is a subclass of int.
        is_number = isinstance(value, (int, kind)) and not isinstance(value, bool)
        # Python reads NaN and Infinity in JSON; comparisons with NaN are false.
        if not is_number or not 0 < value <= sys.float_info.max:
            raise self.error(f'{self.prefix}{name}={value!r} must be a positive {kind.__name__}')
        return kind(value)


def read_fields(path: Path) -> Fields:
    """Returns the JSON object in config.json; CheckpointError if it cannot be read."""
    fix = 'name a Hugging Face checkpoint folder'
    try:
        values = json_text.read_object(path, float)
    except (OSError, ValueError) as error:
        reason = getattr(error, 'strerror', None) or error
        raise CheckpointError(
            f'{path}: cannot be read as a model config ({reason}); {fix}'
        ) from None
    return Fields(path, values)


def vocabulary_size(folder) -> int:
    """Returns the number of token ids of the model in a folder; CheckpointError if config.json does not say it."""
    _, fields = family_fields(base_folder(folder))
    return fields.positive_int('vocab_size')


def is_wrapped(folder) -> bool:
    """Returns whether a folder's model has other parts beside the decoder, such as an encoder of images."""
    fields = read_fields(base_folder(folder) / 'config.json')
    family = FAMILIES[_family_name(fields)]
    return bool(family.wrapper) and family.wrapper in fields.get('architectures')


def decoder_config(path: Path) -> dict[str, Any]:
    """Returns the content of a config.json that describes the decoder alone."""
    values = json_text.read_object(path, float)
    if 'text_config' not in values:
        return values
    family = FAMILIES[_family_name(read_fields(path))]
    text = dict(values['text_config'])
    # Written in one of the two sections, depending on the version that wrote the folder.
    for name in ('dtype', 'torch_dtype', 'bos_token_id', 'eos_token_id', 'pad_token_id'):
        if name not in text and name in values:
            text[name] = values[name]
    return text | {'architectures': [family.architecture], 'model_type': family.model_type}


def family_fields(folder: Path) -> tuple[str, Fields]:
    """Returns the key in FAMILIES of a folder's model, and the fields of its decoder with the family's defaults.

    Only fields that the family's class has are returned. A warning names the ones that have no meaning.

    Raises:
      CheckpointError: the family is unknown, or a field asks for a computation that the decoder does not implement.
    """
    fields = read_fields(folder / 'config.json')
    name = _family_name(fields)
    family = FAMILIES[name]
    known = family.fields
    if family.wrapper and family.wrapper in fields.get('architectures'):
        _check_type(fields, family.wrapper, family.wrapper_type)
        _check_supported(fields)
        known_fields.warn_of_unknown(fields.path, fields.values, known_fields.WRAPPER_FIELDS)
        # The flag of the whole model decides, not that of the section.
        flag = fields.boolean('tie_word_embeddings', family.defaults['tie_word_embeddings'])
        section = fields.section('text_config')
        fields = dataclasses.replace(section, values=section.values | {'tie_word_embeddings': flag})
    _check_type(fields, family.architecture, family.model_type)
    _check_supported(fields)
    known_fields.warn_of_unknown(fields.path, fields.values, known)
    read = {}
    for field, value in fields.values.items():
        if known_fields.is_read(field, known):
            read[field] = value
    fields = dataclasses.replace(fields, values=read)
    defaults = {'max_position_embeddings': family.max_positions} | dict(family.defaults)
    return name, fields.with_defaults(defaults)


def _check_type(fields: Fields, architecture: str, model_type: str) -> None:
    """Raises CheckpointError if `model_type` names another class than `architectures` does.

    One of the two fields is wrong, and `transformers` goes by the type.
    """
    stated = fields.get('model_type')
    if stated not in (None, model_type):
        raise fields.error(
            f'{fields.prefix}model_type={stated!r} is not the type of {architecture}, which is {model_type!r}',
            fix='correct the wrong one',
        )


def _check_supported(fields: Fields) -> None:
    """Raises CheckpointError for a field whose value the decoder does not implement."""
    reason = known_fields.unsupported(fields.values)
    if reason:
        raise fields.error(fields.prefix + reason, OTHER_CHECKPOINT)


def _family_name(fields: Fields) -> str:
    """Returns the key in FAMILIES of the architecture that config.json names."""
    architectures = fields.get('architectures')
    reason = ''
    if isinstance(architectures, list):
        for name, family in FAMILIES.items():
            if family.architecture in architectures or family.wrapper in architectures:
                return name
        reason = _refusal_reason(architectures)
    raise fields.error(f'architectures={architectures} is not supported{reason}', fix=SUPPORTED)


def _refusal_reason(architectures: list) -> str:
    """Returns ': ' and why an architecture is not supported; '' if the table has no reason."""
    for name in architectures:
        for beginning, reason in REFUSED.items():
            if str(name).startswith(beginning):
                return f': {reason}'
    return ''
