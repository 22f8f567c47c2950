"""The launch scripts: what they would run, and what they refuse."""

import re
import shlex

import pytest
from launch_cases import OPTIONS, ROOT, RUN, call, fake


def dry_run(script, *options, run=RUN):
    """The commands that a dry run prints, as lists of words."""
    result = call(script, *OPTIONS[script], *options, '--dry-run', '--', *run, path='/nowhere')
    assert result.returncode == 0, result.stderr
    assert not result.stderr
    return [
        words for line in result.stdout.splitlines() if (words := shlex.split(line, comments=True))
    ]


# What they would run


@pytest.mark.parametrize('script', OPTIONS)
def test_help_shows_an_example_that_is_accepted(script):
    result = call(script, '--help')
    assert result.returncode == 0 and not result.stderr
    # From 'Example' to the end of the command, whose lines but the last end in a backslash.
    example = result.stdout[result.stdout.index('\nExample') :]
    command = example[example.index(f'launch/{script}.sh') :].replace('\\\n', ' ').split('\n')[0]
    words = shlex.split(command)
    assert words[0] == f'launch/{script}.sh' and '--workdir=' in command
    assert call(script, '--dry-run', *words[1:]).returncode == 0
    mentioned = {
        word
        for line in result.stdout.splitlines()
        if line.startswith('  --')
        for word in [line.split()[0]]
    }
    assert (
        '--dry-run' in mentioned
        and {w for w in OPTIONS[script] if w.startswith('--') and '=' not in w} <= mentioned
    )


def test_local_starts_two_processes_that_differ_in_their_number_only():
    first, second = dry_run('local_2proc')
    assert first[:-1] == second[:-1]
    assert [first[-1], second[-1]] == [
        '--config.distributed.process=0',
        '--config.distributed.process=1',
    ]
    assert first[:3] == [
        'env',
        'JAX_PLATFORMS=cpu',
        'XLA_FLAGS=--xla_force_host_platform_device_count=2',
    ]
    assert first[3:6] == ['.venv/bin/python', '-m', 'zeroplay_jax.main']
    assert first[6:-1] == [
        *RUN,  # with sizes of the mesh, which are left as they are
        '--config.distributed.mode=coordinator',
        '--config.distributed.coordinator=127.0.0.1:23456',
        '--config.distributed.processes=2',
    ]
    by_default = dry_run('local_2proc', run=RUN[:2])[0]
    assert {'--config.mesh.replica=2', '--config.mesh.fsdp=2'} <= set(by_default)


def test_tpu_vm_asks_installs_runs_and_gives_back():
    commands = dry_run('tpu_vm')
    assert [c[0] for c in commands] == ['gcloud', 'tar', *['gcloud'] * 6]
    create, *_, delete = commands
    assert (
        create[1:6] == ['compute', 'tpus', 'queued-resources', 'create', 'zero']
        and create[-1] == '--spot'
    )
    assert {
        '--accelerator-type',
        'v5litepod-16',
        '--runtime-version',
        'v2-alpha-tpuv5-lite',
    } <= set(create)
    assert delete[3:6] == ['queued-resources', 'delete', 'zero'] and delete[-2:] == [
        '--force',
        '--quiet',
    ]
    install, setup, run = (c[c.index('--command') + 1] for c in commands[4:7])
    assert all('--worker=all' in c for c in commands[3:7])
    assert 'launch/install.sh tpu' in install and setup == "mount 'a b'"
    words = shlex.split(run)  # as the worker's shell reads it
    start = words.index('.venv/bin/python')
    assert words[start + 1 : words.index('2>&1')] == [
        '-m',
        'zeroplay_jax.main',
        *RUN,
        '--config.distributed.mode=auto',
    ]
    # Only the run's own command line may look like a run: what ends old runs is not to end itself.
    assert 'zeroplay_jax.main' not in install.replace('[z]eroplay_jax.main', '')
    assert '--spot' not in dry_run('tpu_vm', '--on-demand')[0]
    assert dry_run('tpu_vm', '--runtime=other')[0][-2] == 'other'


