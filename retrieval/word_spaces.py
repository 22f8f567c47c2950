"""Recognises texts of languages that write no spaces between words, which an index of words cannot search."""

from __future__ import annotations

import logging
import re

import numpy as np

from .corpus import Corpus

# Thai and Lao, Burmese, Khmer, Japanese syllables, Chinese characters (also those of Japanese).
_WITHOUT_SPACES = re.compile(
    '[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff]'
)
# Passages that are judged, and characters of each: enough for a share, and read in a moment from any corpus.
_PASSAGES = 1_000
_CHARACTERS = 1_000
# Single names in their own script are no reason to warn.
_LEAST_SHARE = 0.02


def share_without_spaces(corpus: Corpus) -> float:
    """Returns the share of passages, of a sample, whose letters are mostly of such a language."""
    rows = np.unique(np.linspace(0, len(corpus) - 1, _PASSAGES).astype(np.int64))
    count = 0
    for row in rows:
        text = corpus.record(int(row)).contents[:_CHARACTERS]
        letters = sum(map(str.isalpha, text))
        # Vowel signs of Thai and its relatives are no letters.
        count += 2 * len(_WITHOUT_SPACES.findall(text)) > letters
    return count / len(rows)


def warn(corpus: Corpus, kind: str) -> None:
    """Logs a warning if an index of words is built over texts without spaces.

    Args:
      kind: name of the index or encoder in the warning.
    """
    share = share_without_spaces(corpus)
    if share < _LEAST_SHARE:
        return
    logging.warning(
        'warning: %.0f %% of the passages are in languages without spaces between words (Chinese, Japanese, Thai, …): '
        '%s compares whole words and finds almost none of them; build the index with --encoder and a BERT checkpoint '
        'of these languages',
        100 * share,
        kind,
    )
