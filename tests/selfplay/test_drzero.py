"""Dr. Zero as an episode: who is asked what, and what each outcome pays."""

import collections
import pathlib

import input_files
import pytest
import scripted
from refused_calls import check_table
from scripted import ScriptedContext, lost, search_call, trajectory

from benchmarks import grounded
from zeroplay_jax.configs import quickstart
from zeroplay_jax.recipes import proposing, solving
from zeroplay_jax.recipes.datasets import SeedDocument
from zeroplay_jax.recipes.drzero import Recipe
from zeroplay_jax.selfplay import answers as group_answers
from zeroplay_jax.selfplay import schedule
from zeroplay_jax.selfplay.library_builder import linked_documents
from zeroplay_jax.selfplay.schedule import BatchCursor, Phase, QuestionPool, Step, all_steps
from zeroplay_jax.settings.kinds import ConfigError, refuse
from zeroplay_jax.types import Question, Task, ToolCall, Turn

PASSAGES = [
    ('Gumu', 'Gumu was born in Lomi. Gumu worked as a farmer.'),
    ('Lomi', 'Lomi is a city in Tarva. Lomi is led by Puto.'),
    ('Tarva', 'Tarva is ruled from Lomi.'),
    ('Puto', 'Puto worked as a poet.'),
]

LOMI = ({'id': 1, 'title': 'Lomi', 'text': PASSAGES[1][1]},)


def proposal(
    question='What is the country of the birthplace of Gumu?',
    answer='Tarva',
    search=True,
    **options,
):
    final = Turn(f'<think> so</think><question> {question}</question><answer> {answer}</answer>')
    look = Turn('<think> first</think><search> Lomi</search>', search_call(['Lomi'], (LOMI,)))
    return trajectory(*([look] if search else []), final, **options)


def written(*texts, **options):
    return trajectory(*map(Turn, texts), **options)


def answer(text, **options):
    return written(f'<think> x</think><answer> {text}</answer>', **options)


def recipe(**changes):
    config = quickstart.get_config()
    with config.unlocked():
        for name, value in changes.items():
            node, leaf = name.rsplit('__', 1)
            config[node][leaf] = value
    return Recipe(config, scripted.library(linked_documents(PASSAGES)))


def play(game, phase, context, payload):
    step = Step(scripted.phase(phase), 0, 7)
    (outcome,) = scripted.run_episodes(game, context, step, [Task((7, 0), payload)])
    return outcome


DOCUMENT = SeedDocument('Gumu', PASSAGES[0][1], hops=2)


def propose(*rollouts, solver=(), document=DOCUMENT, **changes):
    """(rows of the proposer's phase, what was asked)."""
    context = ScriptedContext(proposer=rollouts or [proposal()], solver=answers_of(solver))
    return play(recipe(**changes), 'proposer', context, document).rows, context.asked


def proposed(*rollouts, **options):
    (row,), asked = propose(*rollouts, **options)
    difficulty = row.parts.get('difficulty', 0.0)
    text = f'reward {row.reward:g} = format {row.parts["format"]:g} + difficulty {difficulty:g}; '
    assert row.drop is None and row.reward == pytest.approx(row.parts['format'] + difficulty)
    if row.info.rejected:
        assert [role for role, *_ in asked] == ['proposer'] and not row.info.valid
        return text + f'rejected: {row.info.rejected}'
    assert [role for role, *_ in asked] == ['proposer', 'solver'] and row.info.valid
    assert asked[0][1] != asked[1][1] and asked[1][3] == {'question': row.info.question.text}
    return text + f'{row.info.solve_count} of 5 gave {row.info.question.answers}'


def generated(*rollouts, solver=(), **changes):
    """A task of the generation; as in a checkpoint of the pool."""
    context = ScriptedContext(proposer=rollouts, solver=answers_of(solver))
    game = recipe(**{'pool__samples': 1} | changes)
    outcome = play(game, 'generate', context, DOCUMENT)
    if outcome.drop:
        assert not outcome.questions and len(outcome.rows) == game.config.pool.samples
        return f'dropped: {outcome.drop}'
    (question,) = outcome.questions
    assert all(fields['question'] == question.text for *_, fields in context.asked[1:])
    assert question.hops == 2 and question.origin['document'] == 'Gumu'
    assert Question.from_json(question.to_json()) == question
    return f'{question.text} {question.answers} solved: {question.solve_rate}'


