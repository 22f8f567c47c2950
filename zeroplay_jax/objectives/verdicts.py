"""What a judge said, read strictly: a reply that is not plainly one thing is None, and what None means is the caller's.

Replies may quote foreign text, so a verdict is not searched for in them: it must stand by itself. Reasoning up to the
last `</think>` is left out; a reply whose reasoning never closed says nothing. No JAX, no tokens, no state.
"""

from __future__ import annotations

import re

from zeroplay_jax.objectives.rewards import extract_last

_CORRECT = {'correct': True, 'incorrect': False, 'wrong': False}
_YES = {'yes': True, 'no': False}
_SCORE = {'1': True, '0': False}

# What may stand in one sentence with a verdict without changing it: "The model's answer is correct".
_FILLER = frozenset(
    'the a this that it is its final overall answer answers model models response prediction verdict result '
    'judgement judgment therefore thus so hence'.split()
)
_DENIALS = frozenset(('no', 'not', 'false', 'never'))

_SENTENCE_END = re.compile(r'[.!\n\u3002]')
# A question mark counts as a word, so that a verdict that is only asked for is not taken as given.
_WORD = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*|\?")
_RUBRIC = re.compile(
    r'<rubric\s+priority\s*=\s*(["\']?)(critical|important|bonus)\1\s*>([^<>]*)</rubric>'
)


def verdict(text: str) -> bool | None:
    """Correct (True), Wrong or Incorrect (False); None for anything else, both at once included.

    A verdict is a whole word, so "Incorrect" is not correct, in a sentence that says nothing else: "**Correct**",
    "Verdict: wrong", "The answer is correct." Qualified ("partially correct", "Correct, but vague"), asked
    ("Correct?") and denied ones ("not wrong", "Correct. No, it is not.") are None.
    """
    given = _vote(text, _CORRECT)
    denied = any(
        word in _DENIALS or word.endswith(("n't", 'n\u2019t')) for word in _words(_reply(text))
    )
    return None if given and denied else given


def yes_no(text: str) -> bool | None:
    """Yes (True) or No (False), in a sentence that says nothing else, as in `verdict`; None for anything else."""
    return _vote(text, _YES)


def grade(text: str) -> bool | None:
    """A grader's `<score>1</score>` (True) or `<score>0</score>` (False); the last closed one counts.

    None where there is none or it holds anything else: a half, a range, another tag.
    """
    return _SCORE.get(extract_last(_reply(text), 'score') or '')


def rubrics(
    text: str, minimum: int = 3, maximum: int = 5, words: int = 25
) -> list[dict[str, str]] | None:
    """The items of the last closed `<rubrics>` block (SCOPE, figure 12): [{'text', 'priority'}], or None.

    Between its tags nothing but `<rubric priority="critical|important|bonus">one sentence</rubric>` may stand, white
    space aside; quotes may be missing. One fault makes the whole list None: an item that is empty, too long, said
    twice, of another priority or with an angle bracket in its text, and too few or too many items.

    Args:
      text: the judge's reply.
      minimum, maximum: how many items there may be.   words: longest item.
    """
    block = extract_last(_reply(text), 'rubrics') or ''
    items = [
        {'text': ' '.join(said.split()), 'priority': kind}
        for _, kind, said in _RUBRIC.findall(block)
    ]
    if _RUBRIC.sub('', block).strip() or not minimum <= len(items) <= maximum:
        return None
    if len({item['text'] for item in items}) < len(items):
        return None
    return items if all(1 <= len(item['text'].split()) <= words for item in items) else None


def _reply(text: str) -> str:
    """What is said after the reasoning; nothing if that never closed."""
    reply = text.rpartition('</think>')[2]
    return '' if '<think>' in reply else reply


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.lower()))


def _vote(text: str, meanings: dict[str, bool]) -> bool | None:
    votes = set()
    for sentence in _SENTENCE_END.split(_reply(text)):
        words = {word.removesuffix("'s").removesuffix('\u2019s') for word in _words(sentence)}
        said = words & meanings.keys()
        if said and not words <= _FILLER | said:
            return None
        votes |= {meanings[word] for word in said}
    return votes.pop() if len(votes) == 1 else None
