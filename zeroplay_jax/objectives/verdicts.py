"""Parses a judge's reply strictly: a reply that is not exactly one verdict gives None, which the caller handles.

A reply may quote other texts, so a verdict must form a sentence of its own. Reasoning up to the last `</think>` is
ignored, and a reply with unfinished reasoning has no verdict. `rubrics` parses a list of criteria in the same way.
Works on plain strings, without JAX.
"""

from __future__ import annotations

import re

from zeroplay_jax.objectives.answers import extract_last

# Words that are verdicts, with their meanings.
_CORRECT = {'correct': True, 'incorrect': False, 'wrong': False}
_YES = {'yes': True, 'no': False}
_SCORE = {'1': True, '0': False}

# Words that may share a sentence with a verdict without changing it: "The model's answer is correct".
_NEUTRAL_WORDS = frozenset(
    'the a this that it is its final overall answer answers model models response prediction verdict result '
    'judgement judgment therefore thus so hence'.split()
)
_DENIALS = frozenset(('no', 'not', 'false', 'never'))
_DENIAL_ENDINGS = ("n't", 'n\u2019t')

_SENTENCE_END = re.compile(r'[.!\n\u3002]')
# A question mark counts as a word, and not a neutral one: "Correct?" is not a verdict.
_WORD = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*|\?")
_RUBRIC = re.compile(
    r'<rubric\s+priority\s*=\s*(["\']?)(critical|important|bonus)\1\s*>([^<>]*)</rubric>'
)


def verdict(text: str) -> bool | None:
    """Returns True for Correct, False for Wrong or Incorrect, None for anything else, including both at once.

    A verdict is a whole word ("Incorrect" does not contain "correct") in a sentence without any other statement:
    "**Correct**", "Verdict: wrong", "The answer is correct." Qualified ("partially correct", "Correct, but vague"),
    questioned ("Correct?") and denied ones ("not wrong", "Correct. No, it is not.") give None.
    """
    parsed = _parse_verdict(text, _CORRECT)
    has_denial = any(
        word in _DENIALS or word.endswith(_DENIAL_ENDINGS) for word in _words(_reply(text))
    )
    # A denial in another sentence may take "correct" back ("Correct. No, it is not."). "Wrong" is not tested, because
    # a denial often explains it ("Wrong. It is not Paris.").
    if parsed and has_denial:
        return None
    return parsed


def yes_no(text: str) -> bool | None:
    """Returns True for Yes, False for No, in a sentence of its own as in `verdict`; None for anything else."""
    return _parse_verdict(text, _YES)


def grade(text: str) -> bool | None:
    """Returns True for a grader's `<score>1</score>`, False for `<score>0</score>`; the last closed tag counts.

    None where there is no such tag or its content is anything else: a half, a range, another tag.
    """
    # A grader may weigh several scores before it decides: the last one is its decision.
    score = extract_last(_reply(text), 'score')
    return _SCORE.get(score or '')


def rubrics(
    text: str, minimum: int = 3, maximum: int = 5, words: int = 25
) -> list[dict[str, str]] | None:
    """Returns the items of the last closed `<rubrics>` block (SCOPE, figure 12): [{'text', 'priority'}], or None.

    The block may hold only items `<rubric priority="critical|important|bonus">one sentence</rubric>` and white space;
    quotes may be missing. One fault rejects the whole list: an item that is empty, too long, repeated, of another
    priority or with an angle bracket in its text, and too few or too many items.

    Args:
      text: the judge's reply.
      minimum: fewest items.
      maximum: most items.
      words: most words of an item.
    """
    block = extract_last(_reply(text), 'rubrics') or ''
    # What remains after all well-formed items are removed is a malformed item or other text.
    remainder = _RUBRIC.sub('', block).strip()
    if remainder:
        return None

    items = []
    for _, priority, content in _RUBRIC.findall(block):
        item_words = content.split()
        # A faulty list is rejected completely, because leaving out single items would change what the score measures.
        if not 1 <= len(item_words) <= words:
            return None
        items.append({'text': ' '.join(item_words), 'priority': priority})

    distinct_texts = {item['text'] for item in items}
    if len(distinct_texts) < len(items):
        return None
    if not minimum <= len(items) <= maximum:
        return None
    return items


def _reply(text: str) -> str:
    """Returns the reply after the reasoning; '' if the reasoning never ended."""
    _, _, reply = text.rpartition('</think>')
    if '<think>' in reply:
        return ''
    return reply


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.lower()))


def _without_possessive(word: str) -> str:
    return word.removesuffix("'s").removesuffix('\u2019s')


def _parse_verdict(text: str, meanings: dict[str, bool]) -> bool | None:
    """Returns the meaning that all sentences with a verdict word share.

    None if there is no such sentence, if they differ, or if one of them contains words that are not neutral.

    Args:
      text: the judge's reply, with its reasoning.
      meanings: verdict word in lower case → its meaning.
    """
    votes = set()
    for sentence in _SENTENCE_END.split(_reply(text)):
        sentence_words = {_without_possessive(word) for word in _words(sentence)}
        verdict_words = sentence_words & meanings.keys()
        if verdict_words and not sentence_words <= _NEUTRAL_WORDS | verdict_words:
            return None
        votes |= {meanings[word] for word in verdict_words}
    if len(votes) != 1:
        return None
    return votes.pop()
