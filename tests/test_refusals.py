"""Wrong calls of commands: refusals.txt is the table of calls and answers, each one line with status 2.

`python tests/test_refusals.py` writes the table again.
"""

import difflib
import json
import os
import pathlib
import shlex
import shutil
import sys
import tempfile
import warnings

from forked_commands import load_libraries, run_in_fork
from python_process import ROOT, run_python
from removed_extras import with_rows_of

TABLE = ROOT / 'tests' / 'refusals.txt'
PROMPT = '$ '
PATHS = [ROOT, *(ROOT / 'tests' / name for name in ('', 'evaluation', 'outside_package'))]


def commands():
    lines = TABLE.read_text(encoding='utf-8').splitlines()
    return [line.removeprefix(PROMPT) for line in lines if line.startswith(PROMPT)]


def table():
    """The table, from a process of its own: it forks, which the threads of a test process do not survive."""
    paths = list(map(str, PATHS))
    code = f'import sys; sys.path[:0] = {paths}; import test_refusals; test_refusals.show()'
    printed = run_python('-c', code)
    assert printed.returncode == 0, printed.stderr[-2000:]
    return printed.stdout


def test_every_wrong_call_has_the_answer_of_the_table_and_writes_nothing():
    expected = TABLE.read_text(encoding='utf-8')
    written = with_rows_of(expected, table())
    lines = expected.splitlines(), written.splitlines()
    changes = list(difflib.unified_diff(*lines, lineterm=''))
    remedy = 'python tests/test_refusals.py writes refusals.txt again'
    assert not changes, '\n'.join([remedy, *changes])


def show():
    """Prints the table."""
    load_libraries()
    warnings.filterwarnings('ignore', '.* found in sys.modules after import', RuntimeWarning)
    # No policy is loaded for these answers.
    sys.modules['zeroplay_jax.session'].Session = None
    os.environ['PYTHONPATH'] = os.pathsep.join(map(str, PATHS))
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name, 'files')
        make_files(folder)
        blocks = [f'{PROMPT}{command}\n{answer(command, folder)}\n' for command in commands()]
    print('\n'.join(blocks), end='')


def answer(command, folder):
    """What a command prints; FOLDER in it stands for `folder`. Other statuses than 2 and new files are named."""
    module, *words = shlex.split(command.replace('FOLDER', str(folder)))
    before = sorted(folder.rglob('*'))
    status, text = run_in_fork(module, words, folder.parent / 'output')
    text = text.replace(str(folder), 'FOLDER').rstrip()
    if text.startswith('usage:'):
        text = text.splitlines()[-1]
    if status != 2:
        text += f'\nstatus {status}'
    if sorted(folder.rglob('*')) != before:
        text += '\nthe folder has changed'
    return text


def make_files(folder):
    """Writes the files that the commands name: those of refused_files, results and a run."""
    import sample_run
    from results import result

    shutil.copytree(ROOT / 'tests' / 'refused_files', folder)
    for path in folder.glob('*.py.txt'):
        path.rename(path.with_suffix(''))
    (folder / 'empty').mkdir()
    sample_run.write_run(folder / 'run', count=1)
    results = {
        'one': result([1.0, 0.0]),
        'two': result([1.0, 1.0]),
        'longer': result([1.0, 0.0, 0.0]),
        'elsewhere': result([1.0, 0.0], metric='other'),
    }
    for name, content in results.items():
        (folder / f'{name}.json').write_text(json.dumps(content.to_json()))


if __name__ == '__main__':
    TABLE.write_text(table(), encoding='utf-8')
