"""The examples in which an environment of another library plays: they learn; killed, they end with the same bits."""

import contextlib
import threading
import time

import example_runs
import killed_runs
import pytest
from run_files import check_same_run, lines

from zeroplay_jax.training import loop

CASES = ['people', 'letters', 'words', 'openenv']


@contextlib.contextmanager
def serving():
    """The address of the server of the example, on a free port."""
    import uvicorn

    from examples.openenv_env.server import app

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level='error'))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.05)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f'http://127.0.0.1:{port}'
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope='module', params=CASES)
def make_config(request):
    """Makes the config of a case."""
    kind = request.param
    if kind != 'openenv':
        pytest.importorskip('verifiers', reason='pip install zeroplay-jax[verifiers]')

        def make():
            config = example_runs.make_config('verifiers_env')
            config.environment.arguments = f'{{"kind": "{kind}"}}'
            return config

        yield kind, make
        return
    pytest.importorskip('openenv', reason='pip install zeroplay-jax[openenv]')
    with serving() as url:

        def make():
            config = example_runs.make_config('openenv_env')
            config.openenv.url = url
            return config

        yield kind, make


@pytest.fixture(scope='module')
def whole(make_config, tmp_path_factory):
    kind, make = make_config
    workdir = tmp_path_factory.mktemp(kind) / 'whole'
    loop.run(make(), workdir)
    return workdir


def test_an_environment_trains_three_steps(make_config, whole):
    kind, _ = make_config
    steps = [record for record in lines(whole) if record['phase'] == 'solver']
    assert len(steps) == 3 and any(step.get('solver/gradient_norm', 0.0) > 0 for step in steps)
    assert all(step['dropped_episodes'] == 0 for step in steps)
    rows = [row for row in lines(whole, 'trajectories.jsonl') if row['phase'] == 'solver']
    assert not any(row['drop'] for row in rows)
    replies = [[s['text'] for s in row['segments'] if s['source'] == 'env'] for row in rows]
    begins = {'people': 'information>Doc 1', 'letters': 'Now a text', 'openenv': 'Now with'}
    if kind == 'words':
        assert not any(replies)
        prompts = {row['segments'][0]['text'].split('backwards')[0] for row in rows}
        assert all('<|im_start|>system\nAnswer with one word.' in text for text in prompts)
        return
    assert any(begins[kind] in text for texts in replies for text in texts)
    turns = {'people': {1, 2, 3}, 'letters': {3}, 'openenv': {3}}[kind]
    assert {len(row['turns']) for row in rows} <= turns
    if kind == 'people':
        calls = [call for row in rows for call in row['turns'] if call]
        assert any(call['text'].startswith('Doc 1') for call in calls)


@pytest.mark.long
def test_a_killed_run_ends_with_the_same_bits(make_config, whole, tmp_path, monkeypatch):
    _, make = make_config
    killed = tmp_path / 'killed'
    killed_runs.run_until(2, monkeypatch, make(), killed)
    loop.run(make(), killed)
    check_same_run(whole, killed)
