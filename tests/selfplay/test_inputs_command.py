"""The command that builds input files, and the games that start from them."""

import collections
import json
import os
import pathlib
import re

import pytest
from input_files import library, write

from zeroplay_jax import inputs as command
from zeroplay_jax.configs import common
from zeroplay_jax.configuration import rules
from zeroplay_jax.data import builders, files
from zeroplay_jax.data.builders import mentions
from zeroplay_jax.runtime.disk import write_text
from zeroplay_jax.selfplay.recipe import recipe_class
from zeroplay_jax.selfplay.schedule import BatchCursor, Step, TaskPool
from zeroplay_jax.types import UserError

ROOT = pathlib.Path(__file__).parents[2]
DATA = ROOT.parent / 'shared' / 'data'
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
    assert not caught.out and caught.err.count('\n') == 1 and sorted(out.parent.iterdir()) == before
    return caught.err


def corpus_file(path, *passages):
    return write(
        path,
        *({'id': f'p{i}', 'contents': f'"{t}"\n{text}'} for i, (t, text) in enumerate(passages)),
    )


def many(count):
    return [(f'Place {i}', f'Place number {i} {FILLER}') for i in range(count)]


def play(recipe, change, phase='proposer', number=0, **draw):
    """What the recipe's first step of a phase asks for, with the inputs that `change` names."""
    config = common.get_config(recipe)
    for section in {'proposer', 'solver', 'pool'} & set(config):
        config[section].batch = 20
    config.update(change)
    made = recipe_class(recipe)(config, library())
    phase = next(p for p in made.phases() if p.name == phase)
    return made.tasks(
        Step(phase, number, number), TaskPool(), BatchCursor(missing=config.solver.batch, **draw)
    )


def hops_of(tasks):
    return collections.Counter(task.payload.hops for task in tasks)


def test_answers_of_sets_are_a_sample_without_repeats_and_what_cannot_be_hidden(tmp_path, capsys):
    one = [{'question': f'q{i}', 'golden_answers': [f' Name  {i} ', 'other']} for i in range(30)]
    bad = [
        {'question': 'q', 'answer': a}
        for a in ('Yes', 'no.', 'the name 3', ' '.join('abcdefghijk'), '?')
    ]
    sets = f'{write(tmp_path / "one.jsonl", *one, "", *bad)},{write(tmp_path / "two.jsonl", {"answer": "Lomi"})}'
    lines, said = built(capsys, tmp_path / 'a.jsonl', 'answers', '--sets', sets, '--count=31')
    assert {line['answer'] for line in lines} == {f'Name {i}' for i in range(30)} | {'Lomi'}
    use = 'taken by recipe ssp with --config.inputs.answers='
    assert all(part in said for part in ('2 yes_no', '1 duplicate', '1 too_long', use))
    source = (tmp_path / 'one.jsonl').read_text().split('\n')
    for line in lines:  # provenance leads back to the line that the answer is of
        if line['source'].endswith('one.jsonl'):
            record = json.loads(source[line['line'] - 1])
            assert record['golden_answers'][0].split() == line['answer'].split()
    assert '31 answers can be used' in refused(
        capsys, tmp_path / 'b.jsonl', 'answers', '--sets', sets, '--count=32'
    )
    some = lambda *more: built(capsys, tmp_path / 'c.jsonl', 'answers', '--sets', sets, *more)[0]
    assert some('--count=9') == some('--count=9') != some('--count=9', '--seed=1')
    assert {line['answer'] for line in some('--count=2', '--mix=equal')} > {'Lomi'}


def test_ssp_hides_the_answers_that_were_built(tmp_path, capsys):
    lines = [
        {'question': f'q{i}', 'reward_model': {'ground_truth': {'target': [f'Name {i}']}}}
        for i in range(30)
    ]
    out = tmp_path / 'a.jsonl'
    built(capsys, out, 'answers', '--sets', write(tmp_path / 's.jsonl', *lines), '--count=25')
    tasks = play('ssp', {'inputs': {'answers': str(out)}}, 'selfplay')
    assert len({task.payload.answer for task in tasks}) == 20 and all(
        task.external for task in tasks
    )
    assert all(task.payload.answer == f'Name {task.payload.origin["line"] - 1}' for task in tasks)


