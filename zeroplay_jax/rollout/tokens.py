"""Converts text to ids and back. Sampled ids are never tokenised again; foreign text never becomes a control token.

A token of the added vocabulary (`<|im_end|>`, `<search>`, …) can only come from the policy itself
or from text of this code base. Everything else (a retrieved page, a question that a model
invented) is `Untrusted` and encoded by a second tokenizer whose added vocabulary is empty.
"""

from __future__ import annotations

import codecs
import datetime
import functools
import itertools
import json
import pathlib
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
import transformers
from jaxtyping import Int

from zeroplay_jax.policy.adapter_config import base_folder
from zeroplay_jax.policy.families import vocabulary_size
from zeroplay_jax.rollout import tokenizer_rules
from zeroplay_jax.rollout.chat_template import ChatTemplate
from zeroplay_jax.rollout.foreign_text import Message, Untrusted
from zeroplay_jax.rollout.tokenizer_rules import (
    bytes_function,
    fields_of,
    is_byte_level,
    marks_spaces,
    missing_bytes,
    outside_error,
)
from zeroplay_jax.types import PROMPT, Json, Trajectory, UserError, first_line

# Characters of a library's error that are quoted.
_MAX_REASON_CHARACTERS = 200
# Names of the labels in `Trajectory.source`, by number.
SOURCES = ('prompt', 'policy', 'env')
# Characters of English text per token of a large vocabulary, rounded up: `encode_start` encodes so many at first.
_CHARACTERS_PER_TOKEN = 8
# Ids at the end of a cut text that may differ from those of the whole text.
_UNSTABLE_TOKENS = 64
# A larger vocabulary is a mistake in config.json: tables of it would fill the memory.
_MOST_IDS = 1 << 24
# White space as the library `tokenizers` trims it around tokens that say so; Python's own has four characters more.
_WHITE_SPACE = ''.join(
    chr(code) for code in range(0x3001) if chr(code).isspace() and not 0x1C <= code <= 0x1F
)


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

    Args:
      folder: the checkpoint.
      date: the day, as 2026-11-25, that a template which writes today's date gets; '' for today.

    Attributes:
      token_bytes: per id of the model the bytes it encodes (b'' for ids without a token).
      longest_token: bytes of the longest of them.
      eos_ids: ids that end an assistant turn, ascending.
      template: the chat template.
      date: the day that the template writes; '' if it writes none.
      notes: what a user should know about the tokenizer, a line each.

    Raises:
      UserError: a tokenizer of another kind, tokens that the model does not know, or a template that cannot be used.
    """

    def __init__(self, folder, date: str = ''):
        self.folder = pathlib.Path(folder)
        # Read without AutoTokenizer, which would import PyTorch where it is installed.
        tokenizer_class = transformers.PreTrainedTokenizerFast
        tokenizer = tokenizer_class.from_pretrained(str(self.folder))
        specification = json.loads(tokenizer.backend_tokenizer.to_str())
        has_byte_tokens = marks_spaces(specification)
        if not has_byte_tokens and not is_byte_level(specification):
            model_type = specification['model']['type']
            raise UserError(
                f'{self.folder}: its {model_type} tokenizer is not byte-level, so texts lose blanks or characters; '
                'choose a checkpoint with byte-level BPE'
            )
        self._vocabulary_size = vocabulary_size(self.folder)
        tokenizer_rules.check(self.folder, specification, self._vocabulary_size)
        difference = tokenizer_rules.class_difference(self.folder, specification)
        self.notes = [difference] if difference else []
        missing = 0 if has_byte_tokens else missing_bytes(specification)
        if missing:
            self.notes.append(
                f'{self.folder}: its tokenizer has no token for {missing} of 256 bytes, and drops characters with them'
            )
        self._added = tokenizer_rules.added_tokens(specification)
        self._plain = self._without_added_tokens(specification)
        # Sorted longest first, so that a token that contains another one is found as a whole.
        longest_first = sorted(self._added, key=len, reverse=True)
        pattern = '|'.join(map(re.escape, longest_first))
        # Without added tokens the pattern matches nothing.
        self._added_pattern = re.compile(pattern or r'(?!)')
        self.token_bytes = self._bytes_of_ids(specification)
        # A note says already which characters a tokenizer without some bytes drops.
        if not missing:
            self._check_texts_are_kept()
        self.longest_token = max(map(len, self.token_bytes))
        day = datetime.date.fromisoformat(date) if date else datetime.date.today()
        self.template = ChatTemplate(tokenizer, self.folder, day)
        self.date = self.template.date.isoformat() if self.template.date else ''
        self.eos_ids = self._end_of_turn_ids(tokenizer)

    def _without_added_tokens(self, specification: dict[str, Any]) -> tokenizers.Tokenizer:
        """Returns the tokenizer for foreign text, which has no added vocabulary but white space.

        Args:
          specification: content of tokenizer.json.
        """
        model = dict(specification['model'])
        vocabulary = dict(model['vocab'])
        # Some models map a whole pre-token that is in their own vocabulary directly to its id, so the
        # strings of the added vocabulary are removed there as well.
        removed = vocabulary.keys() & self._added.keys()
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
            token for token in specification['added_tokens'] if token['content'] not in self._added
        ]
        # Pieces of a prompt are encoded one by one: none of them may get a BOS token or be cut.
        for setting in ('post_processor', 'truncation', 'padding'):
            plain[setting] = None
        return tokenizers.Tokenizer.from_str(json.dumps(plain))

    def _bytes_of_ids(self, specification: dict[str, Any]) -> list[bytes]:
        """Returns `token_bytes`; raises UserError for a token that is not byte-level."""
        bytes_of_token = bytes_function(specification)
        if self._vocabulary_size > _MOST_IDS:
            raise UserError(
                f'{self.folder / "config.json"}: vocab_size={self._vocabulary_size} is larger than {_MOST_IDS}; copy '
                'the file again'
            )
        # A model may have more ids than its tokenizer has tokens; those decode to nothing.
        token_bytes = [b''] * self._vocabulary_size
        for token, token_id in specification['model']['vocab'].items():
            if token in self._added:
                continue
            # Bytes are stored and not decoded text, because a token may hold half a character.
            try:
                token_bytes[token_id] = bytes_of_token(token)
            except KeyError:
                raise UserError(
                    f'{self.folder}: token {token!r} is not byte-level; this tokenizer is not '
                    'supported'
                ) from None
        for token, added in self._added.items():
            if added['id'] < self._vocabulary_size:
                token_bytes[added['id']] = token.encode()
        return token_bytes

    def _check_texts_are_kept(self) -> None:
        """Raises UserError if the tokenizer reads a text as another one, such as in small letters."""
        for text in tokenizer_rules.TEXTS:
            read = self.decode(self.encode_plain(text))
            # Published tokenizers compose characters (Qwen).
            if unicodedata.normalize('NFC', read) != unicodedata.normalize('NFC', text):
                raise UserError(
                    f'{self.folder / "tokenizer.json"}: its tokenizer reads {text!r} as {read!r}, so questions and '
                    'passages would be changed; choose a checkpoint whose tokenizer keeps texts as they are'
                )

    def _end_of_turn_ids(self, tokenizer) -> tuple[int, ...]:
        """Returns `eos_ids`: those of the files and the tokenizer, and those with which the template ends a turn."""
        # Checkpoints may end a turn with several tokens (Qwen: <|im_end|> and <|endoftext|>); the
        # tokenizer itself names only one.
        added_ids = {text: added['id'] for text, added in self._added.items()}
        ids = listed_ids(self.folder, self._vocabulary_size, set(added_ids.values()))
        ids |= template_ids(self.template.end_texts, added_ids)
        tokenizer_id = tokenizer.eos_token_id
        if tokenizer_id is not None:
            ids.add(tokenizer_id)
        for text, token_id in added_ids.items():
            if token_id in ids and token_id >= self._vocabulary_size:
                raise outside_error(self.folder, text, token_id, self._vocabulary_size)
        return tuple(sorted(ids))

    def encode(self, text: str) -> list[int]:
        """Returns the ids of trusted text, such as that of this code base: added tokens are recognised."""
        return self.encode_spans([text])

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
                return self.whole_characters(ids[:limit])
            characters *= 4

    def encode_spans(self, spans: Iterable[str]) -> list[int]:
        """Returns the ids of consecutive spans; those of type `Untrusted` are foreign text.

        Text between two trusted added tokens is encoded as one piece across spans, as the tokenizer
        itself would. A prompt whose untrusted parts contain no added token therefore has exactly the ids of
        `apply_chat_template`.
        """
        ids = []
        pending: list[str] = []
        # Whether the last added token takes the white space behind it.
        takes_space = False

        def encode_pending(next_takes_space: bool) -> None:
            text = ''.join(pending)
            if takes_space:
                text = text.lstrip(_WHITE_SPACE)
            if next_takes_space:
                text = text.rstrip(_WHITE_SPACE)
            ids.extend(self.encode_plain(text))
            pending.clear()

        for span in spans:
            if isinstance(span, Untrusted):
                pending.append(span)
                continue
            # Only trusted text is searched for added tokens.
            position = 0
            for match in self._added_pattern.finditer(span):
                pending.append(span[position : match.start()])
                added = self._added[match.group()]
                token_id = added['id']
                if token_id >= self._vocabulary_size:
                    raise outside_error(self.folder, match.group(), token_id, self._vocabulary_size)
                encode_pending(added['lstrip'])
                ids.append(token_id)
                takes_space = added['rstrip']
                position = match.end()
            pending.append(span[position:])
        encode_pending(False)
        return ids

    def whole_characters(self, ids: Sequence[int]) -> list[int]:
        """Returns ids of a text that was cut, without the last ones if they end inside a character."""
        kept = list(ids)
        while kept:
            # No character has more than four bytes, and so four tokens.
            tail = b''.join(self.token_bytes[token] for token in kept[-4:])
            decoder = codecs.getincrementaldecoder('utf-8')('replace')
            decoder.decode(tail)
            pending, _ = decoder.getstate()
            if not pending:
                break
            kept.pop()
        return kept

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids, added tokens included; bytes that are not valid UTF-8 become U+FFFD."""
        pieces = [self.token_bytes[int(token)] for token in ids]
        # The bytes are joined before decoding: a character may be spread over several tokens.
        text = b''.join(pieces)
        return text.decode(errors='replace')

    def render(
        self, messages: Sequence[Message], schemas: Sequence[Json] = ()
    ) -> Int[np.ndarray, ' tokens']:
        """Returns the prompt ids, int32, of a chat, with the header of the assistant's turn at the end.

        Args:
          schemas: of the tools that the template lists.

        Raises:
          UserError: the template cannot write a chat with messages of these roles, or the schemas; or a schema holds
            text of the added vocabulary.
        """
        # The template mixes schemas, which may be those of a server, with its own text, which is trusted.
        for schema in schemas:
            for token in self._added_pattern.findall(json.dumps(schema, ensure_ascii=False)):
                if token.strip():
                    raise UserError(
                        f'{self.folder}: the schema of a tool holds {token!r}, which is one token there; leave that '
                        'tool out (config.tools), or tools = "template" in the file of prompts'
                    )
        roles = tuple(message['role'] for message in messages)
        contents = [_parts(message) for message in messages]
        ids = self.encode_spans(self.template.opening(roles, schemas).spans(contents))
        return np.asarray(ids, np.int32)

    def suffix(self, message: Message) -> Int[np.ndarray, ' tokens']:
        """Returns the ids, int32, to append after an assistant turn that was cut before its end token.

        They are the template's text behind the turn, `message`, and the next assistant header.

        Raises:
          UserError: the template cannot write such a message.
        """
        # Of a short chat only the part behind the assistant turn is taken, so that the real turn is never tokenised
        # again. It begins with a user message, which some templates require.
        layout = self.template.layout(('user', 'assistant', message['role']))
        ids = self.encode_spans(layout.spans([_parts(message)], first=2))
        return np.asarray(ids, np.int32)