def test_xpk_packs_the_project_and_creates_a_workload():
    # Two slices have eight hosts, each with replicas of its own.
    replicas = [*RUN[:2], '--config.mesh.replica=8', *RUN[3:]]
    *pack, create = dry_run('xpk', '--slices', '2', run=replicas)
    assert [c[0] for c in pack] == ['mkdir', 'tar', 'tar']
    assert create[:3] == ['xpk', 'workload', 'create']
    value = lambda name: create[create.index(name) + 1]
    assert (
        value('--workload') == 'zero'
        and value('--num-slices') == '2'
        and value('--tpu-type') == 'v5litepod-16'
    )
    assert value('--script-dir') == pack[0][-1] == pack[-1][-1]
    install, run = value('--command').split(' && ')
    assert shlex.split(install) == [
        'pip',
        'install',
        '--quiet',
        '-r',
        'requirements.txt',
        'jax[tpu]',
        '-r',
        'requirements-bucket.txt',
    ]
    assert shlex.split(run) == [
        'python',
        '-m',
        'zeroplay_jax.main',
        *replicas,
        '--config.distributed.mode=auto',
    ]
    assert value('--restart-on-exit-codes') == '1,75'
    delete, create = dry_run('xpk', '--image', 'mine:1', '--again')
    assert delete[:3] == ['xpk', 'workload', 'delete'] and '--script-dir' not in create
    assert shlex.split(create[-1])[:3] == ['python', '-m', 'zeroplay_jax.main']


def test_slurm_submits_one_process_per_node_with_all_its_gpus():
    make, submit = dry_run('slurm')
    assert make == ['mkdir', '-p', 'runs/slurm']
    value = lambda name: submit[submit.index(name) + 1]
    assert submit[0] == 'sbatch' and '--requeue' in submit
    assert (
        value('--nodes') == '2'
        and value('--ntasks-per-node') == '1'
        and value('--gpus-per-node') == '4'
    )
    assert value('--time') == '1-12:00:00' and '--partition' not in submit
    command, requeue = value('--wrap').split('; ', 1)
    assert 'if [ $status = 75 ]; then scontrol requeue $SLURM_JOB_ID' in requeue
    assert value('--signal') == 'TERM@120' and requeue.endswith('exit $status')
    step = shlex.split(command)
    assert step[0] == 'srun' and 'JAX_LOCAL_DEVICE_IDS=0,1,2,3' in step
    assert step[step.index('.venv/bin/python') + 1 :] == [
        '-m',
        'zeroplay_jax.main',
        *RUN,
        '--config.distributed.mode=auto',
    ]


ONE_RUN = ('launch/README.md', 'launch/tpu_vm.sh', 'launch/xpk.sh', 'configs/drzero.py')
ONE_RUN += ('docs/buckets.md', 'docs/texts-to-tpu.md')
# Where the files of a run lie, and what belongs to a corpus.
PLACES = ('workdir', 'policy', 'index', 'config.policy.path', 'config.retrieval', 'config.eval')
PLACES += ('config.inputs', 'config.schedule.hop_ratio')


@pytest.mark.fault('user-6', 'the commands of a run of Dr. Zero on a v5litepod-16')
def test_every_page_has_the_same_flags_for_one_run_on_one_slice(user_reads):
    flags_of = {}
    for page in ONE_RUN:
        text = re.sub(r'\\+\n\s*', ' ', (ROOT / page).read_text())
        launch = r'launch/(?:tpu_vm|xpk)\.sh [^\n`]*v5litepod-16[^\n`]* --config=configs/drzero\.py [^\n`]*'
        for number, command in enumerate(re.findall(launch, text)):
            flags = re.findall(r'--([\w.]+)=(\S+)', command.split(' -- ')[1])
            flags_of[page, number] = {
                name: value for name, value in flags if not name.startswith(PLACES)
            }
    assert {page for page, _ in flags_of} == set(ONE_RUN) and len(flags_of) >= 7
    (first, *others) = flags_of.values()
    assert all(flags == first for flags in others), flags_of
    user_reads(f'right: {len(flags_of)} commands with the same {len(first)} flags')


def test_a_dry_run_makes_nothing(tmp_path):
    for script in OPTIONS:
        run = [RUN[0], f'--workdir={tmp_path}/run', *RUN[2:]]
        assert dry_run(script, run=run)
    assert not list(tmp_path.iterdir())


# What they refuse


