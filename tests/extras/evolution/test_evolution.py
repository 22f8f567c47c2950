"""What self-play asked in two small recorded runs: parts, near-duplicates, topics."""

import json
import pathlib
import shutil

import pytest
from refused_calls import check_table

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


def test_the_questions_of_each_iteration_are_told_apart(run, capsys):
    assert command.main([str(run)]) == 0
    head, *rows = [line.split() for line in capsys.readouterr().out.split('\n\n')[0].splitlines()]
    counts = {row[0]: int(row[1]) for row in rows}
    assert head[0] == 'questions' and list(counts) == ['iteration1', 'iteration2']
    records = [record for record in lines_of(run / 'tasks.jsonl') if record['phase'] == 'generate']
    for number, (part, count) in enumerate(counts.items()):
        made = [one for one in records if one['iteration'] == number and 'answers' in one]
        written = lines_of(run / 'evolution' / f'{part}.jsonl')
        questions = [line['question'] for line in written]
        assert questions == [one['question'] for one in made] and count == len(made) > 0
        assert all(line['answers'] and line['hops'] for line in written)
    assert {path.stem for path in (run / 'evolution').glob('*.svg')} == {'asked', 'topics'}


def record(step, question, **fields):
    made = {'answers': ['Lomi'], 'role': 'asks', 'version': 1, 'drop': None, 'hops': 2}
    place = {'step': step, 'iteration': 0, 'phase': 'play', 'task': [step, len(question or '')]}
    return place | {'question': question} | made | fields


def test_records_of_other_kinds_are_no_questions():
    records = [
        record(1, 'Who founded Lomi?', solve_rate=0.5),
        record(1, 'Who founded Duvo, that is it?', drop='duplicate', solve_rate=1.0),
        # A rollout that was dropped, a task that was dropped whole, and a group of the filter.
        record(2, 'A solver truncated', rollout=[2, 0, 0, 0], role='answers', drop='truncated'),
        {'step': 2, 'iteration': 0, 'phase': 'play', 'task': [2, 7], 'drop': 'prompt_too_long'},
        {'step': 2, 'iteration': 0, 'phase': 'play', 'task': [2, 8], 'rewards': [1.0, 1.0]},
        record(4, 'A question to a solver', phase='solve', drop='truncated', rollout=[1]),
    ]
    assert [one.name for one in asked.parts_of(records, 2)] == ['step1']
    (part,) = asked.parts_of(records, 1)
    assert part.name == 'steps1to2' and part.texts == [row['question'] for row in records[:2]]
    assert part.figures() == {
        'questions': 2,
        asked.MADE: 2 / 3,
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


def test_topics_are_named_by_their_words_and_add_up_to_one():
    rivers = [record(1, f'Which river flows past mountain {n}?') for n in range(8)]
    kings = [record(2, f'Which king wore crown {n}?') for n in range(8)]
    shares = asked.topics([asked.Part('a', 1.0, rivers), asked.Part('b', 1.0, kings)], 2)
    (of_river,) = [values for name, values in shares.items() if 'mountain' in name]
    assert of_river[0] > 0.7 > 0.3 > of_river[1]
    assert [sum(column) for column in zip(*shares.values())] == pytest.approx([1, 1])


def test_searches_are_those_of_solved_questions():
    answered = [Answered(1.0, 3, 0.0, None), Answered(0.0, 9, 0.0, None)]
    figures = asked.solved([*answered, Answered(None, 5, 0.0, None)])
    assert figures['searches'] == 3 and figures['solve rate'] == 0.5
    assert figures['low'] < 0.5 < figures['high']
    assert 'searches' not in asked.solved(answered[1:])


def test_a_rating_is_one_whole_number_at_the_end():
    check_table(pathlib.Path(__file__).parent / 'ratings.txt', {'parse': rating.parse})