def _parts(message: Message) -> Sequence[str]:
    """Returns the content of a message as parts."""
    content = message['content']
    return [content] if isinstance(content, str) else content


def open_codec(folder: pathlib.Path, date: str = '') -> Codec:
    """Returns the tokenizer and chat template of a folder; those of the base for an adapter.

    Args:
      date: as of `Codec`.

    Raises:
      UserError: the tokenizer or the template cannot be used, or those of an adapter differ from its base's.
    """
    base = base_folder(folder)
    if not (base / 'tokenizer.json').is_file():
        raise UserError(
            f'{base}: has no tokenizer.json; write it with '
            'transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder), or copy the folder again'
        )
    try:
        codec = Codec(base, date)
    except UserError:
        raise
    except Exception as error:
        # The libraries tokenizers and transformers raise exceptions of many types.
        reason = first_line(error)[:_MAX_REASON_CHARACTERS]
        raise UserError(
            f'{base}: its tokenizer cannot be used ({reason}); copy the folder again'
        ) from None
    if base != folder:
        tokenizer_rules.check_adapter(folder, base, codec.template.source)
    return codec


# Few, because each keeps its codec.
@functools.lru_cache(maxsize=8)
def end_ids(codec: Codec, stops: tuple[str, ...]) -> tuple[int, ...]:
    """Returns the ids whose text contains one of the stop strings: a turn ends with the first of them."""
    texts = [stop.encode() for stop in stops]
    ids = []
    for token, text in enumerate(codec.token_bytes):
        if any(stop in text for stop in texts):
            ids.append(token)
    return tuple(ids)


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
            # A rollout without tokens has no spans.
            if start < first_new or start == end:
                continue
            ids = context.tokens[start:end].tolist()
            source = SOURCES[context.source[start]]
            text = codec.decode(ids)
            yield {'source': source, 'text': text, 'tokens': ids}


# Field of generation_config.json with the ids that end a turn, in folders where `eos_token_id` also names the ends of
# calls, so that other programs stop there (run/policies.py).
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
    fields = fields_of(path)
    field = END_OF_TURN_FIELD if END_OF_TURN_FIELD in fields else _EOS
    ids = _ids(path, field, fields.get(field), vocabulary_size)
    path = folder / 'config.json'
    fields = fields_of(path)
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