@pytest.mark.parametrize(
    ('text', 'found'),
    [
        ('He met Ada Lovelace in 1843.', ['Ada Lovelace', '1843']),
        (
            "In Paris France's Bank of the West paid $1900 for 1,234 cars.",
            ["Paris France's Bank of the West"],
        ),
        ('On 12 March 1998 and May 3, 2001 it rained.', ['12 March 1998', 'May 3, 2001']),
        ('John F. Kennedy saw World War I. The Beatles came.', ['John F. Kennedy', 'World War I']),
        ("The United States and the Élysée Palace's guard", ['United States', 'Élysée Palace']),
        ('Paris is in France. The Beatles. When He came. 19th, A1999, 1999%', []),
    ],
)
def test_what_a_passage_mentions(text, found):
    assert [name for _, name in mentions(text)] == found


def test_answers_of_a_corpus_are_titles_and_what_two_documents_mention(tmp_path, capsys):
    passages = [
        ('Lomi (city)', 'It was founded in 1204 by Ada Barra. Only here: Uno Solo.'),
        ('Lomi (city)', 'A second passage of one document names Uno Solo again.'),
        ('List of cities', 'Ada Barra again.'),
        ('Yes', 'Nothing.'),
        ('', 'In 1204 there was no title.'),
    ]
    source = corpus_file(tmp_path / 'c.jsonl', *passages)
    lines, said = built(capsys, tmp_path / 'a.jsonl', 'answers', '--corpus', source, '--count=3')
    found = {line['answer']: (line['kind'], line['document_id'], line['line']) for line in lines}
    assert found == {
        'Lomi': ('title', 'p0', 1),
        '1204': ('date', 'p0', 1),
        'Ada Barra': ('entity', 'p0', 1),
    }
    assert '1 list, 1 one_document, 1 yes_no' in said
    assert '3 answers can be used' in refused(
        capsys, tmp_path / 'b', 'answers', '--corpus', source, '--count=4'
    )


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
    verl = [
        {
            'extra_info': {'question': f'hp {i}'},
            'reward_model': {'ground_truth': {'target': 'x'}},
            'hops': 2,
        }
        for i in range(12)
    ]
    sets = f'{write(tmp_path / "nq.jsonl", *nq, nq[0])},{write(tmp_path / "hp.jsonl", *verl)}'
    dev = write(tmp_path / 'dev.jsonl', {'question': 'NQ 3?'}, {'question': 'HP 0'})
    out = tmp_path / 'q.jsonl'
    lines, said = built(capsys, out, 'questions', '--sets', sets, '--not-in', dev)
    assert (
        len(lines) == 22
        and '1 duplicate, 2 held_out' in said
        and 'taken by recipe dspo with --config.inputs.questions=' in said
    )
    assert not {'nq 3', 'hp 0'} & {line['question'] for line in lines}
    assert {tuple(line['answers']) for line in lines if line['question'] == 'nq 5'} == {('a5', 'b')}
    first = [line['question'][:2] for line in lines]
    assert first != sorted(first) and first != sorted(first, reverse=True)
    tasks = play('dspo', {'inputs': {'questions': str(out)}}, 'solver')
    assert len({task.payload.text for task in tasks}) == 20 and all(task.external for task in tasks)
    # Questions of a file without hops have an unknown number of them.
    assert all(
        task.payload.hops == (2 if task.payload.text.startswith('hp') else 0) for task in tasks
    )
    assert all(task.payload.origin['source'].endswith('.jsonl') for task in tasks)
    few, _ = built(capsys, out, 'questions', '--sets', sets, '--count=5')
    assert collections.Counter(line['question'][:2] for line in few) == {'nq': 5, 'hp': 5}
    refused(capsys, tmp_path / 'x.jsonl', 'questions', '--sets', sets, '--count=13')


