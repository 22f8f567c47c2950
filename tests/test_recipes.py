"""Every recipe's small variant, whole: each stage is exercised. run/test_kills.py kills them."""

import pytest
import run_library
from run_files import lines, summary_of

from zeroplay_jax.configuration import fields
from zeroplay_jax.selfplay.recipe import trained_roles

# System → the metrics that prove its stages ran.
SYSTEMS = {
    'drzero': 'proposer/reward/difficulty proposer/k_histogram/0 solver/reward/exact_match',
    'piplay': 'proposer/reward/difficulty solver/distill_divergence solver/teacher_share',
    'dspo': (
        'solver/filter/kept solver/filter/surplus solver/clip_share solver/reward/contains_answer subem/mean'
    ),
    'scope': (
        'solver/score solver/answer_tokens solver/reward/length_factor solver/kl '
        'proposer/reward/difficulty judge/asked'
    ),
    'ssp': (
        'proposer/rejected/leaks_answer proposer/rejected/unanswerable proposer/reward/hard solver/kl '
        'proposer/tool_calls/search solver/tool_calls/search solver/prompt_tokens solver/response_tokens'
    ),
    'cross': 'solver/filter/kept solver/distill_divergence proposer/reward/difficulty',
}


# `cross` combines parts of the others, and other tests play whole runs of `drzero` and `ssp` (test_hosts.py).
LONG = pytest.mark.long
ELSEWHERE = ('drzero', 'ssp', 'cross')
ALL_SYSTEMS = [pytest.param(name, marks=LONG if name in ELSEWHERE else ()) for name in SYSTEMS]


@pytest.fixture(params=ALL_SYSTEMS)
def whole(request, tmp_path_factory):
    return request.param, run_library.whole(request.param, tmp_path_factory)


def test_every_stage_ran(whole):
    system, workdir = whole
    records = lines(workdir)
    logged = {name for record in records for name in record if record[name] is not None}
    assert logged >= set(SYSTEMS[system].split())
    # The default levels are none that a healthy run reaches.
    assert lines(workdir, 'alarms.jsonl') == []
    summary = summary_of(workdir)
    assert (summary['outside_questions'] > 0) == (system in ('dspo', 'ssp'))
    assert ('rubrics' in summary['results']) == (system == 'scope')
    solved = [t for t in lines(workdir, 'trajectories.jsonl') if t['phase'] == 'solver']
    shown = [t['teacher'] for t in solved if t['teacher']]
    assert bool(shown) == (system in ('piplay', 'cross'))
    assert all('Path:' in text for text in shown)


def test_every_trained_role_is_updated_by_rewards_that_differ(whole):
    system, workdir = whole
    config = fields.config(system, 'mini')
    for role in trained_roles(config):
        # Rewards that are equal within a group move nothing; a teacher would move the policy all the same.
        names = [f'{role}/gradient_norm']
        if config[role].baseline != 'none':
            names.append(f'{role}/informative_groups')
        for name in names:
            assert any(record.get(name) for record in lines(workdir)), name


def test_generation_ends_at_its_target(tmp_path_factory):
    records = lines(run_library.whole('scope', tmp_path_factory))
    generated = [record for record in records if record['phase'] == 'generate']
    before = [0, *(record['pool_size'] for record in generated)]
    assert len(generated) == 3 and before[-1] >= 1
    for record, pool_size in zip(generated, before):
        # Nothing is played once a task stands.
        assert bool(record['rollouts']) == (pool_size < 1)
