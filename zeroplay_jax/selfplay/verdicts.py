"""Verdicts in a judge's reply, read strictly: a reply that is not exactly one gives None, which the caller handles.

A reply may quote other texts, so a verdict must form a sentence of its own. Reasoning up to the last `</think>`, or the
mark of another family, is ignored, and a reply with unfinished reasoning has no verdict. `rubrics` takes well-formed
items of a list of criteria and counts what it repaired. Works on plain strings, without JAX.
"""

from __future__ import annotations

import collections
import re

from zeroplay_jax.objectives.answers import extract_last

# Words that are verdicts, with their meanings.
_CORRECT = {'correct': True, 'incorrect': False, 'wrong': False}
_YES = {'yes': True, 'no': False}
_SCORE = {'1': True, '0': False}
# A score at the end of a reply, behind a line break or the end of a sentence; 'Score:' and Markdown may surround it.
_LAST_SCORE = re.compile(
    r'(?:\A|\n|(?<=[.!]))[^\S\n]*(?:[-*`>#]++[^\S\n]*)?(?:(?:final[^\S\n]+)?score[^\S\n]*:[^\S\n]*)?[*`]*'
    r'<score>\s*([01])\s*</score>[*`.\s]*\Z',
    re.IGNORECASE,
)

# Marks of reasoning: of most families, of Magistral, and of gpt-oss where the server does not take it out.
_THOUGHTS_BEGIN = re.compile(r'<(?:think|thinking|reasoning)>|\[THINK\]|<\|channel\|>analysis')
_THOUGHTS_END = re.compile(
    r'</(?:think|thinking|reasoning)>|\[/THINK\]|<\|channel\|>final(?:<\|message\|>)?'
)
_DENIALS = frozenset(('no', 'not', 'false', 'never'))
_DENIAL_ENDINGS = ("n't", 'n\u2019t')
# Symbols that take an approval back, wherever they are written.
_CROSSES = frozenset('\u274c\u2717\u2718\u2716\u2715\u274e\U0001f6ab\u00ac\u2260')
# Those that a judge writes beside 'wrong'; a sign of negation would deny it.
_REFUSING = _CROSSES - frozenset('\u00ac\u2260')
_TICKS = frozenset('\u2705\u2713\u2714\u2611')
# A reply that is nothing but a verdict, in quotes, brackets or code marks, with a label or without.
_QUOTES = r'"\'`\u201c\u201d\u2018\u2019()\[\]{}'
_LABEL = r'(?:(?:final )?(?:verdict|answer|result|judge?ment)[\s:=*_-]{1,4})?'
_ALONE = re.compile(rf'{_LABEL}[\s*_#>|{_QUOTES}]*([a-z]+)[\s*_|{_QUOTES}.!]*')
_SENTENCE_END = re.compile(r'[.!\n\u3002]')
# A word, or a single symbol.
_TOKEN = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*|\S")
# Punctuation and Markdown that may surround a verdict. Quotation marks may not: a judge quotes the answer with them.
_MARKUP = frozenset('*_#:,-\u2013\u2014')
# Ticks and crosses are compared with the verdict afterwards; U+FE0F makes an emoji of the symbol before it.
_IGNORED = _MARKUP | _REFUSING | _TICKS | {'\ufe0f'}
# What a sentence with a verdict may be, besides the verdict: "Thus the model's answer is correct". The order counts:
# "Is this correct" is not a verdict.
_SUBJECT = (
    '(?:the|this|that|it|its|final|overall|model|models|answer|answers|response|prediction|verdict|result|judgement|'
    'judgment) '
)
_NOUN = '(?:answer|response|prediction|verdict|result|judgement|judgment)'
_CONCLUSION = '(?:therefore|thus|so|hence) '
_STATEMENT = f'(?:{_CONCLUSION})?(?:(?:{_SUBJECT})+(?:is (?:{_CONCLUSION})?)?)?(?:(?:a|the) )?{{verdict}}(?: {_NOUN})?'
# The tags of an item of a list of rubrics; the first group has the attributes, the second the stroke of a closing tag.
_RUBRIC_TAG = re.compile(r'<(?:rubric\b([^<>]*)|(/)rubric[^\S\n]*)>')
_PRIORITY = re.compile(
    r'(?<!\S)priority\s*=\s*(["\']?)(critical|important|bonus)\1(?!\S)', re.IGNORECASE
)
# Priority of an item that names none of the three: the one in the middle. Scores do not depend on it.
_UNKNOWN_PRIORITY = 'important'


def verdict(text: str) -> bool | None:
    """Returns True for Correct, False for Wrong or Incorrect, None for anything else, including both at once.

    A verdict is a whole word ("Incorrect" does not contain "correct") in a sentence of the form `_STATEMENT`:
    "**Correct**", "Verdict: wrong", "The answer is correct." Qualified ("partially correct", "Correct, but vague"),
    questioned ("Correct?", "Is this correct"), quoted and denied ones ("not wrong", "Correct. No, it is not.") give
    None.
    """
    parsed = _parse_verdict(text, _CORRECT)
    has_denial = any(
        token in _DENIALS or token.endswith(_DENIAL_ENDINGS) for token in _tokens(_reply(text))
    )
    # A denial in another sentence may take "correct" back ("Correct. No, it is not."). "Wrong" is not tested, because
    # a denial often explains it ("Wrong. It is not Paris.").
    if parsed and has_denial:
        return None
    return parsed


