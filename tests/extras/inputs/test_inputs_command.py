"""The command that builds input files, and the games that start from them."""

import collections
import pathlib

import pytest
from input_files import write
from refused_calls import check_table
from scripted import library

from zeroplay_jax.configs import common
from zeroplay_jax.data import files
from zeroplay_jax.extras.inputs import __main__ as command
from zeroplay_jax.extras.inputs import builders
from zeroplay_jax.extras.inputs.builders import mentions
from zeroplay_jax.runtime.disk import write_text
from zeroplay_jax.selfplay.recipe import recipe_class
from zeroplay_jax.selfplay.schedule import BatchCursor, QuestionPool, Step
from zeroplay_jax.types import UserError


def made(recipe, change, phase='proposer', number=0):
    """What the recipe's first step of a phase asks for, with the inputs that `change` names."""
    config = common.get_config(recipe)
    for section in {'proposer', 'solver', 'pool'} & set(config):
        config[section].batch = 20
    config.update(change)
    game = recipe_class(recipe)(config, library())
    first, *_ = (each for each in game.phases() if each.name == phase)
    return game.tasks(Step(first, number, number), QuestionPool(), BatchCursor(missing=20))


FILLER = ' '.join(['word'] * 20)
HOPS_OF_TWENTY = {1: 8, 2: 6, 3: 4, 4: 2}


def built(capsys, out, *arguments):
    """Runs the command; its lines, and what it said."""
    assert command.main([*map(str, arguments), f'--out={out}']) == 0
    said = capsys.readouterr().out
    assert said.count('\n') == 1 and f'={out}' in said
    return files.read_lines(str(out), answered=False), said


def refused(capsys, out, *arguments):
    """Runs the command, which must end with one line and code 2, and leave the folder as it was."""
    before = sorted(out.parent.iterdir())
    assert command.main([*map(str, arguments), f'--out={out}']) == 2
    caught = capsys.readouterr()
    *warnings, line = caught.err.splitlines(keepends=True)
    assert not caught.out and sorted(out.parent.iterdir()) == before
    assert all(warning.startswith('warning: ') for warning in warnings)
    return caught.err


def corpus_file(path, *passages):
    return write(
        path,
        *({'id': f'p{i}', 'contents': f'"{t}"\n{text}'} for i, (t, text) in enumerate(passages)),
    )


def many(count):
    return [(f'Place {i}', f'Place number {i} {FILLER}') for i in range(count)]


def hops_of(tasks):
    return collections.Counter(task.payload.hops for task in tasks)


def test_answers_of_sets_are_a_sample_without_repeats_and_what_cannot_be_hidden(tmp_path, capsys):
    one = [{'question': f'q{i}', 'golden_answers': [f' Name  {i} ', 'other']} for i in range(30)]
    unusable = ('the name 3', ' '.join('abcdefghijk'), '?')
    bad = [{'question': 'q', 'answer': answer} for answer in unusable]
    others = ('Lomi', 'Yes', 'no.')
    paths = [
        write(tmp_path / 'one.jsonl', *one, '', *bad),
        write(tmp_path / 'two.jsonl', *({'answer': answer} for answer in others)),
    ]
    arguments = ('answers', '--sets', ','.join(paths))
    lines, said = built(capsys, tmp_path / 'a.jsonl', *arguments, '--count=33')
    assert {line['answer'] for line in lines} == {f'Name {i}' for i in range(30)} | {*others}
    use = 'taken by recipe ssp with --config.inputs.answers='
    assert all(part in said for part in ('1 empty', '1 duplicate', '1 too_long', use))
    (of_seven,) = [line for line in lines if line['answer'] == 'Name 7']
    assert (of_seven['source'], of_seven['line']) == (paths[0], 8)
    tasks = made('ssp', {'inputs': {'answers': str(tmp_path / 'a.jsonl')}}, 'selfplay')
    hidden = {task.payload.answer for task in tasks}
    assert len(hidden) == 20 and all(task.external for task in tasks)
    assert hidden < {line['answer'] for line in lines}
    some = lambda *more: built(capsys, tmp_path / 'c.jsonl', *arguments, *more)[0]
    assert some('--count=9') == some('--count=9') != some('--count=9', '--seed=1')


def test_what_a_passage_mentions():
    names = lambda text: [name for _, name in mentions(text)]
    check_table(pathlib.Path(__file__).parent / 'mentions.txt', {'names': names})


def test_answers_of_a_corpus_are_titles_and_what_two_documents_mention(tmp_path, capsys):
    passages = [
        ('Lomi (city)', 'It was founded in 1204 by Ada Barra. Only here: Uno Solo.'),
        ('Lomi (city)', 'A second passage of one document names Uno Solo again.'),
        ('List of cities', 'Ada Barra again.'),
        ('', 'In 1204 there was no title.'),
    ]
    arguments = ('answers', '--corpus', corpus_file(tmp_path / 'c.jsonl', *passages))
    lines, said = built(capsys, tmp_path / 'a.jsonl', *arguments, '--count=3')
    kinds = {line['answer']: line['kind'] for line in lines}
    assert kinds == {'Lomi': 'title', '1204': 'date', 'Ada Barra': 'entity'}
    assert {(line['document_id'], line['line']) for line in lines} == {('p0', 1)}
    assert '1 list, 1 one_document' in said
    line = refused(capsys, tmp_path / 'b', *arguments, '--count=4')
    assert '3 answers can be used' in line


def test_a_bounded_sample_is_the_lowest_of_all_and_has_seen_everything_of_them():
    keys = [builders.hash_key(0, str(i % 700)) for i in range(2100)]
    sample = builders.BottomK(40)
    for at in keys:
        if sample.admits(at):
            sample.put(at, (sample.get(at) or 0) + 1)
    assert sample.ordered() == [3] * 40
    assert sorted(sample._items)[:40] == sorted(set(keys))[:40] and len(sample._items) < 80


