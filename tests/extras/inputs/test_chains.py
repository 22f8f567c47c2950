"""Questions of two hops: the name is in neither half, and the two passages give name and answer."""

import pathlib

from refused_calls import check_table

from tools.checkpoints.english_texts import Links
from zeroplay_jax.extras.inputs import chains

PASSAGES = [
    ('Gumu', 'In the year 1950 the town sold the old mill to Lomi Kelpar, a farmer.'),
    ('Kelpar', 'Lomi Kelpar was born in Viru in the winter of 1912, and died there.'),
    ('Bado', 'The bridge of the town, built in 1870, was designed by the engineer Fenn.'),
    ('Fenn (engineer)', 'Fenn studied the theory of bridges in Lutra and never left it again.'),
    ('Other', 'In the year 1950 somebody walked to the old mill on the river near the town.'),
]


def built(passages):
    """Per passage that begins chains: their questions, answers and second passages."""
    lines = []
    for index, found in Links(passages).chains.items():
        for chain, second in found:
            lines.append(f'{index}→{second}: {chain.question} {chain.second.answer}')
    return '\n'.join(lines) or 'nothing'


def test_passages_sentences_and_clauses():
    shown = lambda cases: [(case.question, case.answer) for case in cases]
    names = {
        'built': built,
        'described': lambda sentence: shown(chains.described(sentence)),
        'clauses': lambda sentence, subject: shown(chains.clauses(sentence, subject)),
        'PASSAGES': PASSAGES,
        'MAX_MENTIONS': chains.MAX_MENTIONS,
    }
    check_table(pathlib.Path(__file__).parent / 'chains.txt', names)
