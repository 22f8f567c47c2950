"""Text ⇄ ids, so that what was sampled is never tokenised again and foreign text never becomes a control token.

A token of the added vocabulary (`<|im_end|>`, `<search>`, …) can only come from the policy itself or from text
that this code base wrote. Everything else – a retrieved page, a question that a model made up – is `Untrusted`
and encoded by a second tokenizer whose added vocabulary is empty.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tokenizers
import transformers

from zeroplay_jax.types import PROMPT, Trajectory

SOURCES = ('prompt', 'policy', 'env')  # by the number that a trajectory's `source` has
Message = dict[str, Any]  # {'role': str, 'content': str or a list of str and Untrusted}


class Untrusted(str):
    """Text from a model or a page: plain characters, whatever it looks like."""


def _byte_alphabet() -> dict[str, int]:
    """Character → byte of the byte-level alphabet that GPT-2 introduced."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in printable}
    hidden = [b for b in range(256) if b not in printable]
    return table | {chr(256 + i): b for i, b in enumerate(hidden)}


class Codec:
    """Tokenizer and chat template of one checkpoint folder.

    Attributes:
      token_bytes: per id the bytes it stands for (b'' for ids without a token).
      eos_ids: ids that end an assistant turn.
      added_ids: ids of the added vocabulary.
    """

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        # tokenizer.json as it stands. AutoTokenizer would load PyTorch, where there is one.
        self._tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(str(self.folder))
        backend = self._tokenizer.backend_tokenizer
        spec = json.loads(backend.to_str())
        added = {t['content']: t['id'] for t in spec['added_tokens']}
        self._added = added
        self.added_ids = frozenset(added.values())
        # Without its added vocabulary, and with those strings out of the model's own too: some models map a
        # whole pre-token that stands in the vocabulary directly to its id.
        spec |= dict(added_tokens=[], post_processor=None, truncation=None, padding=None)
        vocab = spec['model']['vocab']
        spec['model']['vocab'] = {k: v for k, v in vocab.items() if k not in added}
        self._plain = tokenizers.Tokenizer.from_str(json.dumps(spec))
        self._split = re.compile(
            '|'.join(re.escape(t) for t in sorted(added, key=len, reverse=True)) or r'(?!)'
        )
        # A model may know more ids than its tokenizer has tokens; they read as nothing.
        size = json.loads((self.folder / 'config.json').read_text())['vocab_size']
        self.token_bytes = self._bytes(size, vocab, added)
        self.eos_ids = self._eos()

    def _bytes(self, size, vocab, added) -> list[bytes]:
        table, out = (
            _byte_alphabet(),
            [b''] * (max([size - 1, *vocab.values(), *added.values()]) + 1),
        )
        for token, i in vocab.items():
            if token not in added:
                try:
                    out[i] = bytes(table[c] for c in token)
                except KeyError:
                    raise ValueError(
                        f'{self.folder}: token {token!r} is not byte-level; this tokenizer is not supported'
                    ) from None
        for token, i in added.items():
            out[i] = token.encode()
        return out

    def _eos(self) -> tuple[int, ...]:
        path = self.folder / 'generation_config.json'
        ids = json.loads(path.read_text()).get('eos_token_id') if path.exists() else None
        ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
        own = self._tokenizer.eos_token_id
        return tuple(sorted({*ids, *([] if own is None else [own])}))

    def encode(self, text: str) -> list[int]:
        """Ids of text that this code base wrote: added tokens are honoured."""
        return self._encode([text])

    def encode_plain(self, text: str) -> list[int]:
        """Ids of foreign text: never an id of the added vocabulary."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def _encode(self, spans: Iterable[str]) -> list[int]:
        """Mixed text. Between two trusted added tokens, trusted and foreign text is encoded as one piece, as the
        tokenizer itself would, so a prompt without tricks has exactly the ids of `apply_chat_template`."""
        ids: list[int] = []
        run: list[str] = []
        for span in spans:
            if isinstance(span, Untrusted):
                run.append(span)
                continue
            at = 0
            for found in self._split.finditer(span):
                run.append(span[at : found.start()])
                ids += self.encode_plain(''.join(run))
                ids.append(self._added[found.group()])
                run, at = [], found.end()
            run.append(span[at:])
        return ids + self.encode_plain(''.join(run))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, added tokens included; bytes that are no UTF-8 become U+FFFD."""
        return b''.join(self.token_bytes[int(i)] for i in ids).decode(errors='replace')

    def _template(self, messages: Sequence[Message], generate: bool) -> list[str]:
        """Chat text as spans, foreign text kept apart from what the template wrote."""
        foreign: list[Untrusted] = []

        def mark(content) -> str:
            parts = [content] if isinstance(content, str) else content
            out = []
            for part in parts:
                if isinstance(part, Untrusted):
                    out.append(f'\ue000{len(foreign)}\ue001')
                    foreign.append(part)
                else:
                    out.append(part)
            return ''.join(out)

        marked = [{**m, 'content': mark(m['content'])} for m in messages]
        text = self._tokenizer.apply_chat_template(
            marked, tokenize=False, add_generation_prompt=generate
        )
        pieces = re.split('\ue000(\\d+)\ue001', text)
        return [foreign[int(p)] if i % 2 else p for i, p in enumerate(pieces)]

    def render(self, messages: Sequence[Message]) -> np.ndarray:
        """Prompt ids, int32 [P], of a chat whose next word is the assistant's."""
        return np.asarray(self._encode(self._template(messages, True)), np.int32)

    def suffix(self, message: Message) -> np.ndarray:
        """Ids, int32 [n], that follow an assistant turn cut before its end token: the template's glue, `message`
        and the next assistant header. Rendered as a difference, so earlier tokens are never touched."""
        turn = Untrusted('\ue002')
        spans = self._template(
            [{'role': 'user', 'content': 'x'}, {'role': 'assistant', 'content': [turn]}, message],
            True,
        )
        after = next(i for i, s in enumerate(spans) if s is turn) + 1
        return np.asarray(self._encode(spans[after:]), np.int32)


