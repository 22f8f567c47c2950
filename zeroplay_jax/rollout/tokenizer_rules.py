"""What a tokenizer.json must fulfil, so that its ids are those of the model and of the library that wrote it."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import tokenizers
import transformers

from zeroplay_jax.retrieval import json_text
from zeroplay_jax.types import UserError, first_line

# Classes that AutoTokenizer of `transformers` takes for the supported types of models, where a folder names none.
_CLASS_OF_MODEL_TYPE = {
    'qwen2': 'Qwen2Tokenizer',
    'qwen3': 'Qwen2Tokenizer',
    'qwen3_vl': 'Qwen2Tokenizer',
    'gemma3': 'GemmaTokenizer',
    'gemma3_text': 'GemmaTokenizer',
    # The class that reads tokenizer.json as it is, whatever the folder names.
    'olmo3': 'TokenizersBackend',
}
# Published tokenizers split digits, contractions, capitals, white space, marks and accents by different rules. NFKC
# would replace '…'.
TEXTS = (
    '1234567 a1b2',
    "I'LL say it's late",
    'camelCaseWord',
    ' two  blanks\n\n and\tone\r\nline ',
    '§12.5% “so…” x=(y)//z',
    'e\u0301le\u0300ve',
    '日本語 тест',
)


# How SentencePiece vocabularies write a space, and the normaliser of tokenizer.json that does so and nothing else.
_SPACE_MARK = '\u2581'
_SPACES_MARKED = {'type': 'Replace', 'pattern': {'String': ' '}, 'content': _SPACE_MARK}


# Character → byte of the byte-level alphabet. Printable bytes stand for themselves, all others for the characters from
# 256 in order.
_LETTERS = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
_PRINTABLE = [ord(letter) for letter in _LETTERS if ord(letter) < 256]
_BYTE_ALPHABET = dict(zip(_LETTERS, [*_PRINTABLE, *sorted({*range(256)} - {*_PRINTABLE})]))
# Bytes that no UTF-8 text has; some vocabularies leave them out.
_NEVER_IN_UTF8 = frozenset([0xC0, 0xC1, *range(0xF5, 0x100)])
_BYTE_TOKENS = {f'<0x{byte:02X}>': bytes([byte]) for byte in range(256)}


def added_tokens(specification: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the entries of the added vocabulary by text, without white space that controls nothing.

    Args:
      specification: content of tokenizer.json.
    """
    vocabulary = specification['model']['vocab']
    has_marks = marks_spaces(specification)
    added = {}
    for token in specification['added_tokens']:
        text = token['content']
        # Runs of white space (Gemma) control nothing: foreign text has them as any other text does.
        is_plain = has_marks and is_white_space(text) and text in vocabulary
        if not is_plain:
            added[text] = token
    return added


def check(folder: pathlib.Path, specification: dict[str, Any], vocabulary_size: int) -> None:
    """Raises UserError for tokens that the model does not know or that are matched in an unsupported way.

    Args:
      specification: content of tokenizer.json.
      vocabulary_size: number of ids of the model.
    """
    path = folder / 'tokenizer.json'
    steps = json.dumps(specification.get('normalizer'))
    is_replacing = '"type": "Replace"' in steps or '"type": "Prepend"' in steps
    if is_replacing and not marks_spaces(specification):
        raise UserError(
            f'{path}: its normaliser replaces or adds text, so questions and passages would be changed; take the '
            'tokenizer of the published model'
        )
    if specification['model'].get('dropout'):
        raise UserError(
            f'{path}: its BPE has dropout, which splits a text otherwise at every call; set "dropout" to null'
        )
    settings = fields_of(folder / 'tokenizer_config.json')
    for name in ('add_prefix_space', 'split_special_tokens'):
        if settings.get(name):
            raise UserError(
                f'{folder / "tokenizer_config.json"}: {name}=true changes the ids of prompts and is not supported; '
                'set it to false, or take a checkpoint that was trained without it'
            )
    ids = dict(specification['model']['vocab'])
    for text, token in added_tokens(specification).items():
        if token['single_word']:
            raise UserError(
                f'{path}: the added token {text!r} has single_word=true, which is not supported; set it to false'
            )
        # Special tokens, such as a placeholder of images, may be there for another model of the family: they are
        # refused where a prompt has them.
        ids[text] = -1 if token['special'] else token['id']
    for text, token_id in ids.items():
        if token_id >= vocabulary_size:
            raise outside_error(folder, text, token_id, vocabulary_size)


