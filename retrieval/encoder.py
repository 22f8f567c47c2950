"""Text encoder of a BERT checkpoint: WordPiece tokens, batches by length, one JAX program per length.

Each query is encoded by itself, in a program whose shape depends on its own length only, so that no other query can
change its vector. Passages, of which there are millions, share batches that are split over all devices.

Letters: N passages, Q queries, D dimension.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jaxtyping import Array, Float, Float32, Int32, Int64
from safetensors import SafetensorError, safe_open

from . import json_text
from .command import import_tensorflow
from .types import RetrievalError

# Sequences are padded to the next of these, with one compilation each. Above 16 tokens at most a third is padding.
LENGTHS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)

# Default of `max_tokens`: passages of 100 words have up to 180 tokens.
_MAX_TOKENS = 256
_MIN_TOKENS = 3
# Default of `batch_tokens`. On a CPU larger batches exceed the cache; accelerators need them to be busy.
_CPU_BATCH_TOKENS = 2_048
_ACCELERATOR_BATCH_TOKENS = 1 << 17
# Batches of passages that are queued on the devices; more would only take memory.
_BATCHES_AHEAD = 8
# Passages that are tokenised side by side.
_TOKENIZED_AT_ONCE = 1_024

# Files that determine the vectors of a checkpoint.
_MODEL_FILES = (
    'config.json',
    'model.safetensors',
    'vocab.txt',
    'tokenizer_config.json',
    '1_Pooling/config.json',
)
# Names of the passage prefix in sentence-transformers checkpoints, in order of preference.
_PASSAGE_PROMPTS = ('passage', 'document', 'corpus')


class TextEncoder:
    """A BERT text encoder with the prefixes it was trained with.

    Args:
      folder: Hugging Face or sentence-transformers checkpoint (config.json, model.safetensors, vocab.txt).
      query_prefix: text before every query: 'query: ' for E5, '' for MiniLM. None: taken from 'prompts' in the folder;
        it is an error if the folder has none, so that a prefix cannot be forgotten.
      passage_prefix: text before every passage: 'passage: ' for E5, '' for MiniLM. None: as above.
      max_tokens: longest sequence; None: taken from the folder, at most 256.
      dtype: of weights and activations; float32 or bfloat16.
      batch_tokens: tokens of one passage batch over all devices, padding included; None: chosen by the devices.

    Raises:
      RetrievalError: no usable checkpoint, unknown prefixes, or a setting outside its range.
    """

    def __init__(
        self,
        folder: str | pathlib.Path,
        query_prefix: str | None = None,
        passage_prefix: str | None = None,
        max_tokens: int | None = None,
        dtype: str = 'float32',
        batch_tokens: int | None = None,
    ):
        self.folder = pathlib.Path(folder)
        self._config = read_config(self.folder)
        self.query_prefix, self.passage_prefix = _prefixes(
            self.folder, query_prefix, passage_prefix
        )
        self.max_tokens = self._checked_max_tokens(max_tokens, dtype)
        self.dimension = self._config.hidden_size
        self.settings: dict[str, Any] = {
            'kind': 'bert',
            'sha256': _checkpoint_digest(self.folder),
            'dimension': self.dimension,
            'pooling': self._config.pooling,
            'query_prefix': self.query_prefix,
            'passage_prefix': self.passage_prefix,
            'max_tokens': self.max_tokens,
            'dtype': dtype,
        }
        self.tokenizer = WordPiece(self.folder, self.max_tokens)
        params = load_params(self.folder, self._config, dtype)
        # JAX clamps ids outside the table, so a wrong vocabulary would go unnoticed.
        if len(params['words']) < self.tokenizer.vocab_size:
            raise RetrievalError(
                f'{self.folder}: vocab.txt has {self.tokenizer.vocab_size} tokens, the weights '
                f'{len(params["words"])}; they are of different checkpoints'
            )
        # Only local devices are used, because every host encodes its own shards.
        self._mesh = jax.sharding.Mesh(np.array(jax.local_devices()), ('data',))
        self._batch_sharding = jax.NamedSharding(self._mesh, jax.P('data'))
        # Passages use all devices. Queries use one, because a batch of one query cannot be split.
        self._replicated_params = jax.device_put(params, jax.NamedSharding(self._mesh, jax.P()))
        self._single_device_params = jax.device_put(params, jax.local_devices()[0])
        is_cpu = jax.default_backend() == 'cpu'
        default_tokens = _CPU_BATCH_TOKENS if is_cpu else _ACCELERATOR_BATCH_TOKENS
        self.batch_tokens = batch_tokens or default_tokens
        self._lengths = [*(n for n in LENGTHS if n < self.max_tokens), self.max_tokens]

    def _checked_max_tokens(self, max_tokens: int | None, dtype: str) -> int:
        """Returns `max_tokens`, or for None the default; raises RetrievalError if it or the dtype is not supported."""
        positions = self._config.positions
        # The default is capped at 256: passages of 100 words are shorter, so more lengths would only cost compilations.
        if max_tokens is None:
            settings = _read_optional_json(self.folder / 'sentence_bert_config.json')
            max_tokens = min(_MAX_TOKENS, settings.get('max_seq_length') or positions)
        valid_length = _MIN_TOKENS <= max_tokens <= positions
        if not valid_length or dtype not in ('float32', 'bfloat16'):
            raise RetrievalError(
                f'{self.folder}: max_tokens {max_tokens} must lie between 3 and {positions}, '
                f'dtype {dtype!r} must be float32 or bfloat16'
            )
        return max_tokens

    def encode_queries(self, queries: Sequence[str]) -> Float32[np.ndarray, 'queries dimension']:
        """Returns unit vectors of queries, float32 [Q, D]; each depends on its own query only, bit for bit."""
        pending = []
        for query in queries:
            (ids,) = self.tokenizer([self.query_prefix + query])
            padded, length = self._padded([ids], 1)
            # JAX dispatches asynchronously: the next query is tokenised while this one is encoded.
            pending.append(bert_vectors(self._config, self._single_device_params, padded, length))
        if not pending:
            return np.zeros((0, self.dimension), np.float32)
        return np.concatenate([np.asarray(vector) for vector in pending])

    def encode(self, texts: Iterable[str]) -> Float32[np.ndarray, 'passages dimension']:
        """Returns unit vectors of passages in wire form, float32 [N, D], in the order of `texts`.

        Passages share batches, so the last bits of a vector depend on the other texts of the call.
        """
        encoded: list[tuple[np.ndarray, jax.Array]] = []
        for rows, ids, length in self._batches(texts):
            device_ids = jax.device_put(ids, self._batch_sharding)
            device_length = jax.device_put(length, self._batch_sharding)
            vectors = bert_vectors(self._config, self._replicated_params, device_ids, device_length)
            encoded.append((rows, vectors))
            # Waits for an earlier batch, so that the device queue stays short.
            if len(encoded) > _BATCHES_AHEAD:
                encoded[-_BATCHES_AHEAD][1].block_until_ready()
        # The number of texts is known at the end only: they can come from a generator.
        total = sum(len(rows) for rows, _ in encoded)
        result = np.zeros((total, self.dimension), np.float32)
        for rows, vectors in encoded:
            # Batches are filled up with empty rows at the end.
            result[rows] = np.asarray(vectors)[: len(rows)]
        return result

    def _batches(
        self, texts: Iterable[str]
    ) -> Iterator[
        tuple[
            Int64[np.ndarray, ' rows'],
            Int32[np.ndarray, 'batch tokens'],
            Int32[np.ndarray, ' batch'],
        ]
    ]:
        """Yields batches of texts of similar length, in no particular order.

        All batches of a padded length have the same number of rows, so that each length is compiled once. The last one
        of a length is filled up with empty rows.

        Yields:
          numbers of the texts, int64 [n]; token ids, int32 [B, L] with B ≥ n; tokens of each row without padding,
          int32 [B], 1 for an empty row.
        """
        devices = self._mesh.size
        waiting: dict[int, list[tuple[int, list[int]]]] = {length: [] for length in self._lengths}
        num_rows = {}
        for length in self._lengths:
            num_rows[length] = devices * max(1, self.batch_tokens // (length * devices))

        def batch(length: int):
            rows, ids = zip(*waiting[length], strict=True)
            waiting[length] = []
            return np.array(rows, np.int64), *self._padded(ids, num_rows[length])

        numbered = enumerate(texts)
        while block := list(itertools.islice(numbered, _TOKENIZED_AT_ONCE)):
            ids_of_block = self.tokenizer([self.passage_prefix + text for _, text in block])
            for (row, _), ids in zip(block, ids_of_block, strict=True):
                length = self._padded_length(ids)
                waiting[length].append((row, ids))
                if len(waiting[length]) == num_rows[length]:
                    yield batch(length)
        for length in self._lengths:
            if waiting[length]:
                yield batch(length)

    def _padded_length(self, ids: Sequence[int]) -> int:
        return next(length for length in self._lengths if len(ids) <= length)

    def _padded(
        self, ids_of_texts: Sequence[Sequence[int]], num_rows: int
    ) -> tuple[Int32[np.ndarray, 'batch tokens'], Int32[np.ndarray, ' batch']]:
        """Returns token ids of one padded length and the lengths without padding, filled up to a number of rows."""
        longest = max(ids_of_texts, key=len)
        shape = (num_rows, self._padded_length(longest))
        padded = np.full(shape, self.tokenizer.pad_id, np.int32)
        # Length 1 instead of 0 keeps the mean over tokens of an empty row defined.
        lengths = np.ones(num_rows, np.int32)
        for row, ids in enumerate(ids_of_texts):
            padded[row, : len(ids)] = ids
            lengths[row] = len(ids)
        return padded, lengths


def _prefixes(
    folder: pathlib.Path, query_prefix: str | None, passage_prefix: str | None
) -> tuple[str, str]:
    """Returns (query prefix, passage prefix); a prefix that is None is taken from the folder.

    Raises:
      RetrievalError: a prefix is None and the folder has none either.
    """
    prompts = _read_optional_json(folder / 'config_sentence_transformers.json').get('prompts') or {}
    if query_prefix is None:
        # An empty prompt in the folder counts as none: many checkpoints have empty entries by default.
        query_prefix = prompts.get('query') or None
    if passage_prefix is None:
        stored_prefixes = [prompts[key] for key in _PASSAGE_PROMPTS if prompts.get(key)]
        passage_prefix = next(iter(stored_prefixes), None)
    # A wrong prefix lowers recall without any error, so none is guessed.
    if query_prefix is None or passage_prefix is None:
        raise RetrievalError(
            f"{folder}: does not say its prefixes; give both --query-prefix and --passage-prefix ('query: ' and "
            "'passage: ' for E5, '' and '' for none)"
        )
    return query_prefix, passage_prefix


def _checkpoint_digest(folder: pathlib.Path) -> str:
    """Returns the SHA-256 over the files that determine the vectors."""
    total = hashlib.sha256()
    for name in _MODEL_FILES:
        path = folder / name
        if not path.exists():
            continue
        with path.open('rb') as file:
            digest = hashlib.file_digest(file, 'sha256').hexdigest()
        total.update(f'{name}\0{digest}\n'.encode())
    return total.hexdigest()


def _read_optional_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the contents of a JSON file; {} if there is no such file; RetrievalError if it is not JSON."""
    if not path.exists():
        return {}
    return json_text.load_object(path, 'correct or remove the file', float)


