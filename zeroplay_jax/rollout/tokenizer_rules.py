"""What a tokenizer.json must fulfil, so that its ids are those of the model and of the library that wrote it."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import tokenizers
import transformers

from zeroplay_jax.retrieval import json_text
from zeroplay_jax.types import UserError, first_line

# Characters that a normaliser may make of one.
_MOST_GROWTH = 64

# Classes that AutoTokenizer of `transformers` takes for the supported types of models, where a folder names none.
_CLASS_OF_MODEL_TYPE = {
    'qwen2': 'Qwen2Tokenizer',
    'qwen3': 'Qwen2Tokenizer',
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


@dataclasses.dataclass(frozen=True)
class AddedToken:
    """A token of the added vocabulary.

    Attributes:
      id: its id.
      lstrip, rstrip: whether it takes the white space before or behind it.
    """

    id: int
    lstrip: bool
    rstrip: bool


def added_tokens(specification: dict[str, Any]) -> dict[str, AddedToken]:
    """Returns the added vocabulary by text, without white space that controls nothing.

    Args:
      specification: content of tokenizer.json.
    """
    added = {}
    for token in _control_entries(specification):
        added[token['content']] = AddedToken(token['id'], token['lstrip'], token['rstrip'])
    return added


def _control_entries(specification: dict[str, Any]) -> list[dict[str, Any]]:
    vocabulary = specification['model']['vocab']
    has_marks = marks_spaces(specification)
    entries = []
    for token in specification['added_tokens']:
        text = token['content']
        # Runs of white space (Gemma) control nothing: foreign text has them as any other text does.
        is_plain = has_marks and is_white_space(text) and text in vocabulary
        if not is_plain:
            entries.append(token)
    return entries


def check(folder: pathlib.Path, specification: dict[str, Any], vocabulary_size: int) -> None:
    """Raises UserError for tokens that the model does not know or that are matched in an unsupported way.

    Args:
      specification: content of tokenizer.json.
      vocabulary_size: number of ids of the model.
    """
    path = folder / 'tokenizer.json'
    growth = _growth(specification.get('normalizer'))
    if growth > _MOST_GROWTH:
        raise UserError(
            f'{path}: its normaliser makes up to {growth:,.0f} characters of one; take the tokenizer of the '
            'published model'
        )
    if specification['model'].get('dropout'):
        raise UserError(
            f'{path}: its BPE has dropout, which splits a text otherwise at every call; set "dropout" to null'
        )
    settings = _settings_of(folder)
    for name in ('add_prefix_space', 'split_special_tokens'):
        if settings.get(name):
            raise UserError(
                f'{folder / "tokenizer_config.json"}: {name}=true changes the ids of prompts and is not supported; '
                'set it to false, or take a checkpoint that was trained without it'
            )
    entries = _control_entries(specification)
    added_texts = {token['content'] for token in entries}
    for text, token_id in specification['model']['vocab'].items():
        if token_id >= vocabulary_size and text not in added_texts:
            raise outside_error(folder, text, token_id, vocabulary_size)
    for token in entries:
        # Special tokens, such as a placeholder of images, may be there for another model of the family: they are
        # refused where a prompt has them.
        if token['id'] >= vocabulary_size and not token['special']:
            raise outside_error(folder, token['content'], token['id'], vocabulary_size)
        if token['single_word']:
            raise UserError(
                f'{path}: the added token {token["content"]!r} has single_word=true, which is not supported; set it to '
                'false'
            )


def class_difference(folder: pathlib.Path, specification: dict[str, Any]) -> str:
    """Returns how `transformers` reads the folder by the model type of config.json alone; '' if as here.

    AutoTokenizer of `transformers` 5 does not read the rules of tokenizer.json where it knows the class of the
    tokenizer: it takes the vocabulary and the rules of the class.

    Args:
      specification: content of tokenizer.json.

    Raises:
      UserError: the class that the folder names, or that `transformers` takes where it names none, has other rules.
    """
    config_path = folder / 'config.json'
    model_type = json_text.read_object(config_path, float).get('model_type')
    class_of_type = _CLASS_OF_MODEL_TYPE.get(str(model_type), '')
    if class_of_type == 'TokenizersBackend':
        return ''
    named = _settings_of(folder).get('tokenizer_class')
    name = (named or class_of_type).removesuffix('Fast')
    text = _text_of_other_ids(name, specification)
    if text:
        raise UserError(
            f'{folder / "tokenizer_config.json"}: tokenizer_class {name} gives {text!r} other ids than tokenizer.json '
            'does, and transformers 5 would take the rules of the class; set "tokenizer_class" to '
            '"PreTrainedTokenizerFast" if those of tokenizer.json are right, or take both files of one model'
        )
    # Qwen 2 is on a list of types whose folders often name a wrong class.
    if model_type == 'qwen2' and name != class_of_type:
        text = _text_of_other_ids(class_of_type, specification)
    if not text:
        return ''
    return (
        f'{config_path}: for model_type={model_type!r} transformers 5 takes the rules of {class_of_type}, which gives '
        f'{text!r} other ids than tokenizer.json does; here tokenizer.json holds, as in transformers 4'
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


def _growth(normalizer: dict[str, Any] | None) -> float:
    """Returns how many characters a normaliser of tokenizer.json may make of one."""
    if not normalizer:
        return 1.0
    kind = normalizer.get('type')
    if kind == 'Sequence':
        growth = 1.0
        for part in normalizer['normalizers']:
            growth *= _growth(part)
        return growth
    if kind == 'Replace':
        # A regular expression may match a single character, or none.
        replaced = len(normalizer['pattern'].get('String', ''))
        content = len(normalizer['content'])
        return max(content / replaced, 1.0) if replaced else content + 1.0
    if kind == 'Prepend':
        return len(normalizer['prepend']) + 1.0
    return 1.0


# ---- adapters ----------------------------------------------------------------------------------------


def check_adapter(folder: pathlib.Path, base: pathlib.Path, template: str) -> None:
    """Raises UserError if an adapter has a tokenizer or chat template of its own that differs from its base's.

    PEFT would use the adapter's, with an embedding of another size; here the base's are used.

    Args:
      template: chat template of the base.
    """
    difference = _tokenizer_difference(folder / 'tokenizer.json', base / 'tokenizer.json')
    adapter_template = _template_text(folder)
    if not difference and adapter_template not in ('', template):
        difference = 'another chat template'
    if difference:
        raise UserError(
            f'{folder}: the adapter has {difference} than its base {base}; merge it into the base with '
            'merge_and_unload of PEFT, save that with the tokenizer of the adapter and name its folder, or remove the '
            'files of the tokenizer from the adapter to use those of the base'
        )


def _tokenizer_difference(path: pathlib.Path, base_path: pathlib.Path) -> str:
    """Returns in words what a tokenizer.json has that the base's has not; '' if nothing, or if there is no file."""
    if not path.is_file() or path.read_bytes() == base_path.read_bytes():
        return ''
    texts = []
    vocabularies = []
    for file in (path, base_path):
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:
            # The library raises exceptions of many types.
            reason = first_line(error)
            raise UserError(f'{file}: cannot be read ({reason}); copy the folder again') from None
        # Settings of the last use, which change no id of a prompt.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        texts.append(tokenizer.to_str())
        vocabularies.append(tokenizer.get_vocab())
    vocabulary, base_vocabulary = vocabularies
    for token, token_id in sorted(vocabulary.items(), key=lambda item: item[1]):
        if base_vocabulary.get(token) != token_id:
            return f'another tokenizer (token {token!r} with id {token_id})'
    return '' if texts[0] == texts[1] else 'another tokenizer (other rules in tokenizer.json)'


