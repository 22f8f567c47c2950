"""The launch scripts: what they would run, and what they refuse."""

import os
import re
import shlex

import pytest
from launch_cases import OPTIONS, ROOT, RUN, call, fake, planned
from page_commands import launches
from python_process import run

LAUNCHES = ROOT / 'tests' / 'golden' / 'launches.txt'
PROMPT = '$ '


def examples():
    """The commands of the pages, and what --help of every script shows where it differs by more than a workdir."""
    found = launches()
    for script in OPTIONS:
        text = (ROOT / 'launch' / f'{script}.sh').read_text(encoding='utf-8')
        # From 'Example' to the end of the command, whose lines but the last end in a backslash.
        example = text[text.index('\nExample') :].replace('\\\n', ' ')
        found.append(re.search(rf'launch/{script}\.sh .*', example)[0])
    by_run = {}
    for command in found:
        flags = re.sub(r'--workdir=\S+', '', command.split(' -- ')[1]).split()
        by_run.setdefault((command.split()[0], *flags), command)
    return by_run.values()


@pytest.mark.parametrize('command', examples())
def test_a_command_of_the_pages_and_the_helps_is_accepted(command):
    shown = planned(command)
    if '--dry-run' not in shown:
        shown = shown.replace('.sh ', '.sh --dry-run ', 1)
    done = run(['bash', '-c', shown], ROOT, os.environ, timeout=120)
    assert done.returncode == 0, done.stderr
    # The scripts check the flags of the run themselves.
    assert 'zeroplay_jax.main' in done.stdout and '# the command is sound' in done.stdout


def dry_runs():
    """The commands of launches.txt; RUN in them, and the options, are those of launch_cases.py."""
    lines = LAUNCHES.read_text(encoding='utf-8').splitlines()
    return [line.removeprefix(PROMPT) for line in lines if line.startswith(PROMPT)]


def listing(command):
    """What a dry run of a command prints, and its status if it is not 0."""
    script, *words = shlex.split(command)
    before, after = words[: words.index('--')], words[words.index('--') + 1 :]
    program = [*RUN, *after[1:]] if after[:1] == ['RUN'] else after
    words = [*OPTIONS[script], *before, '--dry-run', '--', *program]
    result = call(script, *words, path='/nowhere')
    text = (result.stdout + result.stderr).replace(str(ROOT), 'PROJECT')
    return text if not result.returncode else f'{text}status {result.returncode}\n'


def test_dry_runs_list_the_commands_of_the_table_or_refuse_in_one_line():
    """`PYTHONPATH=tests python tests/world/test_launch.py` writes the table again."""
    assert LAUNCHES.read_text(encoding='utf-8') == table(dry_runs())


def table(commands):
    return '\n'.join(f'{PROMPT}{command}\n{listing(command)}' for command in commands)


def test_a_launch_names_all_mistakes_of_the_run_before_anything_is_created(tmp_path):
    words = [*OPTIONS['tpu_vm'], '--', *RUN, '--config.mesh.replica=3', '--config.solver.bacth=2']
    result = call('tpu_vm', *words, path=fake(tmp_path, 'gcloud', f'touch {tmp_path}/created'))
    assert result.returncode == 2 and not result.stdout
    assert 'v5litepod-16 has 16 on 4 hosts; give all three, with the product 16' in result.stderr
    assert 'did you mean solver.batch?' in result.stderr
    assert not (tmp_path / 'created').exists()


if __name__ == '__main__':
    LAUNCHES.write_text(table(dry_runs()), encoding='utf-8')
