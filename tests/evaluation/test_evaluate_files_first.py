"""`evaluate` reads its files before libraries and weights are loaded."""

import pytest
from python_process import run_python

from zeroplay_jax.configs import common
from zeroplay_jax.configuration import rules
from zeroplay_jax.settings.kinds import ConfigError

EVALUATE = ('-m', 'zeroplay_jax.evaluate', '--config=configs/quickstart.py')
FILES = {
    'empty': ('', 'em'),
    'no JSON': ('<html>', 'em'),
    'no answers': ('{"question": "Where?"}', 'em'),
    'no rubrics': ('{"task": "Describe it."}', 'rubrics'),
}


@pytest.mark.parametrize(
    'name', [pytest.param(name, marks=pytest.mark.fault('user-1', name)) for name in FILES]
)
def test_a_file_that_cannot_be_used_is_refused_before_anything_is_loaded(tmp_path, name):
    content, metric = FILES[name]
    path = tmp_path / 'set.jsonl'
    path.write_text(content)
    words = [*EVALUATE, f'--sets={path}', f'--metric={metric}']
    ended = run_python('-X', 'importtime', *words)
    lines = [line for line in ended.stderr.splitlines() if not line.startswith('import time:')]
    assert ended.returncode == 2 and len(lines) == 1 and 'set.jsonl' in lines[0]
    assert '| jax\n' not in ended.stderr


REQUESTS = {
    'no JSON': ('max_tokens=3', 'give a JSON object'),
    'a list': ('[1]', 'a JSON list'),
    'another model': ('{"model": "x"}', "take 'model' away"),
    'a stream': ('{"stream": true}', "take 'stream' away"),
}


@pytest.mark.parametrize(
    'name', [pytest.param(name, marks=pytest.mark.fault('third-9', name)) for name in REQUESTS]
)
def test_a_request_that_cannot_be_sent_is_refused(name):
    request, reason = REQUESTS[name]
    config = common.get_config()
    config.judge.request = request
    with pytest.raises(ConfigError, match=rf'config\.judge\.request=.*{reason}'):
        rules.check(config)


@pytest.mark.parametrize(
    ('flags', 'line'),
    [
        (
            '--answering=direct,retrieve --config.tools.names=("open",)',
            'needs a search; add search to',
        ),
        ('--sets=average.jsonl', 'has the name of another or of the average; rename'),
    ],
)
def test_flags_of_sets_are_refused_before_anything_is_loaded(flags, line, tmp_path):
    text = '{"question": "Who?", "answers": ["I"]}'
    for name in ('one', 'average'):
        (tmp_path / f'{name}.jsonl').write_text(text)
    command = f'--sets=one.jsonl {flags}'.replace('--sets=', f'--sets={tmp_path}/')
    ended = run_python(*EVALUATE, *command.split())
    assert ended.returncode == 2 and line in ended.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    'flag', ['--metric=judge', '--samples=4', '--temperature=0.5', '--limit=3', '--answerer=x']
)
@pytest.mark.fault('kin-flags', 'flags of --sets without --sets')
def test_flags_that_would_have_no_effect_are_refused(flag):
    ended = run_python(*EVALUATE, flag)
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 2 and f'{flag}: is for the questions of --sets' in line


def test_files_that_only_training_reads_need_not_exist(tmp_path):
    """The config names answers, and its index is the first thing that is missed."""
    path = tmp_path / 'set.jsonl'
    path.write_text('{"question": "Who?", "answers": ["I"]}')
    words = ('-m', 'zeroplay_jax.evaluate', '--config=configs/ssp.py', '--protocol=ssp')
    policy = '--policy=zeroplay_jax/mini/base'
    ended = run_python(*words, policy, f'--sets={path}', f'--index={tmp_path}/none')
    assert ended.returncode == 2 and 'not an index folder' in ended.stderr.splitlines()[-1]