class StopMatcher:
    """Finds where the text of a growing turn first contains one of the stop strings.

    A stop string may end inside a token: the token stays whole, only the text is cut.
    """

    def __init__(self, token_bytes: Sequence[bytes], stops: Sequence[str]):
        self._bytes, self._stops = token_bytes, [s.encode() for s in stops]
        self._longest = max((len(s) for s in self._stops), default=1)
        self._text, self._ends = b'', []

    def push(self, ids: Sequence[int]) -> tuple[int, str] | None:
        """Adds ids; on a hit returns (tokens of the turn to keep, text cut after the stop string)."""
        for i in ids:
            start = max(len(self._text) - self._longest + 1, 0)
            self._text += self._bytes[int(i)]
            self._ends.append(len(self._text))
            ends = [at + len(s) for s in self._stops if (at := self._text.find(s, start)) >= 0]
            if ends:
                return len(self._ends), self._text[: min(ends)].decode(errors='replace')
        return None

    @property
    def text(self) -> str:
        """All text so far."""
        return self._text.decode(errors='replace')


def segments(codec: Codec, trajectory: Trajectory) -> Iterator[dict[str, Any]]:
    """A rollout's stretches of one author: {'source': of SOURCES, 'text', 'tokens'}; what an earlier context of it has
    shown is left out."""
    for part in trajectory.segments:
        cuts = [0, *(np.flatnonzero(np.diff(part.source)) + 1), len(part.tokens)]
        begin = (
            0 if part is trajectory.segments[0] else np.flatnonzero(part.source == PROMPT)[-1] + 1
        )
        for a, b in zip(cuts, cuts[1:]):
            if a >= begin:
                ids = part.tokens[a:b].tolist()
                yield {'source': SOURCES[part.source[a]], 'text': codec.decode(ids), 'tokens': ids}
