"""The command, called in this process, and what it is asked."""

import re
import signal

from python_process import ROOT

from zeroplay_jax import ask
from zeroplay_jax.mini.world import World, evaluation_questions
from zeroplay_jax.selfplay.library import SearchableCorpus

BASE = ROOT / 'zeroplay_jax' / 'mini' / 'base'
WORLD = World(0, 'evaluation')
ONE, TWO = evaluation_questions([WORLD], 1, (1, 2))
# What is searched first.
NAME, START = (re.search(r'of (\w+)\?', item['question'])[1] for item in (ONE, TWO))
ATTACK = '\x1b[31m\x1b]0;owned\x07\x9b2J'
LABELS = ('think', 'search', 'answer')
# Tools only keep it; nothing is searched.
NO_CORPUS = SearchableCorpus(None, 3, 200)


def labels(text):
    """First words of labelled lines, in order."""
    return [word for line in text.splitlines() if (word := line.split(' ')[0]) in LABELS]


def main(arguments):
    """The status of the command, called in this process."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        return ask.main([str(a) for a in arguments])
    finally:
        signal.signal(signal.SIGINT, handler)


def refused(capsys, *arguments):
    """The one line that a wrong call is answered with."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out and err.count('\n') == 1 and err.startswith('zeroplay ask: ')
    return err
