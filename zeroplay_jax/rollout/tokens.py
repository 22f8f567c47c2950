"""Converts text to ids and back. Sampled ids are never tokenised again; foreign text never becomes a control token.

A token of the added vocabulary (`<|im_end|>`, `<search>`, …) can only come from the policy itself
or from text of this code base. Everything else (a retrieved page, a question that a model
invented) is `Untrusted` and encoded by a second tokenizer whose added vocabulary is empty.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
import transformers
from jaxtyping import Int

from zeroplay_jax.policy.adapter_config import base_folder
from zeroplay_jax.policy.config_fields import vocabulary_size
from zeroplay_jax.rollout.messages import Message, Untrusted
from zeroplay_jax.types import PROMPT, Trajectory, UserError

# Characters of a library's error that are quoted.
_MAX_REASON_CHARACTERS = 200
# Names of the labels in `Trajectory.source`, by number.
SOURCES = ('prompt', 'policy', 'env')
# Characters of English text per token of a large vocabulary, rounded up: `encode_start` encodes so many at first.
_CHARACTERS_PER_TOKEN = 8
# Ids at the end of a cut text that may differ from those of the whole text.
_UNSTABLE_TOKENS = 64
# Field of generation_config.json with the ids that end a turn, in folders where `eos_token_id` also names the ends of
# calls, so that other programs stop there (training/model_card.py).
END_OF_TURN_FIELD = 'end_of_turn_token_id'
# Private-use characters that no template writes. The first two enclose the number of an untrusted part
# while a template is rendered; the third stands for an assistant turn in `Codec.suffix`.
_MARK_START = '\ue000'
_MARK_END = '\ue001'
_TURN_MARK = '\ue002'
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
_BYTE_TOKENS = {f'<0x{byte:02X}>': bytes([byte]) for byte in range(256)}


def _is_white_space(text: str) -> bool:
    """Returns whether a token is white space only; SentencePiece writes spaces as U+2581."""
    return text.replace(_SPACE_MARK, ' ').isspace()


def _marks_spaces(specification: dict[str, Any]) -> bool:
    """Returns whether tokens are text with U+2581 for a space, and other bytes have tokens such as <0x0A> (Gemma).

    Args:
      specification: content of tokenizer.json.
    """
    model = specification['model']
    has_bytes = model.get('byte_fallback') and _BYTE_TOKENS.keys() <= model['vocab'].keys()
    # Other normalisers, such as one that puts a space before every text, would change pieces of a prompt.
    return bool(has_bytes) and specification.get('normalizer') == _SPACES_MARKED


def _marked_bytes(token: str) -> bytes:
    """Returns the bytes of a token of such a vocabulary."""
    text = token.replace(_SPACE_MARK, ' ')
    return _BYTE_TOKENS.get(token, text.encode())


def _byte_level_bytes(token: str) -> bytes:
    """Returns the bytes of a token of a byte-level vocabulary; raises KeyError if it is not one."""
    return bytes(_BYTE_ALPHABET[character] for character in token)


def _merges_within(merges: list, vocabulary: Mapping[str, int]) -> list:
    """Returns the merges of a BPE model whose parts and result are in its vocabulary."""
    kept = []
    for merge in merges:
        # Older files write the two parts as one text.
        first, second = merge.split(' ') if isinstance(merge, str) else merge
        if first in vocabulary and second in vocabulary and first + second in vocabulary:
            kept.append(merge)
    return kept


class Codec:
    """Tokenizer and chat template of one checkpoint folder.

    The tokens are byte-level BPE, or BPE over characters with a token for every single byte (SentencePiece, Gemma).

    Attributes:
      token_bytes: per id the bytes it encodes (b'' for ids without a token).
      longest_token: bytes of the longest of them.
      eos_ids: ids that end an assistant turn.

    Raises:
      ValueError: the tokenizer is of another kind.
    """

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        # Read without AutoTokenizer, which would import PyTorch where it is installed.
        tokenizer_class = transformers.PreTrainedTokenizerFast
        self._tokenizer = tokenizer_class.from_pretrained(str(self.folder))
        specification_text = self._tokenizer.backend_tokenizer.to_str()
        specification = json.loads(specification_text)
        model = specification['model']
        vocabulary = model['vocab']
        # Unigram vocabularies are lists of (token, score). They are never byte-level.
        if not isinstance(vocabulary, dict):
            model_type = model['type']
            raise ValueError(
                f'{self.folder}: a {model_type} tokenizer is not byte-level; choose a checkpoint with byte-level BPE'
            )
        self._marks_spaces = _marks_spaces(specification)
        self._added_ids: dict[str, int] = {}
        for token in specification['added_tokens']:
            text = token['content']
            # Runs of white space (Gemma) control nothing: foreign text has them as any other text does.
            is_plain = self._marks_spaces and _is_white_space(text) and text in vocabulary
            if not is_plain:
                self._added_ids[text] = token['id']
        self._plain = self._without_added_tokens(specification)
        # Sorted longest first, so that a token that contains another one is found as a whole.
        longest_first = sorted(self._added_ids, key=len, reverse=True)
        pattern = '|'.join(map(re.escape, longest_first))
        # Without added tokens the pattern matches nothing.
        self._added_pattern = re.compile(pattern or r'(?!)')
        self.token_bytes = self._bytes_of_ids(vocabulary)
        self.longest_token = max(map(len, self.token_bytes))
        self.eos_ids = self._end_of_turn_ids()

    def _without_added_tokens(self, specification: dict[str, Any]) -> tokenizers.Tokenizer:
        """Returns the tokenizer for foreign text, which has no added vocabulary but white space.

        Args:
          specification: content of tokenizer.json.
        """
        model = dict(specification['model'])
        vocabulary = dict(model['vocab'])
        # Some models map a whole pre-token that is in their own vocabulary directly to its id, so the
        # strings of the added vocabulary are removed there as well.
        removed = vocabulary.keys() & self._added_ids.keys()
        for token in removed:
            del vocabulary[token]
        model['vocab'] = vocabulary
        if removed and 'merges' in model:
            model['merges'] = _merges_within(model['merges'], vocabulary)
        if model.get('unk_token') in removed:
            # Characters without a token are written as bytes, never as this token.
            model['unk_token'] = None
        plain = dict(specification, model=model)
        plain['added_tokens'] = [
            token
            for token in specification['added_tokens']
            if token['content'] not in self._added_ids
        ]
        # Pieces of a prompt are encoded one by one: none of them may get a BOS token or be cut.
        for setting in ('post_processor', 'truncation', 'padding'):
            plain[setting] = None
        return tokenizers.Tokenizer.from_str(json.dumps(plain))

    def _bytes_of_ids(self, vocabulary: dict[str, int]) -> list[bytes]:
        """Returns `token_bytes`; raises ValueError for a token that is not byte-level."""
        bytes_of_token = _marked_bytes if self._marks_spaces else _byte_level_bytes
        # A model may have more ids than its tokenizer has tokens; those decode to nothing.
        last_id = max(
            vocabulary_size(self.folder) - 1,
            *vocabulary.values(),
            *self._added_ids.values(),
        )
        token_bytes = [b''] * (last_id + 1)
        for token, token_id in vocabulary.items():
            if token in self._added_ids:
                continue
            # Bytes are stored and not decoded text, because a token may hold half a character.
            try:
                token_bytes[token_id] = bytes_of_token(token)
            except KeyError:
                raise ValueError(
                    f'{self.folder}: token {token!r} is not byte-level; this tokenizer is not '
                    'supported'
                ) from None
        for token, token_id in self._added_ids.items():
            token_bytes[token_id] = token.encode()
        return token_bytes

    def _end_of_turn_ids(self) -> tuple[int, ...]:
        """Returns `eos_ids`: those of generation_config.json and the tokenizer's own, ascending."""
        # Checkpoints may end a turn with several tokens (Qwen: <|im_end|> and <|endoftext|>); the
        # tokenizer itself names only one.
        ids: set[int] = set()
        path = self.folder / 'generation_config.json'
        if path.exists():
            fields = json.loads(path.read_text())
            listed = fields.get(END_OF_TURN_FIELD, fields.get('eos_token_id'))
            if isinstance(listed, list):
                ids.update(listed)
            elif listed is not None:
                ids.add(listed)
        tokenizer_id = self._tokenizer.eos_token_id
        if tokenizer_id is not None:
            ids.add(tokenizer_id)
        return tuple(sorted(ids))

    def encode(self, text: str) -> list[int]:
        """Returns the ids of trusted text, such as that of this code base: added tokens are recognised."""
        return self._encode([text])

    def encode_plain(self, text: str) -> list[int]:
        """Returns the ids of foreign text, none of which is in the added vocabulary."""
        encoding = self._plain.encode(text, add_special_tokens=False)
        return encoding.ids

    def encode_start(self, text: str, limit: int) -> list[int]:
        """Returns the first `limit` ids of foreign text; the time does not grow with the length of the text."""
        # A page of a megabyte has hundreds of thousands of ids, of which a few hundred are read. Only the last ids of
        # a piece depend on the text behind it, so those are never among the ids returned.
        needed_ids = limit + _UNSTABLE_TOKENS
        characters = _CHARACTERS_PER_TOKEN * needed_ids
        while True:
            ids = self.encode_plain(text[:characters])
            is_whole = characters >= len(text)
            if is_whole or len(ids) >= needed_ids:
                return ids[:limit]
            characters *= 4

    def _encode(self, spans: Iterable[str]) -> list[int]:
        """Returns the ids of consecutive spans; those of type `Untrusted` are foreign text.

        Text between two trusted added tokens is encoded as one piece across spans, as the tokenizer
        itself would. A prompt whose untrusted parts contain no added token therefore has exactly the ids of
        `apply_chat_template`.
        """
        ids: list[int] = []
        pending: list[str] = []
        for span in spans:
            if isinstance(span, Untrusted):
                pending.append(span)
                continue
            # Only trusted text is searched for added tokens.
            position = 0
            for match in self._added_pattern.finditer(span):
                pending.append(span[position : match.start()])
                ids += self.encode_plain(''.join(pending))
                added_id = self._added_ids[match.group()]
                ids.append(added_id)
                pending = []
                position = match.end()
            pending.append(span[position:])
        ids += self.encode_plain(''.join(pending))
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids, added tokens included; bytes that are not valid UTF-8 become U+FFFD."""
        pieces = [self.token_bytes[int(token)] for token in ids]
        # The bytes are joined before decoding: a character may be spread over several tokens.
        text = b''.join(pieces)
        return text.decode(errors='replace')

    def _render_spans(self, messages: Sequence[Message], add_header: bool) -> list[str]:
        """Returns the text of a chat as spans in order: `Untrusted` parts, and the trusted text between them.

        Args:
          add_header: whether the header of the next assistant turn follows.
        """
        # The template sees numbered marks in place of untrusted parts. It cannot split, strip or
        # interpret them, and the text between two marks is known to be trusted.
        untrusted: list[Untrusted] = []
        marked_messages = []
        for message in messages:
            content = _mark_untrusted(message, untrusted)
            marked_messages.append({**message, 'content': content})
        text = self._tokenizer.apply_chat_template(
            marked_messages, tokenize=False, add_generation_prompt=add_header
        )
        spans: list[str] = re.split(f'{_MARK_START}(\\d+){_MARK_END}', text)
        # re.split returns the captured number at every second place.
        for index in range(1, len(spans), 2):
            number = int(spans[index])
            spans[index] = untrusted[number]
        return spans

    def render(self, messages: Sequence[Message]) -> Int[np.ndarray, ' tokens']:
        """Returns the prompt ids, int32, of a chat, with the header of the assistant's turn at the end."""
        spans = self._render_spans(messages, add_header=True)
        ids = self._encode(spans)
        return np.asarray(ids, np.int32)

    def suffix(self, message: Message) -> Int[np.ndarray, ' tokens']:
        """Returns the ids, int32, to append after an assistant turn that was cut before its end token.

        They are the template's text behind the turn, `message`, and the next assistant header.

        Raises:
          ValueError: the template leaves out the text of assistant turns.
        """
        # A short chat is rendered and the part behind its assistant turn is taken, so that the real turn
        # is never tokenised again. It begins with a user message, which some templates require.
        turn = Untrusted(_TURN_MARK)
        chat: list[Message] = [
            {'role': 'user', 'content': 'x'},
            {'role': 'assistant', 'content': [turn]},
            message,
        ]
        spans = self._render_spans(chat, add_header=True)
        for index, span in enumerate(spans):
            # Compared by identity, because an equal text may occur in `message`.
            if span is turn:
                ids = self._encode(spans[index + 1 :])
                return np.asarray(ids, np.int32)
        raise ValueError(
            f'{self.folder}: the chat template leaves out the text of an assistant turn'
        )


