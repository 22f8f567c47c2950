"""Facts of the miniature world and the sentences that state them: writing, reading and grading.

A fact is (entity, relation, value). A passage states one per sentence, with the entity's name in the first sentence and
a pronoun in the others. Readers here accept any order of sentences, and the name or a pronoun as subject.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import NamedTuple

from zeroplay_jax.objectives.answers import normalize_answer

JOBS = 'poet painter chemist judge sailor singer farmer pilot baker dancer'.split()
PRODUCTS = 'clocks ships paper glass candles shoes lamps bread carpets bells'.split()
METALS = 'gold silver copper iron bronze nickel'.split()
# Kinds of values that are common nouns, the same in every world.
CLOSED = {'job': JOBS, 'goods': PRODUCTS, 'metal': METALS}

# Kind → relation → (sentence, kind of the value). {s} is the name or, after the first sentence, a pronoun.
RELATIONS = {
    'person': {
        'birthplace': ('{s} was born in {v}.', 'city'),
        'teacher': ('{s} studied under {v}.', 'person'),
        'job': ('{s} worked as a {v}.', 'job'),
    },
    'city': {
        'country': ('{s} is a city in {v}.', 'country'),
        'river': ('{s} lies on the river {v}.', 'river'),
        'mayor': ('{s} is led by {v}.', 'person'),
    },
    'country': {
        'capital': ('{s} is ruled from {v}.', 'city'),
        'currency': ('{s} pays with the {v}.', 'currency'),
        'language': ('{s} speaks {v}.', 'language'),
    },
    'book': {
        'author': ('{s} was written by {v}.', 'person'),
        'publisher': ('{s} was printed by {v}.', 'company'),
    },
    'company': {
        'founder': ('{s} was founded by {v}.', 'person'),
        'headquarters': ('{s} has its offices in {v}.', 'city'),
        'product': ('{s} makes {v}.', 'goods'),
    },
    'river': {
        'source': ('{s} rises at {v}.', 'mountain'),
        'mouth': ('{s} flows into {v}.', 'lake'),
    },
    'currency': {
        'designer': ('{s} was drawn by {v}.', 'person'),
        'metal': ('{s} is struck in {v}.', 'metal'),
    },
}
RELATION_NAMES = tuple(itertools.chain.from_iterable(RELATIONS.values()))

# The beginning of every rubric of `rubrics_of`; the fact follows.
_RUBRIC_PREFIX = 'State that '
_PRONOUNS = frozenset(('he', 'she', 'it'))
# Ends of clauses. No name and no value of a world contains one of these.
_CLAUSE_END = re.compile(r'[.,;:!?\n]|\band\b')
# An open task: 'Describe Gumu.' or 'Describe the birthplace of the author of Gumu.'
_OPEN_TASK = re.compile(r'Describe (?P<chain>(?:the \w+ of )*)(?P<name>\w+)\.?')
_CHAIN_RELATION = re.compile(r'the (\w+) of ')


class Fact(NamedTuple):
    """`relation` of `entity` is `value`; in a chain, the value is the next entity."""

    entity: str
    relation: str
    value: str


def _clause_patterns() -> dict[str, re.Pattern[str]]:
    """Returns relation → pattern of a clause in normal form that states it, with groups 'subject' and 'value'."""
    patterns = {}
    for relations in RELATIONS.values():
        for relation, (sentence, _) in relations.items():
            predicate = normalize_answer(sentence.format(s='', v=''))
            # A clause after 'and' may have no subject: 'Lomi is a city in Tarva and is led by Puto'.
            patterns[relation] = re.compile(rf'(?:(?P<subject>.+) )?{predicate} (?P<value>\w+)')
    return patterns


_CLAUSES = _clause_patterns()


def _read_clause(clause: str) -> Fact | None:
    """Returns the fact of a clause, in normal form, with '' as entity without a subject; None if it states none."""
    normal_form = normalize_answer(clause)
    for relation, pattern in _CLAUSES.items():
        match = pattern.fullmatch(normal_form)
        if match is not None:
            return Fact(match['subject'] or '', relation, match['value'])
    return None


def facts_in(text: str, subject: str) -> list[Fact]:
    """Returns the facts that a text states, in the order of its clauses and in normal form (`normalize_answer`).

    A pronoun, or no subject, refers to the last subject named before it; without one, to the first one named in the
    text.

    Args:
      text: sentences in the forms of `RELATIONS`; all other clauses are ignored.
      subject: what a pronoun refers to if the text names no subject.
    """
    clauses = []
    for clause in _CLAUSE_END.split(text):
        fact = _read_clause(clause)
        if fact is not None:
            clauses.append(fact)
    current = normalize_answer(subject)
    for fact in clauses:
        if _is_name(fact.entity):
            current = fact.entity
            break
    facts = []
    for fact in clauses:
        if _is_name(fact.entity):
            current = fact.entity
        facts.append(fact._replace(entity=current))
    return facts


def _is_name(subject: str) -> bool:
    """Returns whether the subject of a clause is a name or a phrase, and not a pronoun or missing."""
    return bool(subject) and subject not in _PRONOUNS


def described_entity(task: str, passages: Iterable[tuple[str, str]]) -> str | None:
    """Returns the entity that an open task asks to describe, in normal form, following its chain through passages.

    Args:
      task: such as 'Describe the birthplace of the author of Gumu.'
      passages: (title, text) of the passages whose facts may be used.

    Returns:
      None if the passages do not state every step of the chain, or the task has another form.
    """
    match = _OPEN_TASK.fullmatch(task.strip())
    if match is None:
        return None
    values: dict[tuple[str, str], str] = {}
    for title, text in passages:
        for fact in facts_in(text, subject=title):
            values[fact.entity, fact.relation] = fact.value
    entity: str | None = normalize_answer(match['name'])
    # English names the last relation of a chain first.
    for relation in reversed(_CHAIN_RELATION.findall(match['chain'])):
        if entity is None:
            return None
        entity = values.get((entity, relation))
    return entity


def rubrics_of(text: str) -> list[dict[str, str]]:
    """Returns one rubric {'text', 'priority'} per fact of a passage, with the name of its entity in place of pronouns.

    Sentences that state no fact have no rubric.
    """
    rubrics = []
    name = ''
    for part in text.split('. '):
        subject, _, predicate = part.strip().rstrip('.').partition(' ')
        if subject.lower() in _PRONOUNS:
            subject = name
        sentence = f'{subject} {predicate}'
        if subject and _read_clause(sentence) is not None:
            name = subject
            rubrics.append({'text': f'{_RUBRIC_PREFIX}{sentence}.', 'priority': 'important'})
    return rubrics


def meets_rubric(answer: str, rubric: str, task: str = '') -> bool | None:
    """Returns whether an answer states the fact of a rubric of `rubrics_of`; None if the rubric names no fact.

    The order and the wording of the subject do not count: a name, a pronoun, or the description that the task uses. An
    answer that also gives another value for the same relation of the entity does not meet the rubric.

    Args:
      answer: the text to grade.
      rubric: the rubric's text.
      task: the open task, such as 'Describe the author of Gumu.'; '' for none.
    """
    fact = _read_clause(rubric.removeprefix(_RUBRIC_PREFIX).rstrip('.'))
    if fact is None or not _is_name(fact.entity):
        return None
    names = {fact.entity}
    description = normalize_answer(task.removeprefix('Describe '))
    # A description without 'of' is a name, perhaps of another entity.
    if ' of ' in description:
        names.add(description)
    values = set()
    for stated in facts_in(answer, subject=fact.entity):
        if stated.entity in names and stated.relation == fact.relation:
            values.add(stated.value)
    # Exactly this value: an answer that lists all candidates says nothing.
    return values == {fact.value}