# ---- tokens ----------------------------------------------------------------------------------------


# A longer word is unknown as a whole, as in the reference (characters, not bytes; UTF-8 takes at most four of them).
_LONGEST_WORD = 100
# A noncharacter: it is in no vocabulary, so that WordPiece reads it as unknown.
_UNKNOWN = '\ufffe'


class WordPiece:
    """Tokenizer of a checkpoint folder: reads `vocab.txt` and, if present, `tokenizer_config.json`.

    Words are those of the reference, `BertNormalizer` and `BertPreTokenizer` of the `tokenizers` library: TensorFlow
    Text's own BERT tokenizer folds case by NFKC (ς becomes σ, ² becomes 2). WordPiece itself (fast, greedy longest
    match; Song et al. 2021, arXiv:2012.15524) is done by TensorFlow Text. A text never becomes a control token, which
    a folder's tokenizer.json would find in it: '[SEP]' in a passage is three words.

    Args:
      folder: folder of the checkpoint.
      max_tokens: longest sequence including [CLS] and [SEP]; further tokens are cut off.

    Raises:
      RetrievalError: no vocabulary, or one without [UNK], [CLS], [SEP] or [PAD].
    """

    def __init__(self, folder: pathlib.Path, max_tokens: int):
        # Imported here, because it takes three seconds and the other encoders do not need it.
        self._tf = import_tensorflow()
        import tensorflow_text as tf_text

        vocabulary, config = _read_vocabulary(folder)
        ids = {token: number for number, token in enumerate(vocabulary)}
        missing = [token for token in ('[PAD]', '[UNK]', '[CLS]', '[SEP]') if token not in ids]
        if missing:
            raise RetrievalError(
                f'{folder}/vocab.txt: {", ".join(missing)} missing; give a BERT vocabulary'
            )
        self.vocab_size = len(vocabulary)
        self.pad_id = ids['[PAD]']
        self._first_id = ids['[CLS]']
        self._last_id = ids['[SEP]']
        self._max_pieces = max_tokens - 2
        # Accents are stripped where case is folded, unless the checkpoint decides otherwise.
        self._normalizer = tokenizers.normalizers.BertNormalizer(
            lowercase=config.get('do_lower_case', True),
            strip_accents=config.get('strip_accents'),
            handle_chinese_chars=config.get('tokenize_chinese_chars', True),
        )
        self._pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        self._wordpiece = tf_text.FastWordpieceTokenizer(
            vocabulary,
            unknown_token='[UNK]',
            max_bytes_per_word=4 * _LONGEST_WORD,
            no_pretokenization=True,
        )

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each text between [CLS] and [SEP], at most `max_tokens`."""
        tf = self._tf
        words = []
        num_words = []
        for text in texts:
            words_of_text = self._words(text)
            words += words_of_text
            num_words.append(len(words_of_text))
        rows = tf.RaggedTensor.from_row_lengths(tf.constant(words, tf.string), num_words)
        pieces = self._wordpiece.tokenize(rows).merge_dims(-2, -1)[:, : self._max_pieces]
        return [[self._first_id, *ids, self._last_id] for ids in pieces.to_list()]

    def _words(self, text: str) -> list[str]:
        # Half of a surrogate pair, which a policy can write, has no encoding and is left out.
        encodable = text.encode('utf-8', 'ignore').decode()
        normalised = self._normalizer.normalize_str(encodable)
        words = []
        for word, _ in self._pre_tokenizer.pre_tokenize_str(normalised):
            words.append(word if len(word) <= _LONGEST_WORD else _UNKNOWN)
        return words


def _read_vocabulary(folder: pathlib.Path) -> tuple[list[str], dict[str, Any]]:
    """Returns (tokens by id, tokenizer settings) of a checkpoint folder."""
    config = {}
    config_path = folder / 'tokenizer_config.json'
    try:
        text = (folder / 'vocab.txt').read_text(encoding='utf-8')
        if config_path.exists():
            config = json_text.read_object(config_path, float)
    except (OSError, ValueError) as error:
        raise RetrievalError(
            f'{folder}: the tokenizer cannot be read ({error}); give a BERT checkpoint'
        ) from error
    # `splitlines` would break tokens that are line separators of Unicode.
    return text.rstrip('\n').split('\n'), config


# ---- BERT ------------------------------------------------------------------------------------------
#
# A pure function of its parameters: token ids to one unit vector per text.
#
# The architecture is that of Devlin et al. 2019 (arXiv:1810.04805). It covers the checkpoints in use for dense
# retrieval: E5 (Wang et al. 2022, arXiv:2212.03533), all-MiniLM, BGE and others of architecture BertModel with absolute
# positions and the exact GELU, read from the safetensors in their folder.
#
# Letters: B texts, L tokens of the longest text, D hidden size, H heads.


Params = dict[str, Any]

_LARGEST_SIZE = 1 << 20
# A finite stand-in for −∞ as the logit of padding: the softmax of a row of −∞ would be NaN.
_MASKED_LOGIT = -1e30

# Keys of sentence-transformers' pooling settings that are supported.
_POOLINGS = {'pooling_mode_mean_tokens': 'mean', 'pooling_mode_cls_token': 'cls'}
# Modules of sentence-transformers that are computed here; others, such as Dense, would change every vector.
_MODULES = ('Transformer', 'Pooling', 'Normalize')
# Fields of config.json with the values that are computed here: their defaults, which an absent field has.
_EXPECTED: dict[str, tuple] = {
    'model_type': ('bert',),
    'hidden_act': ('gelu', 'gelu_python'),
    'position_embedding_type': ('absolute', None),
    'is_decoder': (False,),
    'add_cross_attention': (False,),
    'quantization_config': (None,),
}
_DTYPES = ('F32', 'BF16', 'F16', 'F64')


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Sizes of a checkpoint.

    Attributes:
      hidden_size: D.
      layers: number of transformer layers.
      heads: number of attention heads, H.
      positions: longest sequence in tokens.
      eps: epsilon of the layer norms.
      pooling: 'mean' (over all tokens except padding) or 'cls' (the first token).
    """

    hidden_size: int
    layers: int
    heads: int
    positions: int
    eps: float
    pooling: str = 'mean'


