"""Questions of two hops: the name is in neither half, and the two passages give name and answer."""

from example_texts import example_passages

from tools.checkpoints import base_english
from tools.checkpoints.english_texts import Links
from zeroplay_jax.data import chains, cloze
from zeroplay_jax.data.chains import BRIDGE

PASSAGES = [
    ('Gumu', 'In the year 1950 the town sold the old mill to Lomi Kelpar, a farmer.'),
    ('Kelpar', 'Lomi Kelpar was born in Viru in the winter of 1912, and died there.'),
    ('Bado', 'The bridge of the town, built in 1870, was designed by the engineer Fenn.'),
    ('Fenn (engineer)', 'Fenn studied the theory of bridges in Lutra and never left it again.'),
    ('Other', 'In the year 1950 somebody walked to the old mill on the river near the town.'),
]


def built(passages=PASSAGES):
    parts = lambda each: (each.chain.question, each.chain.second.answer, each.second_passage)
    return {index: list(map(parts, chains)) for index, chains in Links(passages).chains.items()}


def test_two_passages_are_joined_by_the_name_that_both_mention():
    found = built()
    assert set(found) == {0, 2}
    sale = 'In the year 1950 the town sold the old mill to #1, a farmer.'
    assert (f'{sale} #1 was born in ____ in the winter of', 'Viru', 1) in found[0]
    bridge = 'The bridge of the town, built in 1870, was designed by the engineer #1.'
    studies = '#1 studied the theory of bridges in ____ and never left it'
    assert found[2] == [(f'{bridge} {studies}', 'Lutra', 3)]


def test_a_single_word_is_a_bridge_only_where_it_is_the_title():
    renamed = [*PASSAGES[:3], ('Somebody', PASSAGES[3][1]), PASSAGES[4]]
    assert 2 not in built(renamed)


def test_passages_of_one_title_are_not_joined():
    assert built([('Gumu', text) for _, text in PASSAGES]) == {}


def test_a_name_that_many_passages_mention_is_no_bridge():
    many = [(f'Town {number}', 'A town of Lomi Kelpar.') for number in range(chains.MAX_MENTIONS)]
    assert 0 not in built([*PASSAGES, *many])


def test_a_sentence_does_not_contain_words_of_its_bridge():
    sentence = 'The house of the family Kelpar was later sold to Lomi Kelpar in 1950.'
    assert not [case for case in chains.described(sentence) if 'Kelpar' in case.answer]


def test_a_clause_says_something_about_its_subject():
    # A name after a comma, or another name, is no statement about the subject.
    assert not chains.clauses('Lomi Kelpar, Gumu and Bado were three towns.', 'Lomi Kelpar')
    (clause,) = chains.clauses('Lomi Kelpar lived in Viru, and then far away.', 'Lomi Kelpar')
    assert clause.question == f'Lomi Kelpar lived in {cloze.BLANK},' and clause.answer == 'Viru'
    (clause,) = chains.clauses('The Lomi of Gumu (born in Viru) left the town.', 'Lomi of Gumu')
    assert clause.question == f'Lomi of Gumu (born in {cloze.BLANK}) left the town.'


def test_properties_of_all_chains_of_the_example_texts():
    passages = base_english.cut(example_passages(), 50)
    links = Links(passages)
    assert links.statements
    found = [(index, each) for index, chain in links.chains.items() for each in chain]
    for index, (chain, second) in found:
        bridge = chain.first.answer
        assert passages[index][0] != passages[second][0]
        assert chain.question.count(BRIDGE) == 2 and bridge not in chain.question
        assert chain.second.answer not in chain.question
        assert chain.first.sentence in ' '.join(passages[index][1].split())
        assert chain.second.sentence in ' '.join(passages[second][1].split())
