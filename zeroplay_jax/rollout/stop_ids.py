"""The ids that end a turn: those that the files of a checkpoint name, and the token that its chat template writes."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Collection, Sequence
from typing import Any

from zeroplay_jax.retrieval import json_text
from zeroplay_jax.types import UserError

# Field of generation_config.json with the ids that end a turn, in folders where `eos_token_id` also names the ends of
# calls, so that other programs stop there (training/model_card.py).
END_OF_TURN_FIELD = 'end_of_turn_token_id'
_EOS = 'eos_token_id'


def listed_ids(
    folder: pathlib.Path, vocabulary_size: int, control_ids: Collection[int]
) -> set[int]:
    """Returns the ids that end a turn by generation_config.json and config.json.

    Args:
      vocabulary_size: number of ids that the model knows.
      control_ids: ids of the added vocabulary.

    Raises:
      UserError: a file that cannot be read, or a value that is no id of the model.
    """
    path = folder / 'generation_config.json'
    fields = _read(path) if path.exists() else {}
    field = END_OF_TURN_FIELD if END_OF_TURN_FIELD in fields else _EOS
    ids = _ids(path, field, fields.get(field), vocabulary_size)
    path = folder / 'config.json'
    fields = _read(path)
    sections = {_EOS: fields}
    # Where `transformers` looks for the decoder of a model with several parts.
    if isinstance(fields.get('text_config'), dict):
        sections[f'text_config.{_EOS}'] = fields['text_config']
    for name, section in sections.items():
        config_ids = _ids(path, name, section.get(_EOS), vocabulary_size)
        # With a generation_config.json this field is often that of another model, whose id may be an ordinary word.
        ids |= {token for token in config_ids if not ids or token in control_ids}
    return ids


def template_ids(end_texts: Sequence[str], added_ids: dict[str, int]) -> set[int]:
    """Returns the tokens of the added vocabulary with which texts behind an assistant's turn begin.

    Args:
      end_texts: as the chat template writes them.
      added_ids: added token → id.
    """
    ids = set()
    for text in end_texts:
        ending = text.lstrip()
        tokens = [token for token in added_ids if ending.startswith(token)]
        if tokens:
            ids.add(added_ids[max(tokens, key=len)])
    return ids


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        return json_text.read_object(path, float)
    except (OSError, ValueError) as error:
        raise UserError(f'{path}: cannot be read ({error}); copy the folder again') from None


def _ids(path: pathlib.Path, name: str, value: Any, vocabulary_size: int) -> set[int]:
    """Returns the ids of a field, which may be one id, a list or null."""
    if value is None:
        return set()
    listed = value if isinstance(value, list) else [value]
    for token in listed:
        # True and false are whole numbers to Python.
        is_id = isinstance(token, int) and not isinstance(token, bool)
        if not is_id or not 0 <= token < vocabulary_size:
            raise UserError(
                f'{path}: {name}={json.dumps(value)} is not among the ids 0 to {vocabulary_size - 1} of the model; '
                'write the id of the token that ends a turn'
            )
    return set(listed)
