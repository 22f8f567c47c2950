"""Mistyped commands, each in a process that a parent with the libraries has forked: what a user reads, and the status.

`python tests/mistyped.py` writes mistyped.txt again.
"""

import os
import pathlib
import runpy
import shlex
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
TABLE = ROOT / 'tests' / 'mistyped.txt'
PROMPT = '$ '


def commands() -> list[str]:
    """Returns the commands of the table."""
    lines = TABLE.read_text(encoding='utf-8').splitlines()
    return [line.removeprefix(PROMPT) for line in lines if line.startswith(PROMPT)]


def answer(command: str, folder: pathlib.Path) -> str:
    """Returns what a command prints, and its exit status if it is not 2; `FOLDER` in a command stands for `folder`."""
    module, *words = shlex.split(command.replace('FOLDER', str(folder)))
    output = folder / 'output'
    process = os.fork()
    if not process:
        _run(f'zeroplay_jax.{module}', words, output)
    _, status = os.waitpid(process, 0)
    text = output.read_text(encoding='utf-8').replace(str(folder), 'FOLDER').rstrip()
    code = os.waitstatus_to_exitcode(status)
    return text if code == 2 else f'{text}\nstatus {code}'


def _run(module: str, words: list[str], output: pathlib.Path) -> None:
    """Runs a module as `python -m` does, and ends the process."""
    code = 1
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.argv = [module, *words]
        code = 0
        runpy.run_module(module, run_name='__main__', alter_sys=True)
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException as error:
        print(f'{type(error).__name__}: {error}', file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def make_files(folder: pathlib.Path) -> None:
    """Writes the files that the commands name."""
    (folder / 'empty').mkdir()
    (folder / 'questions.jsonl').write_text('{"question": "Who?", "answers": ["Ann"]}\n')
    (folder / 'broken.jsonl').write_text('{"question": "Who?", "answers": ["Ann"]}\n{"question":\n')
    (folder / 'result.json').write_text('{}')
    (folder / 'broken.py').write_text('def get_config(:\n')
    (folder / 'no_config.py').write_text('x = 1\n')


def table(commands: list[str]) -> str:
    """Returns the content of mistyped.txt for commands."""
    # Loaded once for all commands.

    os.chdir(ROOT)
    blocks = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        make_files(folder)
        for command in commands:
            blocks.append(f'{PROMPT}{command}\n{answer(command, folder)}\n')
    return '\n'.join(blocks)


if __name__ == '__main__':
    TABLE.write_text(table(commands()), encoding='utf-8')