def class_difference(folder: pathlib.Path, specification: dict[str, Any]) -> str:
    """Returns how `transformers` reads the folder by its model type or class; '' if as here.

    AutoTokenizer of `transformers` 5 does not read the rules of tokenizer.json where it knows the class of the
    tokenizer: it takes the vocabulary and the rules of the class.

    Args:
      specification: content of tokenizer.json.
    """
    model_type = fields_of(folder / 'config.json').get('model_type')
    name = _CLASS_OF_MODEL_TYPE.get(str(model_type), '')
    # Qwen 2 is on a list of types whose folders often name a wrong class.
    if name != 'TokenizersBackend' and model_type != 'qwen2':
        named = fields_of(folder / 'tokenizer_config.json').get('tokenizer_class')
        name = (named or name).removesuffix('Fast')
    text = _text_of_other_ids(name, specification)
    if not text:
        return ''
    return (
        f'{folder}: transformers 5 takes the rules of {name}, which gives {text!r} other ids than tokenizer.json does; '
        'here tokenizer.json holds, as in transformers 4; "tokenizer_class": "PreTrainedTokenizerFast" in '
        'tokenizer_config.json makes both alike, but not for qwen2'
    )


def _text_of_other_ids(name: str, specification: dict[str, Any]) -> str:
    """Returns a text with other ids by the rules of a class of `transformers` than by tokenizer.json; '' for none."""
    # LlamaTokenizer: where tokenizer.json is byte-level, `transformers` reads its rules too.
    if name in ('', 'LlamaTokenizer', 'PreTrainedTokenizer', 'TokenizersBackend'):
        return ''
    tokenizer_class = getattr(transformers, name, None)
    if tokenizer_class is None or '__init__' not in vars(tokenizer_class):
        return ''
    # Made without a vocabulary, for its rules.
    class_specification = json.loads(tokenizer_class().backend_tokenizer.to_str())
    rules = {key: class_specification[key] for key in ('normalizer', 'pre_tokenizer')}
    by_class = tokenizers.Tokenizer.from_str(json.dumps(specification | rules))
    by_file = tokenizers.Tokenizer.from_str(json.dumps(specification))
    for text in TEXTS:
        # Not the words: other ones may have the same ids, where no token has two digits.
        if by_class.encode(text).ids != by_file.encode(text).ids:
            return text
    return ''


def outside_error(
    folder: pathlib.Path, text: str, token_id: int, vocabulary_size: int
) -> UserError:
    """Returns the error for a token whose id the model does not know."""
    return UserError(
        f'{folder / "tokenizer.json"}: the token {text!r} has id {token_id}, and the model has the ids 0 to '
        f'{vocabulary_size - 1} (vocab_size of config.json); resize its embedding with '
        'model.resize_token_embeddings(len(tokenizer)) and save both, or remove the token'
    )


def check_adapter(folder: pathlib.Path, base: pathlib.Path, template: str) -> None:
    """Raises UserError if an adapter has a tokenizer or chat template of its own that differs from its base's.

    PEFT would use the adapter's, with an embedding of another size; here the base's are used.

    Args:
      template: chat template of the base.
    """
    difference = ''
    path, base_path = folder / 'tokenizer.json', base / 'tokenizer.json'
    if path.is_file() and path.read_bytes() != base_path.read_bytes():
        difference = 'another tokenizer' if _rules(path) != _rules(base_path) else ''
    if _template_text(folder) not in ('', template):
        difference = difference or 'another chat template'
    if difference:
        raise UserError(
            f'{folder}: the adapter has {difference} than its base {base}; merge it into the base with '
            'merge_and_unload of PEFT, save that with the tokenizer of the adapter and name its folder, or remove the '
            'files of the tokenizer from the adapter to use those of the base'
        )


