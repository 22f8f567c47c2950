"""The example that folds its context: every context is trained, and a killed run ends with the same bits."""

import example_runs
import killed_runs
import pytest
from nat.atif import Trajectory
from run_files import check_same_run, lines

from examples.folding import recipe
from zeroplay_jax import export
from zeroplay_jax.run import loop


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    rows = []
    episode = recipe.Recipe.episode

    async def noted(self, *arguments):
        outcome = await episode(self, *arguments)
        rows.extend(outcome.rows)
        return outcome

    workdir = tmp_path_factory.mktemp('folding') / 'whole'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe.Recipe, 'episode', noted)
        loop.run(example_runs.make_config('folding'), workdir)
    return workdir, rows


def test_rollouts_fold_and_are_trained_with_all_their_contexts(whole):
    workdir, rows = whole
    steps = [record for record in lines(workdir) if record['phase'] == 'solver']
    assert len(steps) == 3 and any(step.get('solver/gradient_norm', 0.0) > 0 for step in steps)
    folded = [row.trajectory for row in rows if row.trajectory.earlier]
    assert len(folded) > 4 and {len(t.earlier) for t in folded} <= {1, 2}
    for rollout in folded:
        sampled = sum(turn.stop - turn.start for turn in rollout.turns)
        assert sampled == rollout.policy_tokens
        # The last context is shorter than the one with all that was read.
        assert rollout.starts.count(-1) >= 1
    logged = lines(workdir, 'trajectories.jsonl')
    # Evaluations ask in the recipe's own way.
    assert all(len(row['rollout']) > 3 for row in logged if row['phase'] == 'evaluation')
    logged = [row for row in logged if row['phase'] == 'solver']
    notes = [s['text'] for row in logged for s in row['segments'] if s['source'] == 'env']
    assert any(recipe.SUM_UP in text for text in notes)
    assert any(recipe.GO_ON in text for text in notes)


@pytest.mark.fault('nov29-D6', 'export --trajectories of a run whose recipe speaks between turns')
def test_what_a_recipe_says_between_turns_is_a_step_of_a_user(whole, tmp_path):
    pytest.importorskip('zeroplay_jax.extras.atif')
    workdir, _ = whole
    out = tmp_path / 'documents'
    assert export.main([str(workdir), '--trajectories', '--out', str(out)]) == 0
    said = []
    for path in out.iterdir():
        document = Trajectory.model_validate_json(path.read_text())
        # The first step is the prompt.
        said += [step.message for step in document.steps[1:] if step.source == 'user']
        observed = [step.observation for step in document.steps if step.observation]
        contents = [result.content for each in observed for result in each.results]
        assert not any('<|im_' in text or recipe.SUM_UP in text for text in contents)
    assert set(said) == {recipe.SUM_UP, recipe.GO_ON}


@pytest.mark.long
def test_a_killed_run_ends_with_the_same_bits(whole, tmp_path, monkeypatch):
    workdir, _ = whole
    killed = tmp_path / 'killed'
    killed_runs.run_until(2, monkeypatch, example_runs.make_config('folding'), killed)
    loop.run(example_runs.make_config('folding'), killed)
    check_same_run(workdir, killed)
