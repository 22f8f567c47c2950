"""Ctrl-C and SIGTERM around checkpoints: a run ends in one line, and the same command resumes it."""

import signal
import time

import pytest

from benchmarks import kills

MOMENTS = 10
# A save that was interrupted half-way took five minutes to end. After SIGTERM a round of rollouts is completed.
SECONDS = 120
ENDS = {
    signal.SIGINT: (130, 'stopped; the same command resumes the run'),
    signal.SIGTERM: (75, 'the same command resumes the run'),
}


def new_run(folder, name):
    # A checkpoint after every step, so that most moments are near one.
    return kills.Run('dspo', folder / name, 1, flags=('--config.checkpoint.every=1',))


@pytest.mark.long
@pytest.mark.fault(
    'nov29-C1', 'Ctrl-C and SIGTERM at ten moments after steps, each with a checkpoint'
)
def test_runs_end_in_one_line_and_resume_bit_for_bit(tmp_path):
    # Children of a process that ignores the signal ignore it, too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        whole = new_run(tmp_path, 'whole')
        assert kills.wait(whole.start()) == [0]
        run, moment = new_run(tmp_path, '0'), 0
        while moment < MOMENTS:
            if interrupted(run, moment):
                moment += 1
            else:
                assert kills.differences(whole, run) == []
                run = new_run(tmp_path, str(moment))
        assert kills.wait(run.start()) == [0]
        assert kills.differences(whole, run) == []
    finally:
        signal.signal(signal.SIGINT, before)


def interrupted(run, moment):
    """Starts a run and interrupts it after its next step; False if it ended before."""
    # A run that resumes removes the log behind its checkpoint.
    steps = max(run.logged_steps(), run.checkpoint())
    log = run.log_path(0)
    begin = len(log.read_text()) if log.is_file() else 0
    (process,) = run.start()
    while run.logged_steps() <= steps and process.poll() is None:
        time.sleep(0.005)
    time.sleep(0.02 * (moment // 2))
    if process.poll() is not None:
        assert process.returncode == 0, log.read_text()
        return False
    number = list(ENDS)[moment % 2]
    process.send_signal(number)
    returned = process.wait(SECONDS)
    # The run may have ended by itself meanwhile.
    if returned == 0:
        return False
    status, line = ENDS[number]
    text = log.read_text()[begin:]
    assert returned == status and 'Traceback' not in text, text
    assert line in text.splitlines()[-1], text
    return True
