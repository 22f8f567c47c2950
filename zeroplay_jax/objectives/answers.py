"""Extracts answers from a reply and compares them with the accepted ones. Works on plain strings, without JAX."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

# English articles and ASCII punctuation only, as in the SQuAD evaluation script.
_ARTICLES = re.compile(r'\b(a|an|the)\b')
_DELETE_PUNCTUATION = str.maketrans('', '', string.punctuation)


def normalize_answer(text: str) -> str:
    """Returns the normal form in which answers are compared (SQuAD; Search-R1, Dr. Zero).

    Lower case; ASCII punctuation deleted, not replaced by a space, so that a hyphenated word becomes one word; the
    whole words a, an, the removed; white space collapsed. Other punctuation and diacritics are kept. Characters are
    composed (NFC), which the published scorers leave out: many tokenizers compose what a policy writes, and a letter
    with its accent is the same whether a file has it as one character or two.
    """
    text = unicodedata.normalize('NFC', text)
    without_punctuation = text.lower().translate(_DELETE_PUNCTUATION)
    without_articles = _ARTICLES.sub(' ', without_punctuation)
    return ' '.join(without_articles.split())


def exact_match(prediction: str | None, golds: Sequence[str] | str) -> bool:
    """Returns whether a prediction equals one of the accepted answers in normal form.

    A missing (None) or blank prediction never matches. A text that consists of articles and punctuation ("A", "?") has
    an empty normal form and is compared as written; otherwise all such answers would be equal. This is stricter than
    the published scorers; composed characters (`normalize_answer`) are the only other difference from them.

    Args:
      prediction: the extracted answer.
      golds: accepted answers; a single string is one answer.
    """
    predicted = _comparable(prediction or '')
    if not predicted:
        return False
    return any(predicted == _comparable(gold) for gold in _as_list(golds))


def sub_exact_match(prediction: str | None, golds: Sequence[str] | str) -> bool:
    """Returns whether an accepted answer is a substring of the prediction, in normal form (subEM; DSPO's reward).

    Substrings ignore word boundaries: "2" occurs in "1942". Longer predictions match more easily, so their length is
    worth logging. Answers with an empty normal form match only as in `exact_match`.

    Args:
      prediction: the extracted answer; None and blank never match.
      golds: accepted answers; a single string is one answer.
    """
    predicted = normalize_answer(prediction or '')
    for gold in _as_list(golds):
        normal_gold = normalize_answer(gold)
        # The empty string is a substring of any text.
        if normal_gold and normal_gold in predicted:
            return True
    return exact_match(prediction, golds)


def f1(prediction: str | None, golds: Sequence[str] | str) -> float:
    """Returns the best word F1 of the prediction against an accepted answer, in normal form (SQuAD).

    Words count with multiplicity. None and blank predictions score 0.

    Args:
      prediction: the extracted answer.
      golds: accepted answers; a single string is one answer.

    Returns:
      A number in [0, 1].
    """
    predicted_words = Counter(_comparable(prediction or '').split())
    best = 0.0
    for gold in _as_list(golds):
        gold_words = Counter(_comparable(gold).split())
        # F1 is 2·common/(predicted + gold): the harmonic mean of precision and recall without their 0/0.
        num_common = (predicted_words & gold_words).total()
        num_words = predicted_words.total() + gold_words.total()
        best = max(best, 2 * num_common / max(1, num_words))
    return best


def majority_answer(predictions: Sequence[str | None]) -> str | None:
    """Returns the most frequent answer, written as where it first occurs (the label of SQLM and R-Zero).

    Answers are counted in normal form, missing (None) and blank ones not at all. Of equally frequent answers the one
    that occurs first is returned.

    Args:
      predictions: the extracted answers to one question.

    Returns:
      The answer, or None if no rollout gave one.
    """
    spellings: dict[str, str] = {}
    votes: Counter[str] = Counter()
    for prediction in predictions:
        spelling = prediction or ''
        normal_form = _comparable(spelling)
        if not normal_form:
            continue
        spellings.setdefault(normal_form, spelling)
        votes[normal_form] += 1
    if not votes:
        return None
    # `most_common` keeps the order of first occurrence among equal counts.
    ((winner, _),) = votes.most_common(1)
    return spellings[winner]


def extract_last(text: str, tag: str) -> str | None:
    """Returns the content of the last closed `<tag>…</tag>`, stripped; None if there is none.

    An opening tag pairs with the next closing tag, as in the non-greedy search of the published scorers. A tag that is
    never closed is ignored.
    """
    # Each part but the last ends at a closing tag. An earlier part without an opening tag had a stray closing tag.
    parts_before_closing_tags = text.split(f'</{tag}>')[:-1]
    for part in reversed(parts_before_closing_tags):
        _, opening_tag, content = part.partition(f'<{tag}>')
        if opening_tag:
            return content.strip()
    return None


def _as_list(golds: Sequence[str] | str) -> Sequence[str]:
    # A string is a sequence too: without this test its characters would be the answers.
    if isinstance(golds, str):
        return [golds]
    return golds


def _comparable(text: str) -> str:
    """Returns the normal form or, if that is empty, the text itself in lower case."""
    return normalize_answer(text) or unicodedata.normalize('NFC', text).strip().lower()
