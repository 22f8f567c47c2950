"""What a user reads after a mistyped command: mistyped.txt is the table of commands and answers."""

import difflib
import subprocess
import sys

import mistyped


def test_every_mistyped_command_has_the_answer_of_the_table():
    # In a process of its own: it forks, which the threads of a test process do not survive.
    code = 'import mistyped; print(mistyped.table(mistyped.commands()), end="")'
    paths = f'import sys; sys.path[:0] = {[str(mistyped.ROOT), str(mistyped.ROOT / "tests")]!r}\n'
    answers = subprocess.run([sys.executable, '-c', paths + code], capture_output=True, text=True)
    assert answers.returncode == 0, answers.stderr[-2000:]
    expected = mistyped.TABLE.read_text(encoding='utf-8').splitlines()
    assert len(mistyped.commands()) >= 60
    changes = list(difflib.unified_diff(expected, answers.stdout.splitlines(), lineterm=''))
    assert not changes, '\n'.join(changes)