def yes_no(text: str) -> bool | None:
    """Returns True for Yes, False for No, in a sentence of its own as in `verdict`; None for anything else.

    SCOPE's own prompts of gates ask for scores, which are read as by `grade`.
    """
    parsed = _parse_verdict(text, _YES)
    return grade(text) if parsed is None else parsed


def grade(text: str) -> bool | None:
    """Returns True for a grader's `<score>1</score>`, False for `<score>0</score>`, on a line of its own at the end.

    None for anything else: a half, a range, another tag, text after the tag, a second tag.
    """
    reply = _reply(text)
    # With several scores it is unclear which one the grader means: it may quote one that the answer wrote.
    if reply.count('<score>') != 1 or reply.count('</score>') != 1:
        return None
    score = _LAST_SCORE.search(reply)
    if score is None:
        return None
    return _SCORE[score[1]]


def rubrics(
    text: str, minimum: int = 3, maximum: int = 5, words: int = 25
) -> tuple[list[dict[str, str]], collections.Counter[str]] | None:
    """Returns the items of the last closed `<rubrics>` block (SCOPE, figure 12), and what was repaired; or None.

    Items are `<rubric priority="critical|important|bonus">one sentence</rubric>`, returned as {'text', 'priority'}. A
    list is used without what is not well-formed in it, as the released code of SCOPE does: an item that is empty,
    repeated or contains another one, items behind the `maximum`-th, and text between items. None without `minimum`
    items.

    Args:
      text: the judge's reply.
      minimum: fewest items.
      maximum: most items; the first ones are used.
      words: about the most words that an item should have; longer ones are used and counted.

    Returns:
      The items, and kind of repair → number: 'malformed' and 'repeated' (left out), 'surplus' (behind `maximum`),
      'stray' (text between items), 'priority' (none of the three: taken as important), 'long' (used as it is).
    """
    block = extract_last(_reply(text), 'rubrics') or ''
    written, repairs = _written_rubrics(block)
    items: dict[str, dict[str, str]] = {}
    for attributes, content in written:
        item_words = content.split()
        item_text = ' '.join(item_words)
        if not item_words:
            repairs['malformed'] += 1
        elif item_text in items:
            repairs['repeated'] += 1
        elif len(items) == maximum:
            repairs['surplus'] += 1
        else:
            priority = _PRIORITY.search(attributes)
            repairs['priority'] += priority is None
            repairs['long'] += len(item_words) > words
            name = _UNKNOWN_PRIORITY if priority is None else priority[2].lower()
            items[item_text] = {'text': item_text, 'priority': name}
    if len(items) < minimum:
        return None
    # Without the kinds that did not occur.
    return list(items.values()), +repairs


def _written_rubrics(block: str) -> tuple[list[tuple[str, str]], collections.Counter[str]]:
    """Returns attributes and text of every closed item of a block; counts what else is in it ('malformed', 'stray')."""
    # One pass over the tags: a pattern of a whole item would read a reply of many opening tags again from each.
    written: list[tuple[str, str]] = []
    rest: collections.Counter[str] = collections.Counter()
    attributes = None
    position = 0
    for tag in _RUBRIC_TAG.finditer(block):
        text = block[position : tag.start()]
        is_closing = tag[2] is not None
        if is_closing and attributes is not None:
            written.append((attributes, text))
        elif is_closing or attributes is not None:
            rest['malformed'] += 1
        elif text.strip():
            rest['stray'] += 1
        attributes = None if is_closing else tag[1]
        position = tag.end()
    if attributes is not None:
        rest['malformed'] += 1
    elif block[position:].strip():
        rest['stray'] += 1
    return written, rest


def _reply(text: str) -> str:
    """Returns the reply after the reasoning; '' if the reasoning never ended."""
    reply = _THOUGHTS_END.split(text)[-1]
    if _THOUGHTS_BEGIN.search(reply):
        return ''
    return reply


def _tokens(text: str) -> list[str]:
    """Returns the words of a text in lower case, and its symbols."""
    return _TOKEN.findall(text.lower())


def _parse_verdict(text: str, meanings: dict[str, bool]) -> bool | None:
    """Returns the meaning that all sentences with a verdict word share.

    None if there is no such sentence, if they differ, if one of them has another form than `_STATEMENT`, and if a reply
    approves and has a cross, or refuses and has a tick.

    Args:
      text: the judge's reply, with its reasoning.
      meanings: verdict word in lower case → its meaning.
    """
    reply = _reply(text)
    alone = _ALONE.fullmatch(reply.strip().lower())
    if alone is not None and alone[1] in meanings:
        return meanings[alone[1]]
    statement = re.compile(_STATEMENT.format(verdict=f'(?P<verdict>{"|".join(meanings)})'))
    votes = set()
    for sentence in _SENTENCE_END.split(reply):
        tokens = [re.sub("['\u2019]s$", '', token) for token in _tokens(sentence)]
        if meanings.keys().isdisjoint(tokens):
            continue
        # A symbol that is not markup stays, and matches nothing.
        words = [token for token in tokens if token not in _IGNORED]
        stated = statement.fullmatch(' '.join(words))
        if stated is None:
            return None
        votes.add(meanings[stated['verdict']])
    if len(votes) != 1:
        return None
    meaning = votes.pop()
    if not (_CROSSES if meaning else _TICKS).isdisjoint(reply):
        return None
    return meaning
