"""What self-play asked in two small recorded runs: parts, near-duplicates, topics."""

import json
import pathlib
import shutil

import pytest

from zeroplay_jax.evaluation import rating
from zeroplay_jax.evaluation.results import Answered
from zeroplay_jax.extras.evolution import __main__ as command
from zeroplay_jax.extras.evolution import questions as asked

RUNS = pathlib.Path(__file__).parents[2] / 'golden' / 'runs'


@pytest.fixture
def run(tmp_path):
    return pathlib.Path(shutil.copytree(RUNS / 'drzero', tmp_path / 'run'))


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def cells(printed):
    """{part: {column: cell}} of the first table that was printed."""
    head, *rows = [line.split('  ') for line in printed.split('\n\n')[0].splitlines()]
    head, *rows = [[cell.strip() for cell in row if cell.strip()] for row in (head, *rows)]
    return {row[0]: dict(zip(head, row[1:], strict=True)) for row in rows}


def test_the_questions_of_each_iteration_are_told_apart(run, capsys):
    assert command.main([str(run)]) == 0
    printed = capsys.readouterr().out
    figures = cells(printed)
    assert list(figures) == ['iteration1', 'iteration2'] and len(printed.split('\n\n')) == 2
    records = [record for record in lines_of(run / 'tasks.jsonl') if record['phase'] == 'generate']
    for number, part in enumerate(figures):
        of_part = [record for record in records if record['iteration'] == number]
        made = [record for record in of_part if 'answers' in record]
        questions = [record['question'] for record in made]
        assert int(figures[part]['questions']) == len(made) > 0
        tasks = {tuple(record['task']) for record in of_part}
        valid = {tuple(record['task']) for record in made}
        assert float(figures[part][asked.MADE]) == pytest.approx(len(valid) / len(tasks), abs=1e-3)
        words = sum(len(question.split()) for question in questions) / len(made)
        assert float(figures[part]['words']) == pytest.approx(words, abs=1e-3)
        written = lines_of(run / 'evolution' / f'{part}.jsonl')
        assert [line['question'] for line in written] == questions
        assert all(line['answers'] and line['hops'] for line in written)
    pictures = {path.name for path in (run / 'evolution').iterdir() if 'iteration' not in path.name}
    assert pictures == {'asked.svg', 'asked.png', 'topics.svg', 'topics.png'}


def record(step, question, **fields):
    made = {'answers': ['Lomi'], 'role': 'asks', 'version': 1, 'drop': None, 'hops': 2}
    place = {'step': step, 'iteration': 0, 'phase': 'play', 'task': [step, len(question or '')]}
    return place | {'question': question} | made | fields


def test_records_of_other_kinds_are_no_questions():
    records = [
        record(1, 'Who founded Lomi?', solve_rate=0.5),
        record(1, 'Who founded Duvo, that is it?', drop='duplicate', solve_rate=1.0),
        # A rollout that was dropped names itself, also where the task has a question; a task that was dropped whole has
        # no version, and a group of the filter has rewards.
        record(2, 'A solver truncated', rollout=[2, 0, 0, 0], role='answers', drop='truncated'),
        record(2, None, rollout=[2, 1, 0, 0], answers=[], drop='no_question'),
        {'step': 2, 'iteration': 0, 'phase': 'play', 'task': [2, 7], 'drop': 'prompt_too_long'},
        {'step': 2, 'iteration': 0, 'phase': 'play', 'task': [2, 8], 'rewards': [1.0, 1.0]},
        {'step': 2, 'iteration': 0, 'phase': 'play', 'role': 'answers', 'rollouts': [[1]]},
        record(4, 'A question to a solver', phase='solve', drop='truncated', rollout=[1]),
    ]
    assert [one.name for one in asked.parts_of(records, 2)] == ['step1']
    (part,) = asked.parts_of(records, 1)
    assert part.name == 'steps1to2' and part.texts == [row['question'] for row in records[:2]]
    assert part.figures() == {
        'questions': 2,
        asked.MADE: 0.5,
        'words': 4.5,
        'hops': 2.0,
        'solve rate then': 0.75,
    }


def test_near_duplicates_are_questions_that_differ_by_little():
    texts = ['Which river flows through the capital of Lomi?', 'Who founded the town of Duvo?']
    assert asked.near_duplicates(texts) == 0.0
    assert asked.near_duplicates([*texts, texts[0].replace('?', ' ?')]) == pytest.approx(2 / 3)
    # One form, another name.
    assert asked.near_duplicates([*texts, texts[1].replace('Duvo', 'Krikin')]) == 0.0
    assert asked.near_duplicates(texts[:1]) == 0.0


def test_topics_are_named_by_their_words_and_add_up_to_one():
    rivers = [record(1, f'Which river flows past mountain {n}?') for n in range(8)]
    kings = [record(2, f'Which king wore crown {n}?') for n in range(8)]
    parts = [
        asked.Part('a', 1.0, rivers),
        asked.Part('b', 1.0, kings),
    ]
    shares = asked.topics(parts, 2)
    (of_river,) = [values for name, values in shares.items() if 'mountain' in name]
    assert of_river[0] > 0.7 > 0.3 > of_river[1]
    words = [word for name in shares for word in name.split()]
    assert len(set(words)) == len(words)
    assert [sum(column) for column in zip(*shares.values())] == pytest.approx([1, 1])
    assert len(asked.topics([asked.Part('few', 1.0, rivers[:3])], 8)) == 3
    nothing = asked.Part('c', 1.0, [record(1, 'Who is it?')])
    assert asked.topics([nothing], 2) == {}


def test_searches_are_those_of_solved_questions():
    answered = [Answered(1.0, 3, 0.0, None), Answered(0.0, 9, 0.0, None)]
    figures = asked.solved([*answered, Answered(None, 5, 0.0, None)])
    assert figures['searches'] == 3 and figures['solve rate'] == 0.5
    assert figures['low'] < 0.5 < figures['high']
    assert 'searches' not in asked.solved(answered[1:])


@pytest.mark.parametrize(
    ('reply', 'number'),
    [
        ('<score>1</score>', 1),
        ('Two searches.\n**<score> 5 </score>**.', 5),
        ('<think>Is it <score>2</score>?</think>\n<score>4</score>', 4),
        ('<score>0</score>', None),
        ('<score>6</score>', None),
        ('<score>3.5</score>', None),
        ('<score>3</score> or <score>4</score>', None),
        ('<score>3</score>, but it may be harder', None),
        ('<think>So <score>3</score>', None),
        ('3', None),
    ],
)
def test_a_rating_is_one_whole_number_at_the_end(reply, number):
    assert rating.parse(reply) == number
