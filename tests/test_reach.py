"""What the benchmark of k samples counts, on rollouts written by hand."""

import asyncio
import dataclasses
import itertools
import types

import numpy as np
import pytest
from trajectories import make_trajectory

from benchmarks import reach
from benchmarks.command import RESULTS
from zeroplay_jax.evaluation import answering
from zeroplay_jax.rollout.call_syntax import syntax_of
from zeroplay_jax.rollout.environment import Environment, Limits
from zeroplay_jax.tools.search import SearchTool
from zeroplay_jax.types import Question, ToolCall, Turn

TAGS = {'<search>': [8], '<answer>': [9]}
CODEC = types.SimpleNamespace(encode=TAGS.__getitem__)
ENV = Environment(CODEC, syntax_of('search_r1'), Limits(3, 8, 8), {'search': SearchTool(None)})


def search(query, documents=(({'title': 'T'},),)):
    return Turn('', ToolCall('search', {'query_list': [query]}, documents=documents))


def answered(text, *queries):
    """A rollout that searches and answers; its answer begins at its third token."""
    turns = *map(search, queries), Turn(f'<answer>{text}</answer>')
    return dataclasses.replace(make_trajectory(*turns), tokens=np.array([1, 2, 9, 3], np.int32))


def context_of(*replies):
    """A context in which requests get these rollouts, one after the other, and the list of the requests."""
    requests, left = [], list(replies)

    async def rollout(request):
        requests.append(request)
        return [left.pop(0)]

    def run(episodes):
        return [asyncio.run(episode) for episode in episodes]

    scheduler = types.SimpleNamespace(rollout=rollout, run=run)
    roles = {'solver': types.SimpleNamespace(env=ENV, weights='w')}
    return types.SimpleNamespace(roles=roles, scheduler=scheduler), requests


def test_pass_at_k_is_the_share_of_draws_with_a_right_sample():
    for right, k in itertools.product(range(7), range(1, 7)):
        draws = list(itertools.combinations([True] * right + [False] * (6 - right), k))
        assert reach.pass_at(6, right, k) == pytest.approx(np.mean(list(map(any, draws))))


def test_searches_that_differ_and_found_something():
    turns = search('Source of  Lomi'), search('source of lomi'), search('Gumu'), search('R', ((),))
    assert reach.different_searches(make_trajectory(*turns)) == 2


def test_a_begun_search_is_read_with_its_tag():
    fields = {field.name: getattr(ENV, field.name) for field in dataclasses.fields(ENV)}
    env = reach.BegunSearch(**fields)
    assert env.end_turn('Gumu</search>').call.queries == ['Gumu']
    assert env.end_turn('<search>Rim</search>').call.queries == ['Rim']
    assert env.end_turn('<answer>Rim</answer>').done


def test_a_forced_rollout_searches_where_it_would_answer():
    context, requests = context_of(answered('B', 'Gumu'))
    forced = asyncio.run(reach.force(context, 'solver', answered('A', 'Lomi'), 2))
    assert [request.prompt.tolist() for request in requests] == [[1, 2, 8]]
    # One of three turns is over.
    assert requests[0].env.limits.max_turns == 2 and requests[0].weights == 'w'
    assert forced.turns == (search('Lomi'), search('Gumu'), Turn('<answer>B</answer>'))


@pytest.mark.parametrize(
    'early',
    [
        answered('A', 'Lomi', 'Gumu', 'Rim'),  # has enough
        answered('A', 'Lomi', 'Lomi'),  # no turn is left
        dataclasses.replace(answered('A', 'Lomi'), finish='turns'),
        make_trajectory(search('Lomi'), Turn('A</answer>')),
    ],
)
def test_what_cannot_be_forced_stays(early):
    context, requests = context_of()
    assert asyncio.run(reach.force(context, 'solver', early, 3)) is early and not requests


def test_counts_of_a_question(monkeypatch):
    played = [answered('Bob', 'Lomi', 'Gumu'), answered('Bob', 'Lomi'), answered('Al', 'Lomi')]

    recipe = types.SimpleNamespace(evaluated_role='solver')

    async def answer(context, answers, identity, question, samples, temperature):
        assert (answers, identity, samples, temperature) == (recipe, (0, 0), 3, 1.0)
        return played

    monkeypatch.setattr(answering, 'answer', answer)
    context, _ = context_of(answered('Al', 'Gumu'), answered('Bob', 'Gumu'))
    run = types.SimpleNamespace(evaluation=context)
    (count,) = reach.play(run, 'start', [Question('Who?', ('Bob',), 2)], 3, recipe)
    assert count == reach.Count('start', 2, 3, 2, 1, 1, 3, 3, 2)


def test_the_tables_and_the_file(tmp_path, monkeypatch, capsys):
    counts = [
        reach.Count('start', 3, 4, 1, 2, 1, 2, 2, 1),
        reach.Count('start', 3, 4, 0, 0, 0, 2, 1, 0),
        reach.Count('trained', 3, 4, 4, 4, 4, 2, 2, 2),
        reach.Count('trained', 3, 4, 0, 2, 0, 2, 2, 0),
    ]
    monkeypatch.setattr(reach, 'measure', lambda *_: counts)
    out = tmp_path / 'reach.tsv'
    reach.main(['policy', '--out', str(out)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == '| hops | policy | pass@1 | pass@2 | pass@4 |'
    start, trained = '| 3 | start | 0.12 | 0.25 | 0.50 |', '| 3 | trained | 0.50 | 0.50 | 0.50 |'
    assert lines[4:6] == [start, trained]
    assert lines[6].startswith('| 3 | change | +0.375 [')
    start, trained = (
        '| 3 | start | 0.25 | 0.50 | 0.75 | 0.25 |',
        '| 3 | trained | 0.75 | 0.67 | 1.00 | 0.50 |',
    )
    assert lines[-2:] == [start, trained]
    assert out.read_text().splitlines()[1] == 'start\t3\t4\t1\t2\t1\t2\t2\t1'


def test_the_page_has_the_figures_of_the_stored_counts():
    lines = [line.split('\t') for line in (RESULTS / 'reach.tsv').read_text().splitlines()[1:]]
    counts = [reach.Count(policy, *map(int, numbers)) for policy, *numbers in lines]
    page = (RESULTS.parent.parent / 'docs' / 'results.md').read_text()
    last = [row[-1] for row in reach.pass_rows(counts, 'enough_right')]
    # Of three hops first: start, trained, change.
    for start, trained in (last[3:5], last[6:8]):
        assert f'{start[1:]} → {trained[1:]}' in page
    assert last[9:11] == ['0.00', '0.00'] and 'none with six' in page
    three, trained_three, four, trained_four = reach.search_rows(counts)[:4]
    words = ' '.join(page.split())
    assert f'{three[-1][1:]} with three, {four[-1][1:]} with four' in words
    assert f'{three[3][1:]} are right with three (trained {trained_three[3][1:]}), ' in words
    assert f'{four[3][1:]} with four (trained {trained_four[3][1:]})' in words
