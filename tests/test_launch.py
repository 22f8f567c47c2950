"""The launch scripts: what they would run, and what they refuse."""

import re
import shlex
import subprocess

import pytest
from launch_cases import OPTIONS, ROOT, RUN, call, fake, planned
from removed_extras import with_rows_of

LAUNCHES = ROOT / 'tests' / 'golden' / 'launches.txt'
PROMPT = '$ '


# What they would run


@pytest.mark.parametrize('script', OPTIONS)
def test_help_shows_an_example_that_is_accepted(script):
    result = call(script, '--help')
    assert result.returncode == 0 and not result.stderr
    # From 'Example' to the end of the command, whose lines but the last end in a backslash.
    example = result.stdout[result.stdout.index('\nExample') :]
    command = example[example.index(f'launch/{script}.sh') :].replace('\\\n', ' ').split('\n')[0]
    assert command.startswith(f'launch/{script}.sh ') and '--workdir=' in command
    shown = planned(command).replace('.sh ', '.sh --dry-run ', 1)
    assert subprocess.run(['bash', '-c', shown], cwd=ROOT, capture_output=True).returncode == 0
    mentioned = set(re.findall(r'^  (--[\w-]+)', result.stdout, re.M))
    options = {word for word in OPTIONS[script] if word.startswith('--') and '=' not in word}
    assert options | {'--dry-run'} <= mentioned


def dry_runs():
    """The commands of launches.txt; RUN in them, and the options, are those of launch_cases.py."""
    lines = LAUNCHES.read_text(encoding='utf-8').splitlines()
    return [line.removeprefix(PROMPT) for line in lines if line.startswith(PROMPT)]


def listing(command):
    """What a dry run of a command prints, and its status if it is not 0."""
    script, *words = shlex.split(command)
    before, after = words[: words.index('--')], words[words.index('--') + 1 :]
    run = [*RUN, *after[1:]] if after[:1] == ['RUN'] else after
    result = call(script, *OPTIONS[script], *before, '--dry-run', '--', *run, path='/nowhere')
    text = (result.stdout + result.stderr).replace(str(ROOT), 'PROJECT')
    return text if not result.returncode else f'{text}status {result.returncode}\n'


def test_dry_runs_list_the_commands_of_the_table_or_refuse_in_one_line():
    """`python tests/test_launch.py` writes the table again."""
    expected = LAUNCHES.read_text(encoding='utf-8')
    assert expected == with_rows_of(expected, table(dry_runs()))


def table(commands):
    return '\n'.join(f'{PROMPT}{command}\n{listing(command)}' for command in commands)


def test_without_sizes_the_mesh_is_that_of_both_processes():
    result = call('local_2proc', *OPTIONS['local_2proc'], '--dry-run', '--', *RUN[:2])
    assert '--config.mesh.replica=2 --config.mesh.fsdp=2' in result.stdout


def test_what_ends_an_old_run_on_a_slice_does_not_end_itself():
    text = listing('tpu_vm -- RUN')
    assert 'pkill' in text, text
    (install,) = [line for line in text.splitlines() if 'pkill' in line]
    assert 'zeroplay_jax.main' not in install.replace('[z]eroplay_jax.main', '')


ONE_RUN = ('launch/README.md', 'launch/tpu_vm.sh', 'launch/xpk.sh', 'configs/drzero.py')
ONE_RUN += ('docs/buckets.md', 'docs/texts-to-tpu.md')
# Where the files of a run lie, and what belongs to a corpus.
PLACES = ('workdir', 'policy', 'index', 'config.policy.path', 'config.retrieval', 'config.eval')
PLACES += ('config.inputs', 'config.schedule.hop_ratio')


@pytest.mark.fault('user-6', 'the commands of a run of Dr. Zero on a v5litepod-16')
def test_every_page_has_the_same_flags_for_one_run_on_one_slice():
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


# What they refuse


NONSENSE = {
    'tpu_vm': (
        '--config.mesh.replica=3',
        'v5litepod-16 has 16 on 4 hosts; give all three, with the product 16',
    ),
    'xpk': ('--config.nonsense=4', 'config.nonsense: no such field'),
    'slurm': ('--config.solver.batch=0', 'config.solver.batch=0: Input should be'),
    'local_2proc': ('--config.sampler.context=8', 'config.sampler.context=8: too short for'),
}


@pytest.mark.fault('user-5', 'a launch with a misspelt config and flags that cannot work')
@pytest.mark.parametrize('script', OPTIONS)
def test_a_launch_names_all_mistakes_of_the_run_before_anything_is_created(script, tmp_path):
    flag, line = NONSENSE[script]
    other = '--config.solver.bacth=2'
    words = [*OPTIONS[script], '--', *RUN, flag, other]
    result = call(script, *words, path=fake(tmp_path, 'gcloud', f'touch {tmp_path}/created'))
    assert result.returncode == 2 and not result.stdout and 'Traceback' not in result.stderr
    assert line in result.stderr and 'did you mean solver.batch?' in result.stderr
    assert ' mistakes; nothing was started' in result.stderr
    assert not (tmp_path / 'created').exists()
    misspelt = ['--config=configs/drzerro.py', *RUN[1:]]
    result = call(script, *OPTIONS[script], '--dry-run', '--', *misspelt)
    assert result.returncode == 2 and 'did you mean configs/drzero.py?' in result.stderr


@pytest.mark.parametrize(
    ('script', 'program'), [('tpu_vm', 'gcloud'), ('xpk', 'xpk'), ('slurm', 'sbatch')]
)
def test_a_missing_program_is_named(script, program, tmp_path):
    for tool in 'env bash dirname seq tr'.split():  # nothing else is on the path
        (tmp_path / tool).symlink_to(f'/usr/bin/{tool}')
    result = call(script, *OPTIONS[script], '--', *RUN, PATH=str(tmp_path))
    assert result.returncode == 2
    assert (
        result.stderr
        == f'zeroplay_jax: launch/{script}.sh: {program} is not installed on this machine\n'
    )


if __name__ == '__main__':
    LAUNCHES.write_text(table(dry_runs()), encoding='utf-8')
