"""The launch scripts: what they would run, what they refuse, and the two that can run here, two processes on this
machine and the loop around a TPU slice, with a pretended gcloud."""

import os
import pathlib
import shlex
import subprocess
import sys
import textwrap

import pytest

ROOT = pathlib.Path(__file__).parents[1]
LAUNCH = ROOT / 'launch'
RUN = ['--config=configs/drzero.py:mini', "--workdir=/mnt/my share/it's", '--config.mesh.replica=4']
OPTIONS = {
    'local_2proc': ['--devices', '2', '--port', '23456'],
    'tpu_vm': [
        '--name',
        'zero',
        '--zone',
        'us-west4-a',
        '--type',
        'v5litepod-16',
        '--setup',
        "mount 'a b'",
    ],
    'xpk': ['--cluster', 'tpus', '--name', 'zero', '--zone', 'us-west4-a', '--type=v5litepod-16'],
    'slurm': ['--nodes', '2', '--gpus', '4', '--time', '1-12:00:00'],
}


def call(script, *words, path=None, **environment):
    environment = os.environ | {'XLA_FLAGS': ''} | environment
    if path is not None:
        environment['PATH'] = f'{path}:{environment["PATH"]}'
    command = [LAUNCH / f'{script}.sh', *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=40)


def dry_run(script, *options, run=RUN):
    """The commands that a dry run prints, as lists of words."""
    result = call(script, *OPTIONS[script], *options, '--dry-run', '--', *run, path='/nowhere')
    assert result.returncode == 0, result.stderr
    assert not result.stderr
    return [
        words for line in result.stdout.splitlines() if (words := shlex.split(line, comments=True))
    ]


def fake(folder, program, script):
    path = folder / program
    path.write_text('#!/usr/bin/env bash\n' + textwrap.dedent(script))
    path.chmod(0o755)
    return folder


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
        *RUN,  # with a size of the mesh, which is left as it is
        '--config.mesh.fsdp=2',
        '--config.distributed.mode=coordinator',
        '--config.distributed.coordinator=127.0.0.1:23456',
        '--config.distributed.processes=2',
    ]
    assert '--config.mesh.replica=2' in dry_run('local_2proc', run=RUN[:2])[0]


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
    *pack, create = dry_run('xpk', '--slices', '2')
    assert [c[0] for c in pack] == ['rm', 'mkdir', 'tar', 'tar']
    assert create[:3] == ['xpk', 'workload', 'create']
    value = lambda name: create[create.index(name) + 1]
    assert (
        value('--workload') == 'zero'
        and value('--num-slices') == '2'
        and value('--tpu-type') == 'v5litepod-16'
    )
    assert value('--script-dir') == pack[1][-1] == pack[-1][-1]
    install, run = value('--command').split(' && ')
    assert shlex.split(install) == [
        'pip',
        'install',
        '--quiet',
        '-r',
        'requirements.txt',
        'jax[tpu]',
    ]
    assert shlex.split(run) == [
        'python',
        '-m',
        'zeroplay_jax.main',
        *RUN,
        '--config.distributed.mode=auto',
    ]
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
    step = shlex.split(value('--wrap'))
    assert step[0] == 'srun' and 'JAX_LOCAL_DEVICE_IDS=0,1,2,3' in step
    assert step[step.index('.venv/bin/python') + 1 :] == [
        '-m',
        'zeroplay_jax.main',
        *RUN,
        '--config.distributed.mode=auto',
    ]


def test_a_dry_run_makes_nothing(tmp_path):
    for script in OPTIONS:
        run = ['--config=configs/drzero.py:mini', f'--workdir={tmp_path}/run']
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
        ('xpk', [], ['--config=c.py', '--workdir=gs://bucket/run'], 'must begin with /'),
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


# What they run here


STAND_IN = """
import os, signal, sys, time
flags = dict(word.split('=', 1) for word in sys.argv if word.startswith('--'))
process, end = int(flags['--config.distributed.process']), sys.argv[1].split(',')[int(sys.argv[-1][-1])]
print(f'process {process} says {sys.argv[2]}', os.environ['XLA_FLAGS'], os.environ['JAX_PLATFORMS'], flush=True)
if end == 'stubborn':
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if end in ('waits', 'stubborn'):
    time.sleep(100)
time.sleep(0.3)
if end == 'killed':
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(end))
"""