def _mark_untrusted(message: Message, untrusted: list[Untrusted]) -> str:
    """Returns the content of a message with marks in place of its untrusted parts, which are added to the list."""
    parts = message['content']
    if isinstance(parts, str):
        parts = [parts]
    marked = ''
    for part in parts:
        if isinstance(part, Untrusted):
            marked += f'{_MARK_START}{len(untrusted)}{_MARK_END}'
            untrusted.append(part)
        else:
            marked += part
    return marked


def open_codec(folder: pathlib.Path) -> Codec:
    """Returns the tokenizer and chat template of a folder; those of the base for an adapter.

    Raises:
      UserError: the tokenizer or the template cannot be used.
    """
    try:
        codec = Codec(base_folder(folder))
        # Rendered once, so that a template that fails is reported before the weights are loaded.
        codec.render([{'role': 'user', 'content': 'x'}])
    except UserError:
        # Names its file, such as config.json or adapter_config.json.
        raise
    except Exception as error:
        # The libraries tokenizers, transformers and jinja raise exceptions of many types.
        lines = str(error).strip().splitlines()
        reason = ''
        if lines:
            reason = lines[0][:_MAX_REASON_CHARACTERS]
        raise UserError(
            f'{folder}: its tokenizer cannot be used ({reason}); copy the folder again'
        ) from None
    return codec


