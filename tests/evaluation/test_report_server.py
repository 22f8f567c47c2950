"""The page of a run that is going on, served on this machine."""

import contextlib
import signal
import socket
import struct
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest
import sample_run
from python_process import finish, start
from refused_calls import refused

from zeroplay_jax import report


@pytest.fixture(scope='module')
def served(tmp_path_factory):
    """A folder of a run, and the address at which its page is served."""
    folder = sample_run.write_run(tmp_path_factory.mktemp('runs') / 'going', count=8)
    with report.server([folder], 0) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield folder, f'http://{report.HOST}:{running.server_port}/'
        running.shutdown()
        thread.join()


def read(address, host=None):
    request = urllib.request.Request(address, headers={'Host': host} if host else {})
    with contextlib.closing(urllib.request.urlopen(request, timeout=10)) as answer:
        return answer.read().decode()


def add_step(folder, step):
    with (folder / 'metrics.jsonl').open('a') as file:
        file.write(f'{{"step": {step}, "iteration": 2, "phase": "solver", "reward_mean": 0.5}}\n')


def until_loaded_again(browser, condition):
    for _ in range(200):
        # Fails while the page is replaced.
        with contextlib.suppress(AssertionError):
            if browser.js(condition):
                return
        time.sleep(0.05)
    raise AssertionError(condition)


def test_the_version_follows_the_files(served):
    folder, address = served
    version = read(address + 'version')
    assert version in read(address)
    add_step(folder, 42)
    assert read(address + 'version') != version


def test_only_this_machine_is_answered_and_only_with_the_report(served):
    _, address = served
    port = address.rstrip('/').rpartition(':')[2]
    for host in (f'localhost:{port}', f'127.0.0.1:{port}', 'LOCALHOST', f'[::1]:{port}'):
        assert read(address, host)
    for path, host, status in (
        ('', f'evil.example:{port}', 403),
        ('', 'localhost.evil.example', 403),
        ('', '127.0.0.1.evil.example', 403),
        ('', '[', 403),
        ('metrics.jsonl', None, 404),
    ):
        with pytest.raises(urllib.error.HTTPError) as refusal:
            read(address + path, host)
        assert refusal.value.code == status
    assert 'ask localhost' in read_refusal(address, {'Host': 'evil.example'})
    assert 'another site' in read_refusal(address, {'Origin': 'http://evil.example'})


def read_refusal(address, headers):
    request = urllib.request.Request(address, headers=headers)
    with pytest.raises(urllib.error.HTTPError, match='403') as refusal:
        urllib.request.urlopen(request, timeout=10)
    return refusal.value.reason


def test_a_connection_that_its_client_resets_is_left(tmp_path, capfd):
    folder = sample_run.write_run(tmp_path / 'run', count=8)
    with report.server([folder], 0) as running:
        client = socket.create_connection((report.HOST, running.server_port))
        client.sendall(b'GET / HT')
        # Closing sends a reset.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
        client.close()
        running.handle_request()
    assert capfd.readouterr().err == ''


def test_a_port_that_is_taken_and_a_bucket_are_refused(served):
    folder, address = served
    port = int(address.rstrip('/').rpartition(':')[2])
    assert refused(report.serve, [str(folder)], port).startswith(f'--port={port}: cannot be')
    assert 'follows folders' in refused(report.serve, ['gs://bucket/run'], 0)


def test_the_page_follows_the_run_and_keeps_the_view(served, browser):
    folder, address = served
    browser.call('Page.navigate', url=address + '#role=solver')
    browser.until('typeof live === "string" && document.readyState === "complete"')
    browser.js('$("theme").click()')
    scheme = browser.js('document.documentElement.style.colorScheme')
    add_step(folder, 43)
    until_loaded_again(browser, 'allSteps.at(-1) === 43 && document.readyState === "complete"')
    assert browser.js('document.documentElement.style.colorScheme') == scheme
    assert browser.js('filters.elements.role.value') == 'solver'
    browser.until('$("live").textContent === "live"')


def test_ctrl_c_ends_the_command(tmp_path):
    folder = sample_run.write_run(tmp_path / 'run', count=4)
    command = ['-m', 'zeroplay_jax.report', '--serve', '--port=0', str(folder)]
    # Where the tests run in the background, their children would ignore the signal.
    running = start(['env', '--default-signal=INT', sys.executable, *command])
    assert 'http://' in running.stdout.readline()
    running.send_signal(signal.SIGINT)
    _, err = finish(running, 0)
    assert not err