def read_config(folder: pathlib.Path) -> BertConfig:
    """Returns sizes and pooling of a checkpoint folder.

    Raises:
      RetrievalError: no readable `config.json`, or an architecture that this module does not compute.
    """
    settings = _read_json(folder / 'config.json')
    # Other architectures would load but give meaningless vectors.
    differences = []
    for key, values in _EXPECTED.items():
        value = settings.get(key, values[0])
        if value not in values:
            differences.append(f'{key} is {value!r}, not {values[0]!r}')
    if differences:
        raise RetrievalError(
            f'{folder}/config.json: {"; ".join(differences)}; give a BERT text encoder'
        )
    config = BertConfig(
        hidden_size=_positive(folder, settings, 'hidden_size'),
        layers=_positive(folder, settings, 'num_hidden_layers'),
        heads=_positive(folder, settings, 'num_attention_heads'),
        positions=_positive(folder, settings, 'max_position_embeddings'),
        eps=_positive(folder, settings, 'layer_norm_eps', (int, float)),
        pooling=_read_pooling(_pooling_path(folder)),
    )
    if config.hidden_size % config.heads:
        raise RetrievalError(
            f'{folder}/config.json: hidden_size={config.hidden_size} is not a multiple of '
            f'num_attention_heads={config.heads}; give a whole checkpoint'
        )
    return config