def test_documents_are_dealt_with_the_hops_that_they_were_given(tmp_path, capsys):
    source = corpus_file(tmp_path / 'c.jsonl', *many(300), ('Short', 'too short'), ('', FILLER))
    out = tmp_path / 'd.jsonl'
    lines, said = built(capsys, out, 'documents', '--corpus', source, '--count=200')
    assert collections.Counter(line['hops'] for line in lines) == {1: 80, 2: 60, 3: 40, 4: 20}
    assert len({line['document_id'] for line in lines}) == 200 and '1 no_title, 1 too_short' in said
    assert "'--config.schedule.hop_ratio=(4,3,2,1)'" in said
    hops = {line['title']: line['hops'] for line in lines}
    seen = []
    for phase, number in (('proposer', 0), ('proposer', 1), ('generate', 0)):
        change = {'inputs': {'documents': str(out)}, 'proposer': {'steps': 2}}
        tasks = play('drzero', change, phase, number)
        again = play('drzero', change, phase, number)
        assert [task.payload for task in again] == [task.payload for task in tasks]
        assert hops_of(tasks) == HOPS_OF_TWENTY
        assert all(
            hops[task.payload.title] == task.payload.hops and not task.external for task in tasks
        )
        seen += [task.payload.origin['document_id'] for task in tasks]
    assert len(set(seen)) == 60  # no document twice before all were there, from phase to phase


