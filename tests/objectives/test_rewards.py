"""`rewards.txt` says what single answers, proposals and counts are worth."""

import pathlib

from pytest import approx
from refused_calls import check_values

from zeroplay_jax.objectives import answers, format_scores, rewards
from zeroplay_jax.objectives.answers import extract_last
from zeroplay_jax.objectives.format_scores import (
    drzero_format,
    drzero_separate_format,
    scope_challenger_format,
    scope_solver_format,
    ssp_gate,
)

PROPOSAL = dict(
    turns=['<think>a</think><search>Gumu</search>', '<think>b</think><question>…'],
    calls=1,
    responses=1,
    hops=2,
    question='What is the birthplace of the author of Gumu?',
    answer='Lomi',
    source='Gumu was written by Peto.',
    retrieved='Peto was born in Lomi.',
)
THINKS = '<think>a</think><search>b</search>'
QUESTION = 'Which town is the birthplace of the author of the old chronicle named Gumu?'
CODE = dict(chars=(10, 1000), words=10, searches=2, distinct=True, whole_words=False)


# Letter → tag of an element of a printed rollout; w: words outside tags.
TAGS = dict(T='think', S='search', C='tool_call', Q='question', A='answer', E='original_evidence')


def turns(structure):
    """The turns of a rollout that a paper prints, such as 'T S / T A', with words of our own."""
    texts = []
    for letters in structure.split('/'):
        tags = [TAGS.get(letter) for letter in letters.split()]
        texts.append('\n'.join(f'<{tag}> words </{tag}>' if tag else 'words' for tag in tags))
    return texts


def proposer(structure, hops):
    """The parts of Dr. Zero's form, and their mean, of a printed proposal whose searches were answered."""
    written = turns(structure)
    calls = structure.count('C')
    texts = {tag: extract_last(written[-1], tag) for tag in ('question', 'answer')}
    parts = drzero_separate_format(written, calls=calls, responses=calls, hops=hops, **texts)
    return list(parts.values())


def solver(structure):
    """The parts of SCOPE's form of a printed solution."""
    written = turns(structure)
    answer = extract_last(written[-1], 'answer')
    parts = scope_solver_format(written, searches=structure.count('S'), answer=answer)
    return [parts[name] for name in ('think', 'tool', 'answer')]


def score(**changes):
    return drzero_format(**(PROPOSAL | changes))


def challenger(turns=(THINKS,), **changes):
    options = dict(searches=1, malformed=0, expected=1, task='t')
    return scope_challenger_format(list(turns), **(options | changes))


def thinking(turns, code):
    """Shares of a challenger and of a solver that get nothing else."""
    proposed = challenger(turns, searches=0, task=None, code=code)
    solved = scope_solver_format(turns, searches=0, answer=None, code=code)
    for part in (proposed, solved):
        assert part['raw'] == approx(part['think'] / 3)
    return proposed['think'], solved['think']


def gate(**changes):
    proposal = dict(question=QUESTION, answers=['Lomi'], queries=['a', 'b']) | changes
    return ssp_gate(*proposal.values()), ssp_gate(*proposal.values(), **CODE)


def test_rewards_are_those_of_the_table():
    names = vars(answers) | vars(format_scores) | vars(rewards) | globals()
    check_values(pathlib.Path(__file__).with_name('rewards.txt'), names)