def _positive(
    folder: pathlib.Path, settings: dict[str, Any], name: str, kinds: tuple = (int,)
) -> Any:
    """Returns a positive number in config.json; RetrievalError if it is missing or none."""
    value = settings.get(name)
    if value is None:
        raise RetrievalError(f'{folder}/config.json: {name} is missing; give a whole checkpoint')
    if type(value) not in kinds or not 0 < value < _LARGEST_SIZE:
        raise RetrievalError(
            f'{folder}/config.json: {name}={value!r} is not a size; give a whole checkpoint'
        )
    return value


def _pooling_path(folder: pathlib.Path) -> pathlib.Path:
    """Returns the path of the pooling settings of sentence-transformers.

    Raises:
      RetrievalError: vectors have to pass a module that is not computed here, or are compared in another way.
    """
    path = folder / 'modules.json'
    if not path.exists():
        return folder / '1_Pooling' / 'config.json'
    try:
        modules = json_text.parse(path.read_bytes())
        # The type is the name of a class, such as sentence_transformers.models.Pooling.
        places = {module['type'].rpartition('.')[2]: module['path'] for module in modules}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RetrievalError(
            f'{path}: cannot be read as a list of modules ({error!r}); download it again'
        ) from None
    for kind in places:
        if kind not in _MODULES:
            raise RetrievalError(
                f'{path}: a module {kind} is not supported ({", ".join(_MODULES)} are); take another encoder'
            )
    similarity_path = folder / 'config_sentence_transformers.json'
    similarity = 'cosine'
    if similarity_path.exists():
        similarity = _read_json(similarity_path).get('similarity_fn_name') or similarity
    # Vectors of this module have length 1, for which both are the same.
    if similarity not in ('cosine', 'dot') or (similarity == 'dot' and 'Normalize' not in places):
        raise RetrievalError(
            f'{similarity_path}: similarity_fn_name={similarity!r} of vectors that are not normalised is not '
            'supported; take another encoder'
        )
    place = str(places.get('Pooling', '1_Pooling'))
    if pathlib.Path(place).name != place or place == '..':
        raise RetrievalError(f'{path}: {place!r} is no folder beside it; download the folder again')
    return folder / place / 'config.json'


