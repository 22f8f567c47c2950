"""The launch scripts that can run here: two processes on this machine, and the loop around a TPU slice, with a
pretended gcloud."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from launch_cases import LAUNCH, OPTIONS, RUN, call, fake
from python_process import PIPES, finish, start

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
if end == 'preempted':
    # Once: the second start ends well.
    marker = __file__ + '.saved'
    if not os.path.exists(marker):
        open(marker, 'w').close()
        sys.exit(75)
    end = '0'
if end == 'killed':
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(end))
"""


@pytest.fixture
def two(tmp_path):
    program = tmp_path / 'stand in.py'
    program.write_text(STAND_IN)
    logs = tmp_path / 'the logs'
    words = ('local_2proc', '--logs', logs, '--', sys.executable, program)
    return lambda ends: call(*words, ends, "it's 1"), logs


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
    ('ends', 'status'), [('waits,3', 3), ('waits,killed', 137), ('stubborn,1', 1), ('waits,2', 2)]
)
def test_when_one_fails_the_other_is_stopped_and_one_line_says_so(two, ends, status):
    start, logs = two
    result = start(ends)  # well before the 100 seconds that the other one waits
    assert result.returncode == status
    line = f'ended with exit status {status} and the other was stopped; its log is {logs}/process-1.log; '
    if status == 2:
        line = 'refused the run: process 1 says'
    assert f'\nzeroplay_jax: process 1 of 2 {line}' in result.stderr


def test_stopping_the_script_stops_both(tmp_path):
    program = tmp_path / 'stand_in.py'
    program.write_text(STAND_IN)
    words = ('--logs', tmp_path, '--', sys.executable, program, 'waits,waits', 'hello')
    script = subprocess.Popen([LAUNCH / 'local_2proc.sh', *words], **PIPES)
    pids = [int(word) for word in script.stderr.readline().split() if word.isdigit()]
    assert len(pids) == 2 and 'process 0 says hello' in script.stdout.readline()
    script.terminate()
    # The status of a run that saved, which the same command resumes.
    assert script.wait(timeout=40) == 75
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    script.communicate()


def test_a_run_that_was_asked_to_end_and_saved_is_started_again(two):
    start, logs = two
    result = start('preempted,0')
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("process 0 says it's 1") == 2
    assert 'the run was asked to end and has saved; starts it again' in result.stderr


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
    # To pack the project takes seconds for every attempt: tests about the archive put the real program back.
    fake(tmp_path, 'tar', 'exit 0')

    def start(*answers):
        (tmp_path / 'answers').write_text('\n'.join(answers) + '\n')
        options = [*OPTIONS['tpu_vm'], '--poll=0', '--retries=2', '--delete']
        result = call('tpu_vm', *options, '--', *RUN, path=tmp_path, TMPDIR=str(tmp_path))
        calls = (tmp_path / 'calls').read_text().splitlines()
        kind = r'queued-resources (create|delete)| (scp) |-m (zeroplay_jax.main)'
        found = [re.search(kind, line) for line in calls]
        return result, [match[match.lastindex] for match in found if match], calls

    return start


ATTEMPT = ['scp', 'zeroplay_jax.main']
# What the cloud answers to each start of the run → the status of the script, its steps and the end of what it says.
ENDS = {
    'preempted suspended 0': (0, ['create', *ATTEMPT, 'delete'] * 3, 'the run has succeeded'),
    # On a healthy slice it is tried a few times, and the slice stays.
    '1 1 1 0': (2, ['create', *ATTEMPT * 3], 'failed on a healthy slice'),
    # A run that has saved is started again at once, and that counts as no failure.
    '75 75 75 75 0': (0, ['create', *ATTEMPT * 5, 'delete'], 'the run has succeeded'),
    # One that is refused or stops itself is not tried again.
    '2 0': (2, ['create', *ATTEMPT], 'was refused'),
    '3 0': (3, ['create', *ATTEMPT], 'the run stopped itself'),
    '4 0': (4, ['create', *ATTEMPT], 'the run stopped itself'),
}


@pytest.mark.parametrize('answers', ENDS)
def test_the_loop_around_a_slice_ends_as_the_run_does(cloud, answers):
    status, expected_steps, line = ENDS[answers]
    result, steps, calls = cloud(*answers.split())
    assert (result.returncode, steps) == (status, expected_steps), result.stderr
    assert line in result.stderr
    assert len({call for call in calls if '-m zeroplay_jax.main' in call}) == 1


def test_the_project_is_packed_into_a_folder_of_its_own_though_files_change(cloud, tmp_path):
    # GNU tar ends with 1 if a file changed or was removed while it read it.
    fake(tmp_path, 'tar', '/usr/bin/env -S PATH=/usr/bin:/bin tar "$@"; exit 1')
    result, _, calls = cloud('0')
    assert result.returncode == 0, result.stderr
    for line in [line for line in calls if ' scp ' in line]:
        words = line.split()
        packed = pathlib.Path(words[words.index('scp') + 1])
        # With an unpredictable name, and removed.
        assert re.fullmatch(r'zeroplay_jax\.(?!X{10})\w{10}', packed.parent.name)
        assert packed.parent.parent == tmp_path and not packed.parent.exists()


def test_install_brings_a_python_where_there_is_none(tmp_path):
    (tmp_path / 'launch').mkdir()
    for name in ('install.sh', 'python.sh'):
        shutil.copy(LAUNCH / name, tmp_path / 'launch')
    old = 'echo "$*" >> calls; [[ $1 == -c ]] && echo 3.10.12 /usr/bin/python3 venv; exit 0'
    fake(tmp_path, 'python3', old)
    for version in ('3.11', '3.12', '3.13', ''):
        fake(tmp_path, f'python{version}', 'exit 127')
    path = f'{tmp_path}:{os.environ["PATH"]}'
    with pytest.raises(AssertionError):
        finish(start(['launch/install.sh', 'tpu'], tmp_path, PATH=path))
    calls = (tmp_path / 'calls').read_text()
    assert '-m pip install --quiet --user uv\n' in calls
    assert '-m uv venv --quiet --seed --python 3.12 .venv\n' in calls
