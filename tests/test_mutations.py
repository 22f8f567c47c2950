"""Mutations of a source text: each changes one thing, all compile, and the same seed chooses the same."""

from refused_calls import check_table

from tools import mutations as campaign
from tools.mutation_operators import chosen, mutations


def test_single_mutations(tmp_path):
    """Of neither annotations nor error messages."""

    def mutated(source):
        return [mutation.source for mutation in mutations(source)]

    path = campaign.ROOT / 'tests' / 'golden' / 'mutations.txt'
    check_table(path, {'mutated': mutated}, tmp_path)


def test_lines_and_texts_name_the_place():
    (mutation,) = mutations('a\n  \nx = (b -\n c)')
    assert (mutation.line, mutation.column, mutation.text) == (3, 5, 'arithmetic: b - c')
    assert mutation.source == 'a\n  \nx = ((b + c))'


def test_a_campaign_is_even_and_the_same_for_the_same_seed():
    sources = {'one.py': 'x = a + b < c', 'two.py': 'y = [1, 2, 3, 4]'}
    keys = [key for key, _ in chosen(sources, 4, 0)]
    assert [key.file for key in keys] == ['one.py', 'two.py'] * 2
    assert keys == [key for key, _ in chosen(sources, 4, 0)] == [*dict.fromkeys(keys)]
    assert len(chosen(sources, 100, 0)) == 6


def test_every_file_of_the_campaign_compiles_and_has_tests():
    for file in campaign.FILES:
        source = (campaign.ROOT / file).read_text(encoding='utf-8')
        for mutation in list(mutations(source))[::10]:
            compile(mutation.source, file, 'exec')
        assert all((campaign.ROOT / test).is_file() for test in campaign.tests_of(file))


def test_of_the_mutations_in_the_table_that_change_something_95_percent_are_caught():
    lines = campaign.read_table().values()
    counted = [line for line in lines if not line['reason'].startswith('equivalent: ')]
    caught = [line for line in counted if line['result'] == 'caught']
    assert len(caught) >= 0.95 * len(counted) > 0