def _read_pooling(path: pathlib.Path) -> str:
    """Returns 'mean' or 'cls' from the pooling settings of sentence-transformers; 'mean' if there is no such file."""
    if not path.exists():
        return 'mean'
    settings = _read_json(path)
    if settings.get('include_prompt', True) is not True:
        raise RetrievalError(
            f'{path}: include_prompt={settings["include_prompt"]!r} is not supported; take another encoder'
        )
    modes = []
    for key, value in settings.items():
        if key.startswith('pooling_mode_') and value is True:
            modes.append(key)
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise RetrievalError(f'{path}: pooling {modes} is not supported; mean and cls are')
    return _POOLINGS[modes[0]]


class _Tensors:
    """Reads parameters from an open safetensors file and checks their shapes."""

    def __init__(self, file: Any, path: pathlib.Path, dtype: str):
        self._file = file
        self._path = path
        self._dtype = dtype
        # Checkpoints with a task head keep the encoder under the prefix 'bert.'.
        self._stored_names: dict[str, str] = {}
        for stored_name in file.keys():  # noqa: SIM118 – not a mapping
            self._stored_names[stored_name.removeprefix('bert.')] = stored_name

    def tensor(self, name: str, *shape: int) -> Float[Array, ' ...']:
        """Returns a tensor in the dtype of the constructor.

        Raises:
          RetrievalError: the file has no such tensor, or `shape` is given and its shape differs.
        """
        if name not in self._stored_names:
            raise RetrievalError(f'{self._path}: no tensor {name}; give a whole BERT checkpoint')
        stored_name = self._stored_names[name]
        dtype = self._file.get_slice(stored_name).get_dtype()
        if dtype not in _DTYPES:
            raise RetrievalError(
                f'{self._path}: {name} has dtype {dtype}; supported: {", ".join(_DTYPES)}'
            )
        value = self._file.get_tensor(stored_name).astype(self._dtype)
        if not jnp.isfinite(value).all():
            raise RetrievalError(
                f'{self._path}: {name} has numbers that are not finite; download it again'
            )
        if shape and value.shape != shape:
            raise RetrievalError(
                f'{self._path}: {name} is {value.shape}, config.json says {shape}; '
                'give files of one checkpoint'
            )
        return value

    def norm(self, name: str, size: int) -> Params:
        """Returns scale and bias of a layer norm."""
        return {
            'scale': self.tensor(f'{name}.weight', size),
            'bias': self.tensor(f'{name}.bias', size),
        }

    def dense(self, *names: str) -> Params:
        """Returns kernel and bias of dense layers with the same input, concatenated along their outputs."""
        # PyTorch stores a kernel as [output, input].
        kernels = [self.tensor(f'{name}.weight').T for name in names]
        biases = [self.tensor(f'{name}.bias') for name in names]
        return {'kernel': jnp.concatenate(kernels, 1), 'bias': jnp.concatenate(biases)}

    def layer(self, number: int, size: int) -> Params:
        """Returns the parameters of one transformer layer."""
        base = f'encoder.layer.{number}'
        attention = f'{base}.attention.self'
        # One matrix for queries, keys and values: one large product instead of three.
        projections = [f'{attention}.query', f'{attention}.key', f'{attention}.value']
        return {
            'qkv': self.dense(*projections),
            'out': self.dense(f'{base}.attention.output.dense'),
            'attention_norm': self.norm(f'{base}.attention.output.LayerNorm', size),
            'up': self.dense(f'{base}.intermediate.dense'),
            'down': self.dense(f'{base}.output.dense'),
            'norm': self.norm(f'{base}.output.LayerNorm', size),
        }


