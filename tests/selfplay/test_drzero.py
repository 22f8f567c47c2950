"""Dr. Zero as an episode: who is asked what, and what each outcome pays."""

import collections
from unittest.mock import AsyncMock

import pytest
import scripted
from scripted import ScriptedContext, search_call, trajectory

from zeroplay_jax.configs import ablations, quickstart
from zeroplay_jax.configs import drzero as drzero_config
from zeroplay_jax.recipes import proposing
from zeroplay_jax.recipes.datasets import SeedDocument
from zeroplay_jax.recipes.drzero import Recipe
from zeroplay_jax.selfplay import answers
from zeroplay_jax.selfplay.library_builder import linked_documents
from zeroplay_jax.selfplay.schedule import BatchCursor, Phase, Step, TaskPool
from zeroplay_jax.settings.kinds import ConfigError
from zeroplay_jax.types import Question, Task, TaskDropped, ToolCall, Turn

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


def answer(text, **options):
    return trajectory(Turn(f'<think> x</think><answer> {text}</answer>'), **options)


def recipe(**changes):
    config = quickstart.get_config()
    with config.unlocked():
        for name, value in changes.items():
            node, leaf = name.rsplit('__', 1)
            config[node][leaf] = value
    return Recipe(config, scripted.library(linked_documents(PASSAGES)))


def play(game, phase, context, payload):
    step = Step(Phase(phase, 1), 0, 7)
    (outcome,) = scripted.run_episodes(game, context, step, [Task((7, 0), payload)])
    return outcome


DOCUMENT = SeedDocument('Gumu', PASSAGES[0][1], hops=2)


def propose(*rollouts, solver=(), document=DOCUMENT, **changes):
    """(rows of the proposer's phase, what was asked)."""
    context = ScriptedContext(proposer=rollouts, solver=solver)
    return play(recipe(**changes), 'proposer', context, document).rows, context.asked


def generate(*rollouts, solver=(), **changes):
    """The outcome of a task of the generation."""
    context = ScriptedContext(proposer=rollouts, solver=solver)
    return play(recipe(**{'pool__samples': 1} | changes), 'generate', context, DOCUMENT)


def rewards(solver, question, **changes):
    rows = play(recipe(**changes), 'solver', ScriptedContext(solver=solver), question).rows
    return [row.reward for row in rows]


def answers_of(*texts):
    return [answer(text) for text in texts]


UNFINISHED = answer('x', finish='context')


def test_a_proposer_sees_the_link_of_a_document():
    linked = SeedDocument('Gumu', 'Lomis met Lomi in Lomi.', hops=2, link='Lomi')
    _, asked = propose(proposal(), solver=answers_of(*'xxxxx'), document=linked)
    assert asked[0][3]['document'] == '(Title: Gumu) Lomis met [ Lomi ] in Lomi.'
    assert SeedDocument.from_json(linked.to_json()) == linked


@pytest.mark.parametrize('solved,difficulty', [(0, 0.0), (1, 1.0), (2, 0.75), (4, 0.25), (5, 0.0)])
def test_a_proposer_is_paid_for_form_and_for_being_solved_sometimes(solved, difficulty):
    solver = [answer('tarva')] * solved + [answer('Lomi')] * (5 - solved)
    (row,), asked = propose(proposal(), solver=solver)
    assert row.group == 2 and row.info.solve_count == solved
    assert row.parts['difficulty'] == difficulty and row.reward == pytest.approx(0.5 + difficulty)
    assert [role for role, *_ in asked] == ['proposer', 'solver']
    assert asked[1][3] == {'question': 'What is the country of the birthplace of Gumu?'}
    assert asked[0][1] != asked[1][1]


@pytest.mark.parametrize(
    'bad,reason',
    [
        (proposal(answer=''), 'no_answer'),
        (proposal(question='Is Tarva where Gumu was born?'), 'leaks_answer'),
        (proposal(finish='turn_tokens'), 'unfinished'),
        (proposal(finish='malformed'), 'unfinished'),
        (trajectory(Turn('<question> What is x?')), 'no_question'),
    ],
)
def test_a_proposal_without_form_pays_nothing_and_is_not_asked(bad, reason):
    (row,), asked = propose(bad)
    assert (row.reward, row.drop, row.info.rejected, len(asked)) == (0, None, reason, 1)
    assert generate(bad).drop == reason


@pytest.mark.parametrize(
    'rollout,form,rejected',
    [
        (proposal(answer='Mars, which nobody read about'), 4 / 4, None),
        (proposal(answer=''), 3 / 4, 'no_answer'),
        (proposal(search=False), 3 / 4, None),
        (proposal(question='Is Tarva where Gumu was born?'), 4 / 4, 'leaks_answer'),
        (trajectory(Turn('<question> What is x?')), 0 / 4, 'no_question'),
        (trajectory(Turn('<answer> x</answer>')), 1 / 4, 'no_question'),
    ],
)
def test_the_papers_four_parts_of_the_form_are_paid_one_by_one(rollout, form, rejected):
    """Appendix A; the code pays nothing as soon as the question or the answer is missing."""
    (row,), asked = propose(rollout, solver=answers_of(*'xxxxx'), drzero__separate_format=True)
    assert row.parts['format'] == pytest.approx(0.5 * form) and row.info.rejected == rejected
    assert row.info.valid is (rejected is None)
    assert len(asked) == (1 if rejected else 2)


