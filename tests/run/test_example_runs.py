"""The examples train: hints, contexts that are folded, rewards of turns."""

import numpy as np
import run_library
from run_files import lines

from examples.folding import recipe


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
    assert any(step.get('solver/gradient_norm') for step in solver_steps(workdir))
    logged = lines(workdir, 'trajectories.jsonl')
    # Evaluations ask in the recipe's own way.
    assert all(len(row['rollout']) > 3 for row in logged if row['phase'] == 'evaluation')
    solved = [row for row in logged if row['phase'] == 'solver']
    notes = {s['text'] for row in solved for s in row['segments'] if s['source'] == 'env'}
    for said in (recipe.SUM_UP, recipe.GO_ON):
        assert any(said in note for note in notes)