def test_scope_gets_kinds_of_tasks_in_equal_parts(tmp_path, capsys):
    source, out = corpus_file(tmp_path / 'c.jsonl', *many(200)), tmp_path / 'd.jsonl'
    kinds = ['long_form_qa', 'summarisation', 'planning', 'writing']
    asked = ('--count=180', '--hops=4:3:2', f'--types={",".join(kinds)}')
    lines, said = built(capsys, out, 'documents', '--corpus', source, *asked)
    assert collections.Counter(line['type'] for line in lines) == dict.fromkeys(kinds, 45)
    both = collections.Counter((line['hops'], line['type']) for line in lines)
    assert all(both[h, kind] == n // 4 for h, n in ((1, 80), (2, 60), (3, 40)) for kind in kinds)
    assert 'taken by recipe scope with --config.inputs.documents=' in said
    tasks = play(
        'scope',
        {'inputs': {'documents': str(out)}, 'schedule': {'hop_ratio': (4, 3, 2)}},
        'generate',
    )
    assert collections.Counter(task.payload.task_type for task in tasks) == dict.fromkeys(kinds, 5)
    assert hops_of(tasks) == {1: 9, 2: 7, 3: 4}
    # One kind left out, as in the paper's table.
    three = {
        'inputs': {'documents': str(out), 'types': tuple(kinds[:3])},
        'schedule': {'hop_ratio': (4, 3, 2)},
    }
    assert {task.payload.task_type for task in play('scope', three, 'generate')} == set(kinds[:3])
    three['inputs']['types'] = ('poem',)
    with pytest.raises(UserError, match="no document of type 'poem'"):
        play('scope', three, 'generate')


def test_a_file_of_documents_without_a_hop_count_or_that_is_missing_is_named(tmp_path):
    path = write(tmp_path / 'd.jsonl', {'title': 'Lomi', 'text': 'A city.', 'hops': 1})
    change = {'inputs': {'documents': path}, 'schedule': {'hop_ratio': (1, 1)}}
    with pytest.raises(UserError, match=r'no document has 2 hops, as \(1, 1\) requires'):
        play('drzero', change)
    config = common.get_config()
    config.inputs.documents = 'none.jsonl'
    missing = r'config\.inputs\.documents=none\.jsonl: .*name an existing file'
    with pytest.raises(UserError, match=missing):
        rules.check(config)


@pytest.mark.fault('kin-files', 'a folder with a text in Latin-1')
def test_a_text_that_cannot_be_read_is_a_file_and_no_line(tmp_path, capsys, caplog, user_reads):
    texts = tmp_path / 'texts'
    texts.mkdir()
    (texts / 'a.txt').write_text(f'A\n{FILLER}')
    (texts / 'b.txt').write_bytes(b'B\ncaf\xe9')
    (texts / 'c.pdf').write_bytes(b'%PDF')
    arguments = ['documents', f'--corpus={texts}', '--count=1']
    error = refused(capsys, tmp_path / 'out.jsonl', *arguments)
    assert f'inputs: {texts}/b.txt: cannot be read as a text' in error
    assert error.endswith('save it as UTF-8); correct the file\n')
    assert f'{texts}: 1 of 3 files are left out: 1 .pdf' in caplog.text
    user_reads(error)


@pytest.mark.fault('kin-files', 'questions in CSV')
def test_questions_in_csv_are_refused(tmp_path, capsys, user_reads):
    path = tmp_path / 'set.csv'
    path.write_text('question,answer\nWhich town?,Lomi\n')
    error = refused(capsys, tmp_path / 'out.jsonl', 'questions', f'--sets={path}')
    assert 'set.csv: CSV is not read; save it as .tsv, with tabs between the columns' in error
    user_reads(error)


def test_a_file_is_there_whole_or_as_it_was(tmp_path, capsys):
    source = corpus_file(tmp_path / 'c.jsonl', *many(9))
    asked = ('documents', '--corpus', source, '--count=5')
    assert 'is one of the inputs' in refused(capsys, tmp_path / 'c.jsonl', *asked)
    assert (
        len(built(capsys, tmp_path / 'new' / 'folder' / 'd.jsonl', *asked)[0]) == 5
    )  # in folders that it makes
    old = tmp_path / 'old.jsonl'
    old.write_text('before')
    with pytest.raises(RuntimeError):
        write_text(old, ('line' if i < 3 else explode() for i in range(5)))
    assert old.read_text() == 'before' and sorted(p.name for p in tmp_path.iterdir()) == [
        'c.jsonl',
        'new',
        'old.jsonl',
    ]
    (tmp_path / 'folder').mkdir()
    assert 'choose another file' in refused(capsys, tmp_path / 'folder', *asked)


def explode():
    raise RuntimeError('in the middle')


@pytest.mark.parametrize('kind', [(), ('answers',), ('questions',), ('documents',)])
def test_help_shows_examples_that_the_command_understands(kind, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main([*kind, '--help'])
    assert ended.value.code == 0
    _, _, examples = capsys.readouterr().out.partition('examples:\n')
    calls = re.findall(
        r'^  python -m zeroplay_jax\.inputs (.*)', examples.replace('\\\n', ''), re.MULTILINE
    )
    parsed = [command._parser().parse_args(call.split()) for call in calls]
    assert len(parsed) >= 2 and all(args.kind == kind[0] for args in parsed if kind)


def test_real_files_become_inputs(tmp_path, capsys):
    if not (DATA / 'corpus.jsonl').is_file():
        pytest.skip(f'no real questions and passages in {os.path.relpath(DATA, ROOT)}')
    sets = ','.join(str(DATA / f'{name}.jsonl') for name in ('nq', 'hotpotqa'))
    out, corpus = tmp_path / 'out.jsonl', DATA / 'corpus.jsonl'
    lines, said = built(capsys, out, 'answers', '--sets', sets, '--count=400')
    assert ' yes_no' in said and len({line['answer'].lower() for line in lines}) == 400
    lines, _ = built(capsys, out, 'answers', '--corpus', corpus, '--count=3000')
    kinds = collections.Counter(line['kind'] for line in lines)
    assert len(lines) == 3000 and min(kinds[kind] for kind in ('title', 'entity', 'date')) > 50
    held_out = DATA / 'musique.jsonl'
    lines, _ = built(capsys, out, 'questions', '--sets', f'{sets},{held_out}', '--not-in', held_out)
    sources = {pathlib.Path(line['source']).stem for line in lines}
    assert sources == {'nq', 'hotpotqa'} and len(lines) > 500
    built(capsys, out, 'documents', '--corpus', corpus, '--count=1000')
    tasks = play('drzero', {'inputs': {'documents': str(out)}})
    assert hops_of(tasks) == HOPS_OF_TWENTY
