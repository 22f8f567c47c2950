"""SIGTERM: a flag while a run trains, the end of the process while it loads, and the same for all processes."""

import os
import signal

import pytest
from host_processes import processes_of_script
from python_process import run_python

from zeroplay_jax.runtime import signals
from zeroplay_jax.types import Preempted


def test_the_signal_only_sets_a_flag_while_it_is_watched():
    before = signal.getsignal(signal.SIGTERM)
    signals.raise_if_requested()
    with signals.watched():
        assert signals.is_watched()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Preempted):
            signals.raise_if_requested()
    assert signal.getsignal(signal.SIGTERM) == before and not signals.is_watched()
    signals.raise_if_requested()
    with signals.watched():
        signals.raise_if_requested()  # of an earlier context nothing is left


def test_a_program_keeps_its_own_handler():
    own = lambda *_: None
    before = signal.signal(signal.SIGTERM, own)
    try:
        with signals.watched():
            assert signal.getsignal(signal.SIGTERM) is own and not signals.is_watched()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_while_a_run_loads_it_ends_at_once_with_the_status_that_resumes():
    code = """import os, signal, time
from zeroplay_jax.runtime import signals
signals.exit_on_sigterm()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(5)
"""
    done = run_python('-c', code)
    assert done.returncode == 75 and 'the same command starts or resumes the run' in done.stderr


TWO = """import os, signal, sys, time
from zeroplay_jax.runtime import devices
devices.connect('coordinator', f'localhost:{sys.argv[1]}', 2, int(sys.argv[2]), 10)
from zeroplay_jax.runtime import hosts
from zeroplay_jax.runtime import signals
from zeroplay_jax.types import Preempted
h = hosts.Hosts()
def rounds():
    for _ in range(300):
        signals.raise_if_requested()
        time.sleep(0.05)
    raise RuntimeError('this process was not told')
with signals.watched():
    h.gather(0)
    if h.index == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    try:
        h.run_on_all_and_gather(rounds)
    except Preempted as error:
        print('preempted:', error)
print('together again', h.gather(h.index))
"""


def test_one_process_that_is_asked_stops_the_same_step_of_all():
    running = processes_of_script(TWO)
    texts = [process.communicate(timeout=120)[0] for process in running]
    for text in texts:
        assert 'preempted: ' in text and 'together again [0, 1]' in text, text