@pytest.fixture
def two(tmp_path):
    program = tmp_path / 'stand in.py'
    program.write_text(STAND_IN)
    logs = tmp_path / 'the logs'
    call_it = lambda ends: call(
        'local_2proc', '--logs', logs, '--', sys.executable, program, ends, "it's 1"
    )
    return call_it, logs


def test_two_processes_that_end_well(two):
    start, logs = two
    result = start('0,0')
    assert result.returncode == 0 and len(result.stderr.splitlines()) == 1
    said = "says it's 1 --xla_force_host_platform_device_count=1 cpu"
    assert result.stdout == f'process 0 {said}\n'
    assert (logs / 'process-1.log').read_text() == f'process 1 {said}\n'
    assert start('0,0').stdout == f'process 0 {said}\n'  # what is shown is of this start alone
    assert (logs / 'process-1.log').read_text() == f'process 1 {said}\n' * 2


@pytest.mark.parametrize(
    ('ends', 'process', 'status'),
    [
        ('waits,3', 1, 3),
        ('7,waits', 0, 7),
        ('waits,killed', 1, 137),
        ('stubborn,1', 1, 1),
        ('0,5', 1, 5),
    ],
)
def test_when_one_fails_the_other_is_stopped_and_one_line_says_so(two, ends, process, status):
    start, logs = two
    result = start(ends)  # well before the 100 seconds that the other one waits
    assert result.returncode == status
    line = result.stderr.splitlines()[1:]
    assert line == [
        f'zeroplay_jax: process {process} of 2 ended with exit status {status} and the other was stopped; its log is '
        f'{logs}/process-{process}.log; the same command resumes from the last checkpoint'
    ]


def test_stopping_the_script_stops_both(tmp_path):
    program = tmp_path / 'stand_in.py'
    program.write_text(STAND_IN)
    command = [
        LAUNCH / 'local_2proc.sh',
        '--logs',
        tmp_path,
        '--',
        sys.executable,
        program,
        'waits,waits',
        'hello',
    ]
    script = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pids = [int(word) for word in script.stderr.readline().split() if word.isdigit()]
    assert len(pids) == 2 and 'process 0 says hello' in script.stdout.readline()
    script.terminate()
    assert script.wait(timeout=40) == 143
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    script.communicate()


def test_a_run_that_is_refused_says_why(two):
    start, _ = two
    result = start('waits,2')
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith(
        'zeroplay_jax: process 1 of 2 refused the run: process 1 says'
    )


def test_two_processes_find_each_other(tmp_path):
    program = tmp_path / 'sum.py'
    program.write_text(
        textwrap.dedent("""
        import sys
        import jax
        from jax.experimental import multihost_utils
        flags = dict(word.removeprefix('--config.distributed.').split('=', 1) for word in sys.argv[1:])
        jax.distributed.initialize(flags['coordinator'], int(flags['processes']), int(flags['process']))
        total = multihost_utils.process_allgather(jax.numpy.ones(3) * (1 + jax.process_index())).sum()
        print(f'{jax.local_device_count()} of {jax.device_count()} devices, {total}')
        """)
    )
    result = call('local_2proc', '--devices', 2, '--logs', tmp_path, '--', sys.executable, program)
    assert result.returncode == 0, (tmp_path / 'process-1.log').read_text()
    assert '2 of 4 devices, 9.0' in result.stdout
    assert '2 of 4 devices, 9.0' in (tmp_path / 'process-1.log').read_text()