def load_params(folder: pathlib.Path, config: BertConfig, dtype: str = 'float32') -> Params:
    """Returns the parameters in `model.safetensors`, converted to `dtype`.

    Raises:
      RetrievalError: no such file, or a tensor that is missing or of another shape.
    """
    path = folder / 'model.safetensors'
    size = config.hidden_size
    try:
        with safe_open(path, framework='flax') as file:
            tensors = _Tensors(file, path, dtype)
            positions = tensors.tensor(
                'embeddings.position_embeddings.weight', config.positions, size
            )
            token_types = tensors.tensor('embeddings.token_type_embeddings.weight')
            layers = [tensors.layer(number, size) for number in range(config.layers)]
            return {
                'words': tensors.tensor('embeddings.word_embeddings.weight'),
                # Every text has token type 0, so that type's embedding is added to the positions here, once.
                'positions': positions + token_types[0],
                'norm': tensors.norm('embeddings.LayerNorm', size),
                'layers': layers,
            }
    except OSError as error:
        raise RetrievalError(
            f'{path}: cannot be read ({error}); give a folder with safetensors'
        ) from error
    except SafetensorError as error:
        raise RetrievalError(
            f'{path}: damaged or not safetensors ({error}); download it again'
        ) from error


@functools.partial(jax.jit, static_argnums=0)
def bert_vectors(
    config: BertConfig,
    params: Params,
    ids: Int32[Array | np.ndarray, 'batch tokens'],
    length: Int32[Array | np.ndarray, ' batch'],
) -> Float32[Array, 'batch hidden']:
    """Returns one unit vector per text, float32 [B, D].

    Args:
      config: sizes of the checkpoint.
      params: from `load_params`.
      ids: token ids [B, L], padded at the end.
      length: tokens of each text without padding, at least 1.
    """
    # Shapes are static under jit, so there is one program per padded length.
    batch, tokens = ids.shape
    is_token = jnp.arange(tokens) < length[:, None]  # [B, L]
    embeddings = params['words'][ids] + params['positions'][:tokens]
    x = _norm(embeddings, params['norm'], config.eps)
    for layer in params['layers']:
        attended = _attention(config, x, layer, is_token)
        x = _norm(x + attended, layer['attention_norm'], config.eps)
        hidden = jax.nn.gelu(_dense(x, layer['up']), approximate=False)
        x = _norm(x + _dense(hidden, layer['down']), layer['norm'], config.eps)
    # Pooled and normalised in float32, also when the layers are computed in bfloat16.
    x = x.astype(jnp.float32)
    if config.pooling == 'cls':
        pooled = x[:, 0]
    else:
        # Padding is left out of the mean.
        pooled = jnp.sum(x * is_token[:, :, None], axis=1) / length[:, None]
    return pooled / jnp.linalg.norm(pooled, axis=-1, keepdims=True)


