"""The bytes that the tokens of a vocabulary stand for: byte-level BPE, or BPE over characters with tokens for bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

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
