"""Ways of answering without training, played by a script through the real sampler; and all of them on the miniature."""

import itertools
import types

import pytest
from scripted_rollouts import scripted_policy, scripted_scheduler
from trajectories import ASKS_SOLVER

from zeroplay_jax.configuration import fields, rules
from zeroplay_jax.evaluation import answering, protocols
from zeroplay_jax.evaluation.answering import evaluate
from zeroplay_jax.rollout.call_syntax import syntax_of
from zeroplay_jax.rollout.environment import Environment, Limits
from zeroplay_jax.rollout.prompts import select
from zeroplay_jax.selfplay import recipe as recipes
from zeroplay_jax.selfplay.answers import final_answer
from zeroplay_jax.selfplay.context import Role, RolloutContext
from zeroplay_jax.selfplay.recipe import Recipe
from zeroplay_jax.tools.search import SearchTool
from zeroplay_jax.types import Question, UserError

QUESTIONS = [Question('Who taught Ann?', ('Bob',)), Question('Where is Ulm?', ('Hesse',))]


@pytest.fixture(scope='module')
def policy(tmp_path_factory):
    with scripted_policy(tmp_path_factory.mktemp('policy')) as parts:
        yield parts


@pytest.fixture
def play(policy, monkeypatch):
    """Answers QUESTIONS by scripts, identity → text of a turn; returns results, prompts by identity, and queries."""
    codec = policy[0]

    def play(
        way, scripts, samples=1, context=4096, failing='', tools=None, recipe=ASKS_SOLVER, room=300
    ):
        queries, prompts = [], {}

        def search(batch):
            queries.extend(batch)
            if failing in batch:
                raise OSError('no server')
            return [
                [{'id': q, 'title': 'T', 'text': f'Found for {q}', 'score': 1.0}] for q in batch
            ]

        end = codec.eos_ids[0]
        turns = {name: [[*codec.encode(text), end]] for name, text in scripts.items()}
        scheduler = scripted_scheduler(policy, turns, dict(context=context))
        rollout = scheduler.rollout

        def recorded(request):
            prompts[request.identity] = codec.decode(request.prompt)
            return rollout(request)

        monkeypatch.setattr(scheduler, 'rollout', recorded)
        offered = {'search': SearchTool(search)} if tools is None else tools
        env = Environment(codec, syntax_of('search_r1'), Limits(3, 200, 300), offered)
        roles = {'solver': Role('solver', 'policy', 'solver', env, prompt_tokens=room)}
        context = RolloutContext(scheduler, roles, select('full'))
        if way == 'held out':
            return evaluate(context, QUESTIONS, 5, recipe), prompts, queries
        asked = QUESTIONS[:1] if samples > 1 else QUESTIONS
        options = dict(metric='em', samples=samples, way=way, recipe=recipe)
        return answering.answer_all(context, asked, 5, **options), prompts, queries

    return play


def test_a_direct_answer_sees_no_tool_and_no_passage(play):
    scripts = {(5, 0, 0, 0, 0): '<answer>Bob</answer>', (5, 1, 0, 0, 0): '<search>Ulm</search>'}
    answered, prompts, queries = play('direct', scripts)
    found = [(one.score, one.searches, one.given) for one in answered]
    assert found == [(1.0, 0, 'Bob'), (0.0, 0, None)] and not queries
    assert '<search>' not in prompts[5, 0, 0, 0] and 'Who taught Ann?' in prompts[5, 0, 0, 0]


class Twice(Recipe):
    """Reads its own draft."""

    async def answer(self, context, question, identity):
        self.config.append(context.roles['solver'].temperature)
        (draft,) = await context.ask('solver', (*identity, 0), question=question.text)
        text = f'{question.text} {final_answer(draft)}'
        (answer,) = await context.ask('solver', (*identity, 1), question=text)
        return answer


@pytest.mark.parametrize('way, samples', [('search', 1), ('search', 2), ('held out', 1)])
def test_a_recipe_answers_in_its_own_way(play, way, samples):
    temperatures = []
    scripts = {}
    for index, sample in itertools.product(range(2), range(samples)):
        scripts[5, index, sample, 0, 0] = f'<answer>draft {sample}</answer>'
        scripts[5, index, sample, 1, 0] = '<answer>Bob</answer>'
    recipe = Twice(temperatures, None)
    answered, prompts, _ = play(way, scripts, samples=samples, recipe=recipe, room=1000)
    if way == 'held out':
        assert [row.reward for row in answered] == [1, 0]
        assert [row.trajectory.identity for row in answered] == [(5, 0, 0, 1, 0), (5, 1, 0, 1, 0)]
    else:
        scores = [1.0] if samples > 1 else [1.0, 0.0]
        assert [(one.score, one.given) for one in answered] == [(score, 'Bob') for score in scores]
    assert 'Who taught Ann? draft 0' in prompts[5, 0, 0, 1]
    # One sample is greedy.
    assert set(temperatures) == {1.0 if samples > 1 else 0.0}


