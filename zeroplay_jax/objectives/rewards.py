"""Rewards: strings and counts in, numbers out. No JAX, no tokens, no state."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

_ARTICLES = re.compile(r'\b(a|an|the)\b')
_PUNCTUATION = str.maketrans('', '', string.punctuation)


def normalize_answer(text: str) -> str:
    """The normal form in which answers are compared (SQuAD; Search-R1, Dr. Zero).

    Lower case; ASCII punctuation deleted, not spaced, so that a hyphen fuses its words; whole words a, an,
    the dropped; white space squeezed. Other punctuation and diacritics stay.
    """
    return ' '.join(_ARTICLES.sub(' ', text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str | None, golds: Sequence[str] | str) -> bool:
    """Whether a prediction equals one of the accepted answers in normal form.

    None (no answer could be extracted) and blank predictions never match. A text that is all articles and
    punctuation ("A", "?") has an empty normal form and is compared as it stands, or every such answer would
    equal every other; this is stricter than the published scorers, which differ nowhere else.

    Args:
      prediction: the extracted answer.
      golds: accepted answers; a single string is one answer.
    """
    wanted = _comparable(prediction or '')
    golds = [golds] if isinstance(golds, str) else golds
    return bool(wanted) and any(wanted == _comparable(gold) for gold in golds)


def _comparable(text: str) -> str:
    return normalize_answer(text) or text.strip().lower()


def extract_last(text: str, tag: str) -> str | None:
    """Content of the last *closed* `<tag>…</tag>`, stripped; None if there is none.

    An opening tag pairs with the next closing tag, as in the non-greedy search of the published scorers; a
    tag left open at the end is ignored.
    """
    closed = text.split(f'</{tag}>')[:-1]
    for part in reversed(closed):
        _, opened, content = part.partition(f'<{tag}>')
        if opened:
            return content.strip()
    return None


def difficulty(solved: int, n: int, kind: str = 'linear') -> float:
    """What a question is worth to its proposer when k of n solver rollouts answered it; 0 at k = 0 and k = n.

    linear: (n − k)/(n − 1) inside, best at k = 1 (Dr. Zero eq. 4). parabolic: 4·p·(1 − p) with p = k/n, best
    at one half (Dr. Zero's ablation, table 7).

    Raises:
      ValueError: n below 2, k outside 0 … n, or an unknown kind.
    """
    if n < 2 or not 0 <= solved <= n:
        raise ValueError(f'difficulty: {solved} of {n} solved; needs n ≥ 2 rollouts and 0 ≤ solved ≤ n')
    if kind == 'parabolic':
        return 4.0 * solved * (n - solved) / n**2
    if kind != 'linear':
        raise ValueError(f"difficulty: kind is {kind!r}; choose 'linear' or 'parabolic'")
    return (n - solved) / (n - 1) if 0 < solved < n else 0.0


def drzero_format(
    turns: Sequence[str],
    *,
    calls: int,
    responses: int,
    hops: int,
    question: str | None,
    answer: str | None,
    source: str,
    retrieved: str = '',
) -> dict[str, float]:
    """Dr. Zero's format score of a proposal, as its code computes it (r_f of eq. 4 is half of `raw`).

    Args:
      turns: text of each assistant turn.
      calls: well-formed tool calls.   responses: tool responses received, error texts included.
      hops: the hop count that was asked for.
      question, answer: what was extracted; None or blank: nothing.
      source: the document the proposal starts from.   retrieved: text of all tool responses.

    Returns parts, each in [0, 1]:
      think: share of turns that begin with a closed `<think>` block.
      tool: min((1 + calls)/hops, 1) if calls and responses agree and there are any; else 1 for one hop and 0
        for more.
      answer: 1 up to five words, ½ up to ten, else 0, given that it is yes or no or occurs in the source or,
        where calls and responses agree, in the retrieved text. All in normal form.
      raw: (1 + think + tool + answer)/4, or 0 when question or answer is missing or the question contains
        the answer.

    Raises:
      ValueError: hops below 1 or a negative count.
    """
    if hops < 1 or calls < 0 or responses < 0:
        raise ValueError(f'drzero_format: needs hops ≥ 1 and counts ≥ 0, got {hops}, {calls}, {responses}')
    question, answer = (question or '').strip(), (answer or '').strip()
    think = sum(_begins_with_thought(text) for text in turns) / max(1, len(turns))

    searched = calls == responses > 0
    if searched:
        tool = min((1 + calls) / hops, 1.0)
    else:
        tool = 1.0 if hops == 1 else 0.0

    short = normalize_answer(answer)
    seen = normalize_answer(f'{source}\n\n{retrieved}' if searched else source)
    words = len(short.split())
    grounded = words > 0 and (short in ('yes', 'no') or short in seen)
    brevity = (1.0 if words <= 5 else 0.5 if words <= 10 else 0.0) if grounded else 0.0

    # An answer with an empty normal form lies in every question and so scores 0, like one given away.
    sound = bool(question and answer) and short not in normalize_answer(question)
    raw = (1.0 + think + tool + brevity) / 4 if sound else 0.0
    return {'think': think, 'tool': tool, 'answer': brevity, 'raw': raw}


def _begins_with_thought(text: str) -> bool:
    return text.lstrip().startswith('<think>') and '</think>' in text