def solved(entries, answers=('Tarva',), **changes):
    """Rewards of rollouts that answer, and what counted as right."""
    context = ScriptedContext(solver=answers_of(entries))
    changes['solver__samples'] = len(entries)
    rows = play(recipe(**changes), 'solver', context, Question('Where?', answers, 1)).rows
    (group,) = {row.group for row in rows}
    (label,) = {row.info.question.answers for row in rows}
    assert group == group_answers.group_of((7, 0))
    return f'{[row.reward for row in rows]} for {label}'


def grounded_reason(hops, **changes):
    """Why a question of so many hops is not grounded in what its proposer read."""
    document = SeedDocument(*PASSAGES[0], hops)
    return grounded.checked(
        proposing.read_proposal(proposal(**changes), document), document
    ).rejected


def test_what_episodes_pay_and_leave():
    names = dict(
        globals(),
        MAJORITY=dict(drzero__labels='majority'),
        PARTS=dict(drzero__separate_format=True),
        WINDOW=dict(pool__measure=4, pool__window=(0.3, 0.7)),
        WRONG=['x'] * 5,
        LOST=lost(),
        MALFORMED=ToolCall('', None, error='malformed'),
        NUMBERS=['2', '2', '1942', '7', UNFINISHED],
    )
    names = vars(solving) | vars(schedule) | names
    check_table(pathlib.Path(__file__).parent / 'drzero.txt', names)


def answers_of(entries):
    """Rollouts of a solver, given as such or as what they answer."""
    return [answer(entry) if isinstance(entry, str) else entry for entry in entries]


UNFINISHED = answer('x', finish='context')


def test_every_batch_holds_the_hops_in_the_exact_ratio():
    depth = {d.title: d.depth for d in linked_documents(PASSAGES)}
    game = recipe(schedule__hop_ratio=(4, 3, 2), proposer__batch=9)
    step = Step(scripted.phase('proposer'), 0, 3)
    tasks = game.tasks(step, QuestionPool(), BatchCursor())
    assert collections.Counter(t.payload.hops for t in tasks) == {1: 4, 2: 3, 3: 2}
    assert all(depth[t.payload.title] >= t.payload.hops for t in tasks)
    assert tasks == game.tasks(step, QuestionPool(), BatchCursor())


def test_what_a_phase_trains_decides_about_its_tasks():
    """A derived recipe may call its phases as it likes."""
    game = recipe(schedule__hop_ratio=(1,), proposer__batch=2, pool__batch=3, solver__batch=4)
    pool = QuestionPool()
    pool.add(Question('Where is Gumu?', ('Lomi',)))

    def drawn(*trains):
        step = Step(Phase('game', 1, trains), 0, 0)
        tasks = game.tasks(step, pool, BatchCursor(missing=4))
        return len(tasks), {type(task.payload) for task in tasks}

    assert drawn('proposer', 'solver') == drawn('proposer') == (2, {SeedDocument})
    assert drawn() == (3, {SeedDocument})
    assert drawn('solver') == (4, {Question})


@pytest.mark.parametrize('has_file', [False, True])
def test_questions_are_generated_on_the_documents_of_the_proposer(tmp_path, has_file):
    sizes = dict(proposer__batch=4, proposer__steps=2, pool__batch=4, pool__batches=3)
    ratio = dict(schedule__hop_ratio=(1, 1), schedule__iterations=2)
    config = recipe(schedule__repeat_documents=True, **sizes, **ratio).config
    lines = [{'title': f'{i}', 'text': 't', 'hops': 1 + i % 2} for i in range(24)]
    if has_file:
        config.inputs.documents = input_files.write(tmp_path / 'documents.jsonl', *lines)
    names = [('Lomi' + 'a' * i, f'It lies beside Lomi{"a" * (i + 1)}.') for i in range(99)]
    game = Recipe(config, scripted.library(linked_documents(names)))
    drawn = {'proposer': [], 'generate': []}
    for step in all_steps(game.phases()):
        if step.phase.name in drawn:
            tasks = game.tasks(step, QuestionPool(), BatchCursor())
            drawn[step.phase.name].append(frozenset(task.payload.title for task in tasks))
    generated = drawn['generate']
    assert drawn['proposer'] == [*generated[:2], *generated[3:5]]
    # A third step of generation has further documents, which the next iteration does not repeat.
    assert len({*generated}) == 6
    if has_file:
        assert len(frozenset.union(*generated)) == 24
    config.pool.batch = 5
    with pytest.raises(ConfigError, match='pool.batch=5.*steps of 4 documents'):
        refuse(config, Recipe.check(config))


def longest(prediction, golds):
    """A metric that needs accepted answers."""
    return max(len(gold) for gold in golds) == len(prediction or '')