def test_questions_of_sets_come_in_one_form_without_those_held_out(tmp_path, capsys):
    nq = [{'question': f'nq {i}', 'golden_answers': [f'a{i}', f'a{i}', 'b']} for i in range(12)]
    target = {'ground_truth': {'target': 'x\ty'}}
    hp = [
        {'extra_info': {'question': f'hp {i}'}, 'reward_model': target, 'hops': 2}
        for i in range(12)
    ]
    sets = f'{write(tmp_path / "nq.jsonl", *nq, nq[0])},{write(tmp_path / "hp.jsonl", *hp)}'
    dev = write(tmp_path / 'dev.jsonl', {'question': 'NQ 3?'}, {'question': 'HP 0'})
    out, arguments = tmp_path / 'q.jsonl', ('questions', '--sets', sets)
    lines, said = built(capsys, out, *arguments, '--not-in', dev)
    use = 'taken by recipe dspo with --config.inputs.questions='
    assert '1 duplicate (' in said and '2 held_out (' in said and use in said
    answers = {line['question']: tuple(line['answers']) for line in lines}
    assert len(lines) == len(answers) == 22 and not {'nq 3', 'hp 0'} & answers.keys()
    assert answers['nq 5'] == ('a5', 'b') and answers['hp 5'] == ('x\ty',)
    tasks = made('dspo', {'inputs': {'questions': str(out)}}, 'solver')
    questions = [task.payload for task in tasks]
    assert len({question.text for question in questions}) == 20
    assert all(task.external for task in tasks)
    # Questions of a file without hops have an unknown number of them.
    assert all(q.hops == (2 if q.text.startswith('hp') else 0) for q in questions)
    few, _ = built(capsys, out, *arguments, '--count=5')
    assert collections.Counter(line['question'][:2] for line in few) == {'nq': 5, 'hp': 5}


def test_documents_are_dealt_with_the_hops_that_they_were_given(tmp_path, capsys):
    source = corpus_file(tmp_path / 'c.jsonl', *many(300), ('Short', 'too short'), ('', FILLER))
    out = tmp_path / 'd.jsonl'
    lines, said = built(capsys, out, 'documents', '--corpus', source, '--count=200')
    assert collections.Counter(line['hops'] for line in lines) == {1: 80, 2: 60, 3: 40, 4: 20}
    assert len({line['document_id'] for line in lines}) == 200 and '1 no_title, 1 too_short' in said
    assert "'--config.schedule.hop_ratio=(4,3,2,1)'" in said
    hops = {line['title']: line['hops'] for line in lines}
    change = {'inputs': {'documents': str(out)}, 'proposer': {'steps': 2}}
    seen = set()
    for phase, number in (('proposer', 0), ('proposer', 1), ('generate', 0)):
        tasks, again = (made('drzero', change, phase, number) for _ in range(2))
        documents = [task.payload for task in tasks]
        assert [task.payload for task in again] == documents
        assert hops_of(tasks) == HOPS_OF_TWENTY and not any(task.external for task in tasks)
        assert all(hops[document.title] == document.hops for document in documents)
        seen |= {document.origin['document_id'] for document in documents}
    assert len(seen) == 60  # no document twice before all were there, from phase to phase
    change['schedule'] = {'hop_ratio': (1, 1, 1, 1, 1)}
    with pytest.raises(UserError, match='no document has 5 hops, as .* requires'):
        made('drzero', change)


def test_scope_gets_kinds_of_tasks_in_equal_parts(tmp_path, capsys):
    source, out = corpus_file(tmp_path / 'c.jsonl', *many(200)), tmp_path / 'd.jsonl'
    kinds = ['long_form_qa', 'summarisation', 'planning', 'writing']
    asked = ('--count=180', '--hops=4:3:2', f'--types={",".join(kinds)}')
    lines, _ = built(capsys, out, 'documents', '--corpus', source, *asked)
    both = collections.Counter((line['hops'], line['type']) for line in lines)
    assert len(lines) == 180
    assert all(both[h, kind] == n // 4 for h, n in ((1, 80), (2, 60), (3, 40)) for kind in kinds)

    def dealt(types=()):
        inputs = {'documents': str(out), 'types': types}
        tasks = made('scope', {'inputs': inputs, 'schedule': {'hop_ratio': (4, 3, 2)}}, 'generate')
        return tasks, collections.Counter(task.payload.task_type for task in tasks)

    tasks, counts = dealt()
    assert counts == dict.fromkeys(kinds, 5) and hops_of(tasks) == {1: 9, 2: 7, 3: 4}
    # One kind left out, as in the paper's table.
    assert set(dealt(tuple(kinds[:3]))[1]) == set(kinds[:3])


def test_a_file_is_there_whole_or_as_it_was(tmp_path, capsys):
    source = corpus_file(tmp_path / 'c.jsonl', *many(9))
    asked = ('documents', '--corpus', source, '--count=5')
    assert 'is one of the inputs' in refused(capsys, tmp_path / 'c.jsonl', *asked)
    # In folders that it makes.
    assert len(built(capsys, tmp_path / 'new' / 'folder' / 'd.jsonl', *asked)[0]) == 5
    old = tmp_path / 'old.jsonl'
    old.write_text('before')

    def lines():
        yield 'line'
        raise RuntimeError('in the middle')

    with pytest.raises(RuntimeError):
        write_text(old, lines())
    assert old.read_text() == 'before'
    assert {path.name for path in tmp_path.iterdir()} == {'c.jsonl', 'new', 'old.jsonl'}
