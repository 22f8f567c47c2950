"""Wrong calls of commands: refusals.txt is the table of calls and answers, each one line with status 2."""

import json
import os
import shlex
import shutil

import pytest
import sample_run
from evaluation.results import result
from python_process import ROOT, run_python
from refused_calls import check_answers

PATHS = os.pathsep.join(str(ROOT / name) for name in ('', 'tests', 'tests/outside_package'))


@pytest.fixture
def folder(tmp_path):
    """The files that the commands name: those of refused_files, results and a run."""
    folder = shutil.copytree(ROOT / 'tests' / 'refused_files', tmp_path / 'files')
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
    return folder


def test_every_wrong_call_has_the_answer_of_the_table_and_writes_nothing(folder):
    def answer(command):
        """What a command prints. Other statuses than 2 and new files are named."""
        before = sorted(folder.rglob('*'))
        words = shlex.split(command.replace('FOLDER', str(folder)))
        done = run_python('-m', *words, PYTHONPATH=PATHS)
        text = f'{done.stdout}{done.stderr}'.rstrip()
        if text.startswith('usage:'):
            text = text.splitlines()[-1]
        if done.returncode != 2:
            text += f'\nstatus {done.returncode}'
        if sorted(folder.rglob('*')) != before:
            text += '\nthe folder has changed'
        return text

    check_answers(ROOT / 'tests' / 'refusals.txt', answer, folder, '$ ')
