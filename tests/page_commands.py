"""The commands and programs of the pages."""

import re
import tomllib

from python_process import ROOT

from zeroplay_jax.commands import COMMANDS

RULES = tomllib.loads((ROOT / 'tests' / 'readme.toml').read_text(encoding='utf-8'))
PYTHON = '.venv/bin/python '
SHELL = ('', 'bash', 'sh')  # how fences of commands begin
# Commands with an address in a bucket, wherever it stands: tests/extras/buckets plays them at an emulator.
ADDRESS = 'gs://'


def blocks(page, *languages):
    text = (ROOT / page).read_text(encoding='utf-8')
    fences = re.findall(r'^ *```(\w*)\n(.*?)^ *```', text, re.M | re.S)
    return [content for language, content in fences if language in languages]


def commands(page):
    calls = ''.join(blocks(page, *SHELL)).replace('\\\n', ' ').split('\n')
    return [' '.join(call.split('  #')[0].split()) for call in calls if call.strip()]


def as_module(command):
    """A command as every environment runs it: `python -m zeroplay_jax.MODULE` in the place of `zeroplay NAME`."""
    program = r'(?<![\w./-])(?:[\w./-]*/)?zeroplay (\w+)'
    return re.sub(program, lambda name: f'{PYTHON}-m zeroplay_jax.{COMMANDS[name[1]]}', command)


def runnable(page):
    known = tuple(RULES['elsewhere'])
    return [c for c in commands(page) if ADDRESS not in c and not c.startswith(known)]


def launches():
    """The commands of the launch page's table and recipes, and of the page about texts."""
    page = (ROOT / 'launch/README.md').read_text(encoding='utf-8')
    found = re.findall(r'`(launch/\w+\.sh .*?-- .*?)`', page)
    for command in runnable('launch/README.md') + runnable('docs/texts-to-tpu.md'):
        if command.startswith('launch/'):
            found.append(command)
    return found