def _rules(path: pathlib.Path) -> str:
    """Returns a tokenizer.json as the library writes it, without settings of its last use, which change no id."""
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        # The library raises exceptions of many types.
        raise UserError(
            f'{path}: cannot be read ({first_line(error)}); copy the folder again'
        ) from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer.to_str()


def _template_text(folder: pathlib.Path) -> str:
    """Returns the chat template that the files of a folder hold; '' for none."""
    path = folder / 'chat_template.jinja'
    if path.is_file():
        return path.read_text(encoding='utf-8')
    template = fields_of(folder / 'tokenizer_config.json').get('chat_template') or ''
    if isinstance(template, list):
        # Named templates; messages without tools are written by this one.
        template = {entry['name']: entry['template'] for entry in template}.get('default', '')
    return template


def fields_of(path: pathlib.Path) -> dict[str, Any]:
    """Returns the content of a JSON file of a folder; {} without the file; raises UserError if it cannot be read."""
    if not path.is_file():
        return {}
    try:
        return json_text.read_object(path, float)
    except (OSError, ValueError) as error:
        raise UserError(f'{path}: cannot be read ({error}); copy the folder again') from None


def is_white_space(token: str) -> bool:
    """Returns whether a token is white space only; SentencePiece writes spaces as U+2581."""
    return token.replace(_SPACE_MARK, ' ').isspace()


def marks_spaces(specification: dict[str, Any]) -> bool:
    """Returns whether tokens are text with U+2581 for a space, and other bytes have tokens such as <0x0A> (Gemma).

    Args:
      specification: content of tokenizer.json.
    """
    model = specification['model']
    # The vocabulary of other types is a list.
    is_bpe = model['type'] == 'BPE' and model.get('byte_fallback')
    has_bytes = is_bpe and _BYTE_TOKENS.keys() <= model['vocab'].keys()
    # Other normalisers, such as one that puts a space before every text, would change pieces of a prompt.
    return bool(has_bytes) and specification.get('normalizer') == _SPACES_MARKED


def is_byte_level(specification: dict[str, Any]) -> bool:
    """Returns whether a tokenizer is BPE over the characters of the byte-level alphabet.

    Args:
      specification: content of tokenizer.json.
    """
    model = specification['model']
    # The names of both marks of parts of words, as in CLIP and in WordPiece: they are no text.
    has_marks = model.get('end_of_word_suffix') or model.get('continuing_subword_prefix')
    if model['type'] != 'BPE' or has_marks:
        return False
    steps = [specification.get('normalizer'), specification.get('pre_tokenizer')]
    # Sequences of steps hold further ones. Only this one turns text into the characters of the alphabet.
    return '"type": "ByteLevel"' in json.dumps(steps)


def missing_bytes(specification: dict[str, Any]) -> int:
    """Returns how many bytes of UTF-8 texts a byte-level tokenizer has no token for: it loses them."""
    vocabulary = specification['model']['vocab']
    missing = {byte for letter, byte in _BYTE_ALPHABET.items() if letter not in vocabulary}
    return len(missing - _NEVER_IN_UTF8)


def bytes_function(specification: dict[str, Any]) -> Callable[[str], bytes]:
    """Returns the function token → bytes of a vocabulary; it raises KeyError for a token that is not byte-level."""
    return _marked_bytes if marks_spaces(specification) else _byte_level_bytes


def _marked_bytes(token: str) -> bytes:
    text = token.replace(_SPACE_MARK, ' ')
    return _BYTE_TOKENS.get(token, text.encode())


def _byte_level_bytes(token: str) -> bytes:
    return bytes(_BYTE_ALPHABET[character] for character in token)