def test_an_own_answer_needs_no_constructor_and_a_dropped_one_counts_as_none(play, caplog):
    class Reads(Twice):
        def __init__(self, config, library):
            raise AssertionError('reads the inputs of training')

        async def answer(self, context, question, identity):
            text = 'long ' * 4000 if question is QUESTIONS[0] else question.text
            (answer,) = await context.ask('solver', identity, question=text)
            return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipes, 'recipe_class', lambda name: Reads)
        recipe = recipes.answering_recipe(types.SimpleNamespace(recipe='reads'))
    scripts = {(5, 1, 0, 0): '<answer>Hesse</answer>'}
    answered, _, _ = play('search', scripts, recipe=recipe, room=1000)
    assert [(one.score, one.given) for one in answered] == [(0.0, None), (1.0, 'Hesse')]
    assert 'counts as unanswered: Recipe.answer dropped it (prompt_too_long)' in caplog.text
    rows = play('held out', scripts, recipe=recipe, room=1000)[0]
    assert [row.reward for row in rows] == [0, 1]
    assert [row.drop for row in rows] == ['prompt_too_long', None]


def test_one_search_for_the_question_stands_in_the_prompt(play):
    scripts = {(5, 0, 0, 0, 0): '<answer>Bob</answer>', (5, 1, 0, 0, 0): '<answer>Bremen</answer>'}
    answered, prompts, queries = play('retrieve', scripts)
    assert [(one.score, one.searches) for one in answered] == [(1.0, 1), (0.0, 1)]
    assert (
        'Found for Who taught Ann?' in prompts[5, 0, 0, 0]
        and 'Found for Where' in prompts[5, 1, 0, 0]
    )
    assert sorted(queries) == sorted(question.text for question in QUESTIONS)
    with pytest.raises(UserError, match='cannot search; add search to config.tools.names'):
        play('retrieve', scripts, tools={})


def test_a_search_that_fails_gives_no_passages(play, caplog):
    scripts = {(5, 0, 0, 0, 0): '<answer>Bob</answer>', (5, 1, 0, 0, 0): '<answer>Hesse</answer>'}
    answered, prompts, _ = play('retrieve', scripts, failing='Who taught Ann?')
    assert [one.score for one in answered] == [1.0, 1.0]
    assert 'failed' not in prompts[5, 0, 0, 0] and 'Found' in prompts[5, 1, 0, 0]
    assert '--answering=retrieve: 1 of 2 searches failed' in caplog.text


def test_every_sentence_is_a_search_until_the_answer_or_the_last_one(play):
    scripts = {
        # Question, sample, number of searches; 0: after the last one.
        (5, 0, 0, 1, 0): '<think>Ann was taught by Bob. And so on.</think>',
        (5, 0, 0, 2, 0): 'So <answer>Bob</answer>',
        (5, 1, 0, 1, 0): 'Ulm lies on the Danube.',
        (5, 1, 0, 2, 0): 'The Danube is long.',
        (5, 1, 0, 0, 0): '<answer>Hesse</answer>',
    }
    answered, prompts, queries = play('interleave', scripts)
    assert [(one.score, one.searches) for one in answered] == [(1.0, 2), (1.0, 2)]
    assert 'Ann was taught by Bob.' in queries and 'The Danube is long.' not in queries
    second = prompts[5, 0, 0, 2]
    assert 'Found for Who taught Ann?' in second and 'Found for Ann was taught by Bob.' in second
    assert 'Steps so far: Ann was taught by Bob.' in second
    reading = prompts[5, 1, 0, 0]
    assert 'Found for Ulm lies on the Danube.' in reading and 'Steps so far' not in reading


def test_the_oldest_passages_give_way_in_a_short_slot(play, policy):
    scripts = {
        (5, 0, 0, 1, 0): f'{"Bob " * 60}.',
        (5, 0, 0, 2, 0): '<answer>Bob</answer>',
        (5, 1, 0, 1, 0): '<answer>x</answer>',
    }
    whole = play('interleave', scripts)[1][5, 0, 0, 2]
    assert 'Found for Who' in whole
    # Ten tokens fewer than both passages need, beside the turn.
    slot = len(policy[0].encode(whole)) + 200 - 10
    answered, prompts, _ = play('interleave', scripts, context=slot)
    assert answered[0].score == 1.0 and 'Found for Who' not in prompts[5, 0, 0, 2]
    assert 'Found for Bob Bob' in prompts[5, 0, 0, 2]


def test_best_and_majority_of_samples(play):
    texts = ('<answer>Eve</answer>', '<answer>bob.</answer>', '<answer>eve</answer>')
    scripts = {(5, 0, sample, 0, 0): text for sample, text in enumerate(texts)}
    (answered,), _, _ = play('direct', scripts, samples=3)
    assert (answered.samples, answered.score, answered.vote) == ((0.0, 1.0, 0.0), 1.0, 0.0)


@pytest.mark.parametrize('name', protocols.PROTOCOLS)
def test_the_lengths_of_a_protocol_fit_the_config_of_its_paper(name):
    config = fields.config(name)

    def put(field, value):
        section, _, of_section = field.partition('.')
        if of_section:
            config[section][of_section] = value
        return ''

    assert protocols.apply(name, put).startswith(f'protocol {name}: ')
    # A search server needs no files.
    config.retrieval.update(kind='http', url='http://127.0.0.1:1')
    assert not [*rules.lines(config, is_training=False, has_files=False)]