def _template_text(folder: pathlib.Path) -> str:
    """Returns the chat template that the files of a folder hold; '' for none."""
    path = folder / 'chat_template.jinja'
    if path.is_file():
        return path.read_text(encoding='utf-8')
    template = _settings_of(folder).get('chat_template') or ''
    if isinstance(template, list):
        # Named templates; messages without tools are written by this one.
        template = {entry['name']: entry['template'] for entry in template}.get('default', '')
    return template


def _settings_of(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the content of tokenizer_config.json; {} without the file."""
    path = folder / 'tokenizer_config.json'
    if not path.is_file():
        return {}
    try:
        return json_text.read_object(path, float)
    except (OSError, ValueError) as error:
        raise UserError(f'{path}: cannot be read ({error}); copy the folder again') from None


# ---- bytes of tokens -------------------------------------------------------------------------------
#
# Byte-level BPE, or BPE over characters with tokens for bytes.


# How SentencePiece vocabularies write a space, and the normaliser of tokenizer.json that does so and nothing else.
_SPACE_MARK = '\u2581'
_SPACES_MARKED = {'type': 'Replace', 'pattern': {'String': ' '}, 'content': _SPACE_MARK}


def _byte_alphabet() -> dict[str, int]:
    """Character → byte of the byte-level alphabet that GPT-2 introduced."""
    # Printable bytes stand for themselves, all others for the characters from 256 in order.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {}
    next_code = 256
    for byte in range(256):
        if byte in printable:
            alphabet[chr(byte)] = byte
        else:
            alphabet[chr(next_code)] = byte
            next_code += 1
    return alphabet


_BYTE_ALPHABET = _byte_alphabet()
# Bytes that no UTF-8 text has; some vocabularies leave them out.
_NEVER_IN_UTF8 = frozenset([0xC0, 0xC1, *range(0xF5, 0x100)])
_BYTE_TOKENS = {f'<0x{byte:02X}>': bytes([byte]) for byte in range(256)}


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
    missing = 0
    for character, byte in _BYTE_ALPHABET.items():
        missing += character not in vocabulary and byte not in _NEVER_IN_UTF8
    return missing


def bytes_function(specification: dict[str, Any]) -> Callable[[str], bytes]:
    """Returns the function token → bytes of a vocabulary; it raises KeyError for a token that is not byte-level."""
    return _marked_bytes if marks_spaces(specification) else _byte_level_bytes


def _marked_bytes(token: str) -> bytes:
    text = token.replace(_SPACE_MARK, ' ')
    return _BYTE_TOKENS.get(token, text.encode())


def _byte_level_bytes(token: str) -> bytes:
    return bytes(_BYTE_ALPHABET[character] for character in token)
