"""Every recipe's small variant, whole: each stage is exercised, and a killed run ends as if nothing had happened."""

import pytest
from python_process import config_flags, finish, kill, start_python, wait_for
from run_files import check_same_run, count_steps, lines, summary_of

from zeroplay_jax.configuration import fields
from zeroplay_jax.selfplay.recipe import recipe_class

# In so few rollouts a step may have no reward variance.
SMALL = """
    world.train=(0,4) world.evaluation=(0,2) eval.questions=2 sampler.slots=16 micro.rows=2 stop_after_empty_steps=0
    log.writers=()
"""
TWO = """
    proposer.steps=2 proposer.batch=8 pool.batch=8 pool.batches=1 schedule.hop_ratio=(2,1,1) solver.batch=4
    solver.steps=2
"""
# System → what makes its small variant a little smaller still, and the metrics that prove its stages ran.
SYSTEMS = {
    'drzero': (TWO, 'proposer/reward/difficulty proposer/k_histogram/0 solver/reward/exact_match'),
    'piplay': (TWO, 'proposer/reward/difficulty solver/distill_divergence solver/teacher_share'),
    'dspo': (
        'solver.batch=4',
        'solver/filter/kept solver/filter/surplus solver/clip_share solver/reward/contains_answer subem/mean',
    ),
    'scope': (
        'proposer.steps=2 proposer.batch=4 solver.steps=2 solver.batch=4 pool.batch=4 pool.batches=3 pool.target=1',
        'solver/score solver/answer_tokens solver/reward/length_factor solver/kl '
        'proposer/reward/difficulty judge/asked',
    ),
    'ssp': (
        '',
        'proposer/rejected/leaks_answer proposer/rejected/unanswerable proposer/reward/hard solver/kl '
        'proposer/tool_calls/search solver/tool_calls/search solver/prompt_tokens solver/response_tokens',
    ),
    'cross': (TWO, 'solver/filter/kept solver/distill_divergence proposer/reward/difficulty'),
}


def command(system):
    """The words of its run, but for the workdir."""
    flags = config_flags(SMALL + SYSTEMS[system][0])
    return ['-m', 'zeroplay_jax.main', f'--config=configs/{system}.py:mini', *flags]


def start(system, workdir):
    return start_python(*command(system), f'--workdir={workdir}')


# `cross` combines parts of the others, and other tests play whole runs of `drzero` and `ssp` (test_hosts.py).
LONG = pytest.mark.long
ELSEWHERE = ('drzero', 'ssp', 'cross')
ALL_SYSTEMS = [pytest.param(name, marks=LONG if name in ELSEWHERE else ()) for name in SYSTEMS]


@pytest.fixture(scope='module', params=ALL_SYSTEMS)
def whole(request, tmp_path_factory):
    workdir = tmp_path_factory.mktemp('recipes') / request.param
    finish(start(request.param, workdir))
    return request.param, workdir


def test_every_stage_ran(whole):
    system, workdir = whole
    records = lines(workdir)
    logged = {name for record in records for name in record if record[name] is not None}
    assert logged >= set(SYSTEMS[system][1].split())
    # The default levels are none that a healthy run reaches.
    assert lines(workdir, 'alarms.jsonl') == []
    summary = summary_of(workdir)
    assert (summary['outside_questions'] > 0) == (system in ('dspo', 'ssp'))
    assert records[0]['phase'] == records[-1]['phase'] == 'evaluation'
    graded = summary['results'].get('rubrics', {})
    assert bool(graded) == (system == 'scope')
    assert all(len(scores) == 8 for scores in graded.values())


def of_role(record, role, name):
    return record.get(f'{role}/{name}')


@pytest.mark.fault('user-3', 'a `:mini` run, whose every role is to be trained by its rewards')
def test_every_trained_role_is_updated_by_rewards_that_differ(whole):
    system, workdir = whole
    records = lines(workdir)
    config = fields.config(system, 'mini')
    roles = [role for role in recipe_class(config.recipe).roles(config) if role.is_trained]
    shares = []
    for role in roles:
        steps = [r for r in records if r['phase'] in (role.name, 'selfplay')]
        assert any(of_role(record, role.name, 'gradient_norm') for record in steps), role.name
        # Rewards that are equal within a group move nothing; a teacher would move the policy all the same.
        is_compared = config[role.name].baseline != 'none'
        share = max(of_role(record, role.name, 'informative_groups') or 0 for record in steps)
        assert share or not is_compared, role.name
        shares.append(f'{role.name} {share:.0%}')


def test_generation_ends_at_its_target(whole):
    system, workdir = whole
    generated = [record for record in lines(workdir) if record['phase'] == 'generate']
    if system != 'scope':
        assert all(record['rollouts'] for record in generated)
        return
    before = [0, *(record['pool_size'] for record in generated)]
    for record, pool_size in zip(generated, before):
        # Nothing is played once a task stands.
        assert bool(record['rollouts']) == (pool_size < 1)
    assert len(generated) == 3 and before[-1] >= 1


def test_what_a_teacher_was_shown_is_in_the_log(whole):
    system, workdir = whole
    solved = [t for t in lines(workdir, 'trajectories.jsonl') if t['phase'] == 'solver']
    shown = [t['teacher'] for t in solved if t['teacher']]
    assert bool(shown) == (system in ('piplay', 'cross'))
    assert all('Path:' in text for text in shown)


# tests/test_run.py kills `drzero`, and tests/test_package.py a recipe from outside.
KILLED = [pytest.param(name, marks=LONG) for name in SYSTEMS if name not in ('drzero', 'cross')]


@pytest.mark.parametrize('whole', KILLED, indirect=True)
def test_a_kill_changes_nothing(whole, tmp_path):
    system, first = whole
    workdir = tmp_path / 'killed'
    process = start(system, workdir)
    wait_for(lambda: count_steps(workdir) >= 3, process)
    kill(process)
    finish(start(system, workdir))
    check_same_run(first, workdir)