@pytest.mark.parametrize(
    ('script', 'options', 'run', 'said'),
    [
        ('local_2proc', ['--devices=0'], RUN, '--devices=0 must be a number of devices'),
        ('local_2proc', ['--port', 'here'], RUN, '--port=here must be a port'),
        ('local_2proc', ['--devices'], RUN, '--devices needs a value'),
        ('local_2proc', [], [], 'nothing to run'),
        ('local_2proc', [], ['--config=c.py'], '--workdir=FOLDER is missing'),
        ('local_2proc', ['--workdir=w'], RUN, 'put it after --'),
        ('tpu_vm', ['--name', 'A B'], RUN, '--name=A B must be'),
        ('tpu_vm', ['--zone=nowhere'], RUN, 'such as us-west4-a'),
        ('tpu_vm', ['--type=v9-8'], RUN, '--runtime is missing'),
        ('tpu_vm', [], ['--config=c.py', '--workdir=runs/here'], 'must begin with /'),
        ('tpu_vm', ['--on-demand=maybe'], RUN, '--on-demand takes no value'),
        ('tpu_vm', [], ['--workdir=/w'], '--config=FILE is missing'),
        ('xpk', ['--name='], RUN, '--name is missing: a name of at most 40'),
        ('xpk', [], ['--config=c.py', '--workdir=s3://bucket/run'], 'must begin with /'),
        ('xpk', ['--frob', '1'], RUN, 'no option --frob; see launch/xpk.sh --help'),
        ('slurm', ['--gpus=all'], RUN, '--gpus=all must be the number of GPUs of a node'),
        ('slurm', ['--time=soon'], RUN, '--time=soon must be a time limit'),
        ('slurm', ['more'], RUN, "'more' is no option"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(script, options, run, said):
    result = call(script, *OPTIONS[script], *options, '--dry-run', '--', *run)
    assert result.returncode == 2 and not result.stdout
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith('zeroplay_jax: launch/') and said in result.stderr


NONSENSE = {
    'tpu_vm': (
        '--config.mesh.replica=3',
        'v5litepod-16 has 16 on 4 hosts; give sizes whose product is 16',
    ),
    'xpk': ('--config.nonsense=4', 'config.nonsense: no such field'),
    'slurm': ('--config.solver.batch=0', 'config.solver.batch=0: not possible; give 1 or more'),
    'local_2proc': ('--config.sampler.context=8', 'config.sampler.context=8: too short for'),
}


@pytest.mark.fault('user-5', 'a launch with a misspelt config and flags that cannot work')
@pytest.mark.parametrize('script', OPTIONS)
def test_a_launch_names_all_mistakes_of_the_run_before_anything_is_created(
    script, tmp_path, user_reads
):
    flag, line = NONSENSE[script]
    other = '--config.solver.bacth=2'
    words = [*OPTIONS[script], '--', *RUN, flag, other]
    result = call(script, *words, path=fake(tmp_path, 'gcloud', f'touch {tmp_path}/created'))
    assert result.returncode == 2 and not result.stdout and 'Traceback' not in result.stderr
    assert line in result.stderr and 'did you mean config.solver.batch?' in result.stderr
    assert ' mistakes; nothing was started' in result.stderr
    assert not (tmp_path / 'created').exists()
    misspelt = ['--config=configs/drzerro.py', *RUN[1:]]
    result = call(script, *OPTIONS[script], '--dry-run', '--', *misspelt)
    assert result.returncode == 2 and 'did you mean configs/drzero.py?' in result.stderr
    user_reads(line)


@pytest.mark.parametrize(
    ('script', 'program'), [('tpu_vm', 'gcloud'), ('xpk', 'xpk'), ('slurm', 'sbatch')]
)
def test_a_missing_program_is_named(script, program, tmp_path):
    for tool in ('env', 'bash', 'dirname', 'seq', 'tr'):  # nothing else is on the path
        (tmp_path / tool).symlink_to(f'/usr/bin/{tool}')
    result = call(script, *OPTIONS[script], '--', *RUN, PATH=str(tmp_path))
    assert result.returncode == 2
    assert (
        result.stderr
        == f'zeroplay_jax: launch/{script}.sh: {program} is not installed on this machine\n'
    )