def _attention(config: BertConfig, x: Array, layer: Params, is_token: Array) -> Array:
    """Returns the output of multi-head self-attention, [B, L, D]."""
    batch, tokens, _ = x.shape
    heads = config.heads
    head_size = config.hidden_size // heads
    projected = _dense(x, layer['qkv']).reshape(batch, tokens, 3, heads, head_size)
    # Transposed to [3, B, H, L, D/H] before the products, so that each head is a plain matrix product: with heads in
    # the middle, XLA's CPU backend takes six times as long.
    q, k, v = projected.transpose(2, 0, 3, 1, 4)
    logits = (q @ k.swapaxes(2, 3)).astype(jnp.float32) * head_size**-0.5  # [B, H, L, L]
    masked_logits = jnp.where(is_token[:, None, None, :], logits, _MASKED_LOGIT)
    weights = jax.nn.softmax(masked_logits, axis=-1).astype(x.dtype)
    mixed = (weights @ v).swapaxes(1, 2).reshape(batch, tokens, config.hidden_size)
    return _dense(mixed, layer['out'])


def _dense(x: Array, params: Params) -> Array:
    """Returns a dense layer's output."""
    return x @ params['kernel'] + params['bias']


def _norm(x: Array, params: Params, eps: float) -> Array:
    """Returns the layer norm over the last axis, computed in float32."""
    # bfloat16 has too few bits for a mean and a variance.
    y = x.astype(jnp.float32)
    centred = y - y.mean(-1, keepdims=True)
    normalised = centred * jax.lax.rsqrt(y.var(-1, keepdims=True) + eps)
    return normalised.astype(x.dtype) * params['scale'] + params['bias']


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the contents of a JSON file of a checkpoint; RetrievalError if it cannot be read."""
    return json_text.load_object(path, 'give the folder of a BERT checkpoint', float)