CLOUD = """
# A pretended cloud: files hold the states; the answer to every run is a line of `answers`, 'lost' or an exit status.
cd "$(dirname "$0")"
echo "$*" >> calls
case "$*" in
  *queued-resources\\ create*) echo ACTIVE > queued; echo READY > node ;;
  *queued-resources\\ describe*) cat queued 2> /dev/null || { echo ERROR: NOT_FOUND: nothing >&2; exit 1; } ;;
  *queued-resources\\ delete*) rm queued node ;;
  *tpu-vm\\ describe*) cat node ;;
  *'-m zeroplay_jax.main'*)
    answer=$(head -n 1 answers)
    sed -i 1d answers
    [[ $answer == [0-9]* ]] && exit "$answer"
    [[ $answer == suspended ]] && echo SUSPENDED > queued
    [[ $answer == preempted ]] && echo PREEMPTED > node
    exit 255
    ;;
esac
"""


@pytest.fixture
def cloud(tmp_path):
    """Starts a run on the pretended cloud with these answers: (result, what gcloud was asked, in words)."""
    fake(tmp_path, 'gcloud', CLOUD)

    def start(*answers):
        (tmp_path / 'answers').write_text('\n'.join(answers) + '\n')
        options = [*OPTIONS['tpu_vm'], '--poll=0', '--retries=2', '--delete']
        result = call('tpu_vm', *options, '--', *RUN, path=tmp_path, TMPDIR=str(tmp_path))
        calls = (tmp_path / 'calls').read_text().splitlines()
        kinds = (
            'queued-resources create',
            'queued-resources delete',
            ' scp ',
            '-m zeroplay_jax.main',
        )
        return result, [kind.split()[-1] for line in calls for kind in kinds if kind in line], calls

    return start


@pytest.mark.parametrize('lost', ['suspended', 'preempted'])
def test_a_preempted_slice_is_asked_for_again_and_the_same_command_runs(cloud, lost):
    result, steps, calls = cloud(lost, lost, '0')
    assert result.returncode == 0, result.stderr
    once = ['create', 'scp', 'zeroplay_jax.main', 'delete']
    assert steps == once * 3
    assert len({line for line in calls if '-m zeroplay_jax.main' in line}) == 1
    assert 'the run has succeeded' in result.stderr


def test_a_run_that_fails_on_a_healthy_slice_is_tried_a_few_times(cloud, tmp_path):
    result, steps, _ = cloud('1', '1', '1', '0')
    assert (
        result.returncode == 2 and steps.count('zeroplay_jax.main') == 3 and 'delete' not in steps
    )
    assert (
        'failed on a healthy slice (status 1' in result.stderr
        and '3 times in a row' in result.stderr
    )
    assert 'queued-resources delete zero' in result.stderr.splitlines()[-1]
    result, steps, _ = cloud('1', '0')  # the slice is still there
    assert result.returncode == 0 and steps.count('create') == 1


def test_a_run_that_is_refused_is_not_tried_again(cloud):
    result, steps, _ = cloud('2', '0')
    assert result.returncode == 2 and steps == ['create', 'scp', 'zeroplay_jax.main']
    assert 'was refused' in result.stderr.splitlines()[-1]


def test_install_brings_a_python_where_there_is_none(tmp_path):
    (tmp_path / 'launch').mkdir()
    for name in ('install.sh', 'python.sh'):
        (tmp_path / 'launch' / name).write_bytes((LAUNCH / name).read_bytes())
        (tmp_path / 'launch' / name).chmod(0o755)
    old = fake(
        tmp_path,
        'python3',
        'echo "$*" >> calls; [[ $1 == -c ]] && echo 3.10.12 /usr/bin/python3 venv; exit 0',
    )
    for name in ('python3.11', 'python3.12', 'python3.13', 'python'):
        fake(tmp_path, name, 'exit 127')
    command = [tmp_path / 'launch' / 'install.sh', 'tpu']
    environment = os.environ | {'PATH': f'{old}:{os.environ["PATH"]}'}
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    calls = (tmp_path / 'calls').read_text().splitlines()
    assert (
        '-m pip install --quiet --user uv' in calls
        and '-m uv venv --quiet --seed --python 3.12 .venv' in calls
    )
    assert result.returncode != 0  # nothing was really installed, and it does not say otherwise
    assert not (tmp_path / '.venv').exists()
    result = subprocess.run([*command[:1], 'gpu'], capture_output=True, text=True)
    assert result.returncode == 2 and "'gpu' is none of tpu, cuda12, cuda13" in result.stderr
