"""The examples train: hints, contexts that are folded, rewards of turns."""

import example_runs
import numpy as np
import run_library
from run_files import lines

from examples.folding import recipe
from examples.turn_credit.recipe import evidence_gains
from zeroplay_jax.types import ToolCall, Turn
from zeroplay_jax.types import Trajectory as Rollout


def solver_steps(workdir):
    return [record for record in lines(workdir) if record['phase'] == 'solver']


def test_hints_are_paid_by_what_they_change_and_both_roles_are_trained(tmp_path_factory):
    steps = solver_steps(run_library.whole('hint', tmp_path_factory))
    assert any(step.get('hinter/gradient_norm', 0.0) > 0 for step in steps)
    assert all(step['scored_tokens'] > 0 for step in steps)
    deltas = [step['hinter/reward/delta'] for step in steps]
    assert np.isfinite(deltas).all() and any(deltas)


def test_rollouts_fold_in_training_and_in_evaluations(tmp_path_factory):
    workdir = run_library.whole('folding', tmp_path_factory)
    steps = solver_steps(workdir)
    assert len(steps) == 3 and any(step.get('solver/gradient_norm', 0.0) > 0 for step in steps)
    logged = lines(workdir, 'trajectories.jsonl')
    # Evaluations ask in the recipe's own way.
    assert all(len(row['rollout']) > 3 for row in logged if row['phase'] == 'evaluation')
    logged = [row for row in logged if row['phase'] == 'solver']
    notes = [s['text'] for row in logged for s in row['segments'] if s['source'] == 'env']
    assert any(recipe.SUM_UP in text for text in notes)
    assert any(recipe.GO_ON in text for text in notes)


def test_the_config_of_the_league_is_sound():
    example_runs.make_config('league')


def test_a_search_earns_what_it_adds():
    def search(*texts):
        passages = tuple({'title': 't', 'text': text} for text in texts)
        return Turn('s', ToolCall('search', {'query': 'q'}, documents=(passages,)))

    refused = Turn('s', ToolCall('search', None, error='malformed'))
    turns = (search('nothing'), refused, search('none', 'in Lomi.'), search('Lomi'), Turn('Lomi'))
    empty = np.zeros(0)
    rollout = Rollout(empty, empty, empty, turns, 'answer', 'w', 0, (0,))
    gains = evidence_gains(rollout, ('Lomi', 'Lomi City'))
    np.testing.assert_array_equal(gains, [0, np.nan, 1, 0, np.nan])