class StopMatcher:
    """Finds where the text of a growing turn first contains one of the stop strings.

    A stop string may end inside a token: the token stays whole, only the text is cut.
    """

    def __init__(self, token_bytes: Sequence[bytes], stops: Sequence[str]):
        self._token_bytes = token_bytes
        # The bytes of the text are matched and not token ids: a stop string has many tokenisations, and the
        # policy may sample any of them.
        self._stops = [stop.encode() for stop in stops]
        stop_lengths = [len(stop) for stop in self._stops]
        self._longest_stop = max(stop_lengths, default=1)
        self._text = b''
        self._token_count = 0

    def push(self, ids: Iterable[int]) -> tuple[int, str] | None:
        """Adds ids of the turn; looks for a stop string in its whole text so far.

        Returns:
          None without a match. On the first match: the number of tokens of the turn up to and including the one
          in which the stop string ends, and the turn's text cut after the stop string. Later ids are ignored.
        """
        for token in ids:
            # A match must end in the new token, so it cannot start earlier than this.
            search_start = len(self._text) - self._longest_stop + 1
            search_start = max(search_start, 0)
            self._text += self._token_bytes[int(token)]
            self._token_count += 1
            match_ends = []
            for stop in self._stops:
                position = self._text.find(stop, search_start)
                if position >= 0:
                    match_ends.append(position + len(stop))
            # The earliest end, so that one token with two stop strings ends the turn at the first.
            if match_ends:
                text = self._text[: min(match_ends)]
                return self._token_count, text.decode(errors='replace')
        return None

    @property
    def text(self) -> str:
        """Text of all ids so far."""
        return self._text.decode(errors='replace')


def text_spans(codec: Codec, trajectory: Trajectory) -> Iterator[dict[str, Any]]:
    """Yields the spans of a rollout in order, one per change of author: {'source': of SOURCES, 'text', 'tokens'}.

    A later context of a rollout repeats tokens of an earlier one; repeated spans are left out.
    """
    for context in trajectory.contexts:
        is_change = np.diff(context.source) != 0
        boundaries = np.flatnonzero(is_change) + 1
        edges = [0, *boundaries, len(context.tokens)]
        # Old policy tokens are PROMPT in a later context: its new spans begin after the last PROMPT.
        first_new = 0
        if context is not trajectory.contexts[0]:
            prompt_positions = np.flatnonzero(context.source == PROMPT)
            first_new = prompt_positions[-1] + 1
        for start, end in itertools.pairwise(edges):
            if start < first_new:
                continue
            ids = context.tokens[start:end].tolist()
            source = SOURCES[context.source[start]]
            text = codec.decode(ids)
            yield {'source': source, 'text': text, 'tokens': ids}
