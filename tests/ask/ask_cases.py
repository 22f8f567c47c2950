"""The command in a process of its own, and what it is asked."""

import os
import pathlib
import re
import signal
import subprocess
import sys

from python_process import FAST

from zeroplay_jax import ask
from zeroplay_jax.mini.world import World, evaluation_questions
from zeroplay_jax.selfplay.library import SearchableCorpus

ROOT = pathlib.Path(__file__).parents[2]
CLEAN, BASE = ROOT / 'zeroplay_jax' / 'mini' / 'clean', ROOT / 'zeroplay_jax' / 'mini' / 'base'
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != 'NO_COLOR'} | {
    # One device, as users have.
    **FAST,
    'TERM': 'xterm',
}
WORLD = World(0, 'evaluation')
ONE, TWO = (item for h in (1, 2) for item in evaluation_questions([WORLD], 1, (h,)))
NAME, START = (
    re.search(r'of (\w+)\?', item['question'])[1] for item in (ONE, TWO)
)  # what is searched first
ATTACK = '\x1b[31m\x1b]0;owned\x07\x9b2J'
LABELS = ('think', 'search', 'answer')
# Tools only keep it; nothing is searched.
NO_CORPUS = SearchableCorpus(None, 3, 200)


def command(*arguments, **options):
    """The real command in a process of its own."""
    pipes = dict(
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    words = [sys.executable, '-m', 'zeroplay_jax.ask', *map(str, arguments)]
    return subprocess.Popen(words, cwd=ROOT, env=ENVIRONMENT, **pipes | options)


def finish(process, given=None):
    out, err = process.communicate(given, timeout=300)
    return process.returncode, out, err


def labels(text):
    """First words of labelled lines, in order."""
    return [word for line in text.splitlines() if (word := line.split(' ')[0]) in LABELS]


def refused(capsys, *arguments):
    """The one line that a wrong call is answered with."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        assert ask.main([str(a) for a in arguments]) == 2
    finally:
        signal.signal(signal.SIGINT, handler)
    out, err = capsys.readouterr()
    assert not out and err.count('\n') == 1 and err.startswith('zeroplay_jax.ask: ')
    return err