def test_a_missing_search_costs_the_tool_part():
    (row,), _ = propose(proposal(search=False), solver=answers_of(*'xxxxx'))
    # think 1, tool 0 for two hops without a search, answer 0: it stands in nothing that was read
    assert row.reward == pytest.approx(0.5 * (1 + 1 + 0 + 0) / 4)


@pytest.mark.parametrize(
    'call', [search_call(['Lomi'], error='failed'), ToolCall('', None, error='malformed')]
)
def test_a_failed_or_malformed_call_earns_nothing(call):
    rollout = trajectory(Turn('<think> a</think>', call), proposal().turns[-1])
    assert proposing.read_proposal(rollout, DOCUMENT).format['tool'] == 0


def test_group_key_is_the_hop_count_or_the_prompt():
    (row,), _ = propose(proposal(), solver=answers_of(*'xxxxx'))
    assert row.group == 2
    changes = dict(drzero__group='prompt', proposer__samples=3)
    rows, _ = propose(*[proposal()] * 3, solver=answers_of(*'x' * 15), **changes)
    assert {row.group for row in rows} == {answers.group_of((7, 0))}


def test_generation_keeps_the_best_formed_and_says_why_not():
    (question,) = generate(
        proposal(answer='a b c d e f g h i j k'), proposal(), pool__samples=2
    ).questions
    assert question.answers == ('Tarva',) and question.hops == 2
    assert question.origin['document'] == 'Gumu'
    outcome = generate(*[trajectory(Turn('no'), finish='eos')] * 2, pool__samples=2)
    assert (outcome.questions, outcome.drop, len(outcome.rows)) == ([], 'unfinished', 2)


def test_generation_can_keep_to_a_window_of_solve_rates():
    window = dict(pool__measure=4, pool__window=(0.2, 0.8))
    assert generate(proposal(), solver=[answer('Tarva')] * 4, **window).drop == 'outside_window'
    fair = answers_of('Tarva', 'Tarva', 'x', 'x')
    assert generate(proposal(), solver=fair, **window).questions[0].solve_rate == 0.5


def test_a_solver_is_paid_for_exact_match_of_its_final_answer():
    tries = [
        answer('the Tarva.'),
        answer('Lomi'),
        answer('Tarva', finish='malformed'),
        trajectory(Turn('Tarva'), finish='eos'),
        trajectory(Turn('<answer> Tarva</answer>'), Turn('<think> hm'), finish='turn_tokens'),
    ]
    context = ScriptedContext(solver=tries)
    rows = play(recipe(), 'solver', context, Question('Where?', ('Tarva',))).rows
    assert [row.reward for row in rows] == [1, 0, 0, 0, 0]
    assert {row.group for row in rows} == {answers.group_of((7, 0))}


def test_a_prompt_that_is_too_long_drops_the_episode():
    context = ScriptedContext()
    context.ask = AsyncMock(side_effect=TaskDropped('prompt_too_long'))
    assert play(recipe(), 'proposer', context, DOCUMENT).drop == 'prompt_too_long'


def test_every_batch_holds_the_hops_in_the_exact_ratio():
    depth = {d.title: d.depth for d in linked_documents(PASSAGES)}
    assert depth == {'Gumu': 3, 'Lomi': 2, 'Tarva': 3, 'Puto': 1}
    game = recipe(schedule__hop_ratio=(4, 3, 2), proposer__batch=9)
    step = Step(Phase('proposer', 1), 0, 3)
    tasks = game.tasks(step, TaskPool(), BatchCursor())
    assert collections.Counter(t.payload.hops for t in tasks) == {1: 4, 2: 3, 3: 2}
    assert all(depth[t.payload.title] >= t.payload.hops for t in tasks)
    assert tasks == game.tasks(step, TaskPool(), BatchCursor())
    assert len({t.identity for t in tasks}) == 9
    with pytest.raises(ValueError, match='no document can start a question of 4 hops'):
        recipe().tasks(step, TaskPool(), BatchCursor())


def test_phases_alternate():
    names = [(p.name, p.trains) for p in recipe(schedule__iterations=2).phases()]
    assert names == [('proposer', ('proposer',)), ('generate', ()), ('solver', ('solver',))] * 2


# ---- labels by majority ----

MAJORITY = dict(drzero__labels='majority')


