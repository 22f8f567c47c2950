"""Wrong calls of commands: refusals.txt is the table of calls and answers, each one line with status 2.

`python tests/test_refusals.py` writes the table again.
"""

import difflib
import importlib
import json
import os
import pathlib
import shlex
import sys
import tempfile
import warnings

import mistyped
from python_process import ROOT, run_python

TABLE = ROOT / 'tests' / 'refusals.txt'
LIBRARIES = ('zeroplay_jax.evaluation.agent', 'zeroplay_jax.evaluation.report_builder')
LIBRARIES += ('zeroplay_jax.configuration.command_line', 'zeroplay_jax.data.builders')
LIBRARIES += ('benchmarks.slices_play', 'benchmarks.tpu_programs', 'benchmarks.claims_runs')
PATHS = [ROOT, *(ROOT / 'tests' / name for name in ('', 'evaluation', 'outside_package'))]


def commands():
    lines = TABLE.read_text(encoding='utf-8').splitlines()
    return [line.removeprefix(mistyped.PROMPT) for line in lines if line[:2] == mistyped.PROMPT]


def test_every_wrong_call_has_the_answer_of_the_table_and_writes_nothing():
    # In a process of its own: it forks, which the threads of a test process do not survive.
    code = (
        f'import sys; sys.path[:0] = {list(map(str, PATHS))}; import test_refusals as t; t.show()'
    )
    printed = run_python('-c', code)
    assert printed.returncode == 0, printed.stderr[-2000:]
    expected = TABLE.read_text(encoding='utf-8').splitlines()
    changes = list(difflib.unified_diff(expected, printed.stdout.splitlines(), lineterm=''))
    assert not changes, '\n'.join(changes)


def show():
    """Prints the table."""
    # Loaded once for all commands.
    for name in LIBRARIES:
        importlib.import_module(name)
    warnings.filterwarnings('ignore', '.* found in sys.modules after import', RuntimeWarning)
    # No policy is loaded for these answers.
    sys.modules['zeroplay_jax.evaluation.agent'].Session = None
    os.environ['PYTHONPATH'] = os.pathsep.join(map(str, PATHS))
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name, 'files')
        make_files(folder)
        blocks = [
            f'{mistyped.PROMPT}{command}\n{answer(command, folder)}\n' for command in commands()
        ]
    print('\n'.join(blocks), end='')


def answer(command, folder):
    """What a command prints; FOLDER in it stands for `folder`. Other statuses than 2 and new files are named."""
    module, *words = shlex.split(command.replace('FOLDER', str(folder)))
    output = folder.parent / 'output'
    before = sorted(folder.rglob('*'))
    process = os.fork()
    if not process:
        mistyped._run(module, words, output)
    _, status = os.waitpid(process, 0)
    text = output.read_text(encoding='utf-8').replace(str(folder), 'FOLDER').rstrip()
    if text.startswith('usage:'):
        text = text.splitlines()[-1]
    if os.waitstatus_to_exitcode(status) != 2:
        text += f'\nstatus {os.waitstatus_to_exitcode(status)}'
    if sorted(folder.rglob('*')) != before:
        text += '\nthe folder has changed'
    return text


def make_files(folder):
    """Writes the files that the commands name."""
    import sample_run
    from results import result

    (folder / 'index').mkdir(parents=True)
    (folder / 'index' / 'manifest.json').write_text('{}')
    (folder / 'mcp.json').write_text('{"mcpServers": {"a": {"command": 3}}}')
    sample_run.write_run(folder / 'run', count=1)
    texts = {
        'passages.jsonl': [{'id': 'a', 'contents': f'"A"\n{"word " * 20}'}, '{'],
        'short.jsonl': [{'id': '1', 'contents': '"A"\nToo short.'}],
        'empty_answer.jsonl': [{'question': 'Who?', 'answer': ''}],
        'one.json': [result([1.0, 0.0])],
        'two.json': [result([1.0, 1.0])],
        'longer.json': [result([1.0, 0.0, 0.0])],
        'elsewhere.json': [result([1.0, 0.0], retrieval='other')],
    }
    for name, lines in texts.items():
        lines = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (folder / name).write_text('\n'.join(lines))


if __name__ == '__main__':
    sys.path[:0] = map(str, PATHS)
    with tempfile.TemporaryFile('w+', encoding='utf-8') as file:
        descriptor = os.dup(1)
        os.dup2(file.fileno(), 1)
        show()
        sys.stdout.flush()
        os.dup2(descriptor, 1)
        file.seek(0)
        TABLE.write_text(file.read(), encoding='utf-8')
