"""The rows of five papers: each has the model, calls, metric and steps of its paper."""

import json
import re
import tomllib

import input_files
import pytest
from python_process import ROOT, run_python

from zeroplay_jax.configs import ablations
from zeroplay_jax.configuration import fields
from zeroplay_jax.selfplay import recipe as recipes


def rows_of_papers():
    """Row → what the papers say of it, by hand; None of one that no paper has."""
    rows = {}
    for line in (ROOT / 'tests' / 'golden' / 'rows.txt').read_text(encoding='utf-8').splitlines():
        if line and not line.startswith('#'):
            row, *columns = re.split(r'  +', line)
            rows[row] = columns or None
    return rows


def config_of(row, variant=''):
    if '/' in row:
        return ablations.get_config(f'{row}:{variant}')
    return fields.config(row, variant)


def phases_of(config):
    """The schedule, which is a function of the config alone."""
    return recipes.answering_recipe(fields.frozen(config)).phases()


def measures_of(config):
    """What answers are paid and measured by."""
    recipe = recipes.recipe_class(config.recipe)
    if 'grade' in recipe.judgements(fields.frozen(config)):
        return {'rubrics'}
    measured = config.eval.metric
    # Exact match is always measured.
    return {config.reward.answer, 'em' if measured == 'none' else measured}


def as_many_steps(said, steps):
    """Whether a role's steps per iteration are what a paper says: 3x50, 150-200, >150, 0, or -."""
    if said == '-':
        return True
    if 'x' in said:
        iterations, of_each = map(int, said.split('x'))
        return steps == [of_each] * iterations
    if said.startswith('>'):
        return sum(steps) > int(said[1:])
    low, _, high = said.partition('-')
    return int(low) <= sum(steps) <= int(high or low)


ROWS_OF_PAPERS = rows_of_papers()


def test_every_row_is_read_from_its_paper_or_is_called_ours_and_stands_on_the_page():
    assert ROWS_OF_PAPERS.keys() == {*recipes.BUILT_IN, *ablations.ROWS}
    papers = tomllib.loads((ROOT / 'docs' / 'papers.toml').read_text(encoding='utf-8'))
    assert ablations.ROWS.keys() == set().union(*(row.get('rows', ()) for row in papers.values()))


@pytest.mark.parametrize('row', [row for row, said in ROWS_OF_PAPERS.items() if said])
def test_a_row_has_model_engine_calls_metric_and_steps_of_its_paper(row):
    _, model, engine, calls, metric, of_proposer, of_solver = ROWS_OF_PAPERS[row]
    config = config_of(row)
    assert model in ('-', config.policy.path.removeprefix('checkpoints/'))
    assert calls in ('-', config.tools.syntax)
    searched = config.retrieval.path.rpartition('_')[2] if config.tools.names else 'none'
    assert (searched, measures_of(config)) == (engine, {metric})
    steps = {'proposer': [], 'solver': []}
    for phase in phases_of(config):
        for role in phase.trains:
            steps[role].append(phase.steps)
    assert as_many_steps(of_proposer, steps['proposer']), steps
    assert as_many_steps(of_solver, steps['solver']), steps


def test_the_page_counts_the_elements_of_the_table():
    lines = (ROOT / 'benchmarks/results/elements.tsv').read_text(encoding='utf-8').splitlines()[1:]
    verdicts = [line.split('\t')[4].split()[0] for line in lines]
    page = ' '.join((ROOT / 'docs/papers.md').read_text(encoding='utf-8').split())
    right, differ, left_out = map(verdicts.count, ('right', 'differs', 'left'))
    assert f'Of {len(lines)} elements of the papers' in page
    said = f'{right} are here as in the paper, {differ} differ and {left_out} are left out'
    assert said in page and right + differ + left_out == len(lines)


@pytest.mark.parametrize('variant', ['', 'mini'])
def test_an_iteration_more_is_a_longer_schedule(variant):
    for row in ROWS_OF_PAPERS:
        config = config_of(row, variant)
        phases = phases_of(config)
        config.schedule.iterations += 1
        longer = phases_of(config)
        assert longer[: len(phases)] == phases and len(longer) > len(phases), row


def test_one_policy_searches_and_another_answers(tmp_path):
    asked = input_files.write(
        tmp_path / 'set.jsonl', {'question': 'Where is Mimi?', 'answer': 'Lomi'}
    )
    (tmp_path / 'other').symlink_to(ROOT / 'zeroplay_jax' / 'mini' / 'base')
    command = f"""-m zeroplay_jax.evaluate --config=configs/scope.py:mini --out={tmp_path}/out.json --sets={asked}
        --policy=zeroplay_jax/mini/base --answerer={tmp_path}/other
        --config.world.train=(0,4) --config.world.evaluation=(0,1)"""
    done = run_python(*command.split())
    assert not done.returncode, done.stderr
    written = json.loads((tmp_path / 'out.json').read_text())
    assert written['settings']['answerer'] == f'{tmp_path}/other'