@pytest.mark.parametrize(
    'texts,agreeing,difficulty',
    [
        (['Lomi', 'Puto', 'lomi', 'Lomi.', 'Tarva'], 3, 0.5),
        (['Lomi', 'Puto', 'Tarva', 'Gumu', 'x'], 1, 1.0),
        (['the Lomi'] * 5, 5, 0.0),
    ],
)
def test_the_solvers_most_frequent_answer_is_right(texts, agreeing, difficulty):
    proposed = proposal(answer='Tarva, which counts for nothing')
    (row,), _ = propose(proposed, solver=answers_of(*texts), **MAJORITY)
    assert (row.info.solve_count, row.parts['difficulty']) == (agreeing, difficulty)
    # The log shows what counted as right.
    (label,) = row.info.question.answers
    assert label in texts


def test_an_answer_of_the_majority_becomes_the_label_of_the_pools_question():
    measured = MAJORITY | dict(pool__measure=4, pool__window=(0.3, 0.7))
    solver = answers_of('Lomi', 'Puto', ' LOMI', 'Gumu')
    (question,) = generate(proposal(), solver=solver, **measured).questions
    assert question.answers == ('Lomi',) and question.solve_rate == 0.5
    # The label holds for the solver's training, whatever its rollouts then answer.
    solver = answers_of('Puto', 'Puto', 'Puto', 'Puto', 'Lomi')
    assert rewards(solver, question, **measured) == [0, 0, 0, 0, 1]
    agreed = [answer('Lomi')] * 4
    assert generate(proposal(), solver=agreed, **measured).drop == 'outside_window'


def test_a_pools_question_that_was_not_measured_gets_its_label_from_every_group():
    (question,) = generate(proposal(), **MAJORITY).questions
    # As in a checkpoint of the pool.
    question = Question.from_json(question.to_json())
    assert question.answers == ()
    solver = [*answers_of('Puto', 'Lomi', 'puto'), UNFINISHED, answer('y')]
    context = ScriptedContext(solver=solver)
    rows = play(recipe(**MAJORITY), 'solver', context, question).rows
    assert [row.reward for row in rows] == [1, 0, 1, 0, 0]
    assert all(row.info.question.answers == ('Puto',) for row in rows)


def test_an_unfinished_rollout_disagrees_and_a_question_that_nobody_answers_has_no_label():
    measured = MAJORITY | dict(pool__measure=4)
    solver = [answer('Lomi'), UNFINISHED, UNFINISHED, answer('Lomi')]
    (question,) = generate(proposal(), solver=solver, **measured).questions
    assert question.answers == ('Lomi',) and question.solve_rate == 0.5
    assert generate(proposal(), solver=[UNFINISHED] * 4, **measured).drop == 'no_majority'


def test_a_question_is_measured_as_it_enters_the_pool():
    context = ScriptedContext(proposer=[proposal()], solver=[answer('Tarva')] * 4)
    game = recipe(pool__measure=4, pool__samples=1, pool__question_words=5)
    (question,) = play(game, 'generate', context, DOCUMENT).questions
    assert question.text == context.asked[1][3]['question'] == 'What is the country of'


def longest(prediction, golds):
    """A metric that needs accepted answers."""
    return max(len(gold) for gold in golds) == len(prediction or '')


@pytest.mark.parametrize(
    'metric,rewarded',
    [
        ('em', [1, 1, 0, 0, 0]),
        # "2" is contained in "1942".
        ('subem', [1, 1, 1, 0, 0]),
        ('test_drzero:longest', [1, 1, 0, 1, 0]),
    ],
)
def test_majority_labels_work_with_other_metrics(metric, rewarded):
    changes = MAJORITY | dict(reward__answer=metric)
    question = Question('Who?', (), 1)
    assert (
        rewards([*answers_of('2', '2', '1942', '7'), UNFINISHED], question, **changes) == rewarded
    )
    assert rewards([UNFINISHED] * 5, question, **changes) == [0] * 5


def test_a_teacher_that_reads_the_proposers_answer_is_refused_with_labels_by_majority():
    config = drzero_config.get_config('mini')
    config.solver.distill_top_k = 8
    Recipe.check(config)
    config.drzero.labels = 'majority'
    with pytest.raises(ConfigError, match="labels=majority: the teacher would read the proposer's"):
        Recipe.check(config)


def test_the_rows_of_the_baselines():
    sqlm = ablations.get_config('drzero/sqlm')
    assert (sqlm.weights, sqlm.reward.difficulty) == ('shared', 'solvable')
    r_zero = ablations.get_config('drzero/r_zero')
    assert (r_zero.weights, r_zero.reward.difficulty) == ('separate', 'triangle')
    assert r_zero.reward.target == 0.5 and r_zero.pool.measure == r_zero.reward.solves == 10
    low, high = r_zero.pool.window
    kept = [agreeing for agreeing in range(11) if low <= agreeing / 10 <= high]
    assert kept == [3, 4, 5, 6, 7]
    for config in (sqlm, r_zero):
        assert config.drzero.labels == 'majority' and not config.schedule.initial_document
        assert config.drzero.group == 'prompt' and config.proposer.samples > 1
