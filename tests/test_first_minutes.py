"""What a newcomer meets in the first minutes: commands that say what there is, and libraries that keep quiet."""

import pytest
from python_process import ROOT, run_python

import zeroplay_jax
from zeroplay_jax import __main__ as commands
from zeroplay_jax.extras import EXTRAS
from zeroplay_jax.settings.kinds import EXAMPLE_TEXTS


def run(module, *words, folder=ROOT):
    # JAX looks for accelerators, as it does for anybody.
    return run_python(
        '-m', module, *words, cwd=folder, PYTHONPATH=str(ROOT), JAX_PLATFORMS='', fresh=True
    )


@pytest.mark.fault('user-12', 'python -m zeroplay_jax')
def test_the_package_lists_its_commands(capsys):
    assert commands.main([]) == 0
    listed = capsys.readouterr().out.splitlines()
    for command, line in zip(commands.COMMANDS, listed):
        assert line.startswith(f'python -m zeroplay_jax.{command} ') and line.endswith('.')
    runnable = {
        path.relative_to(ROOT / 'zeroplay_jax').with_suffix('').as_posix().replace('/', '.')
        for folder in ('', 'retrieval', 'mini')
        for path in (ROOT / 'zeroplay_jax' / folder).glob('*.py')
        if "if __name__ == '__main__':" in path.read_text()
    }
    # What trains the checkpoints that come with the package is for its developers.
    makers = {name for name in runnable if name.startswith('mini.') and name != 'mini.sample'}
    runnable |= {f'extras.{name}' for name, extra in EXTRAS.items() if extra.is_command}
    assert runnable - makers - {'__main__'} == set(commands.COMMANDS)


@pytest.mark.parametrize(
    ('word', 'line'),
    [('evalute', 'did you mean evaluate?'), ('nothing', 'lists the commands')],
)
def test_an_unknown_command_gets_the_nearest_name(word, line, capsys):
    assert commands.main([word]) == 2
    assert line in capsys.readouterr().err


def test_the_version_is_told(capsys):
    assert commands.main(['--version']) == 0
    assert capsys.readouterr().out == f'zeroplay_jax {zeroplay_jax.__version__}\n'


def test_a_command_as_a_word_is_the_module():
    modules = {'train': 'main', 'compare': 'compare', 'retrieval.query': 'retrieval.query'}
    for word, module in modules.items():
        as_word, as_module = (
            run('zeroplay_jax', word, '--nothing'),
            run(f'zeroplay_jax.{module}', '--nothing'),
        )
        assert as_word.returncode == 2 and as_word.stderr == as_module.stderr != ''


@pytest.mark.fault('user-12', '-h of main and evaluate')
@pytest.mark.parametrize('module', ['main', 'evaluate'])
def test_the_short_flag_for_help_helps(module):
    result = run(f'zeroplay_jax.{module}', '-h')
    assert result.returncode == 0 and '--config: ' in result.stdout and not result.stderr


@pytest.mark.fault('user-10', 'retrieval.build on a machine without a TPU')
def test_building_an_index_prints_nothing_of_libraries(tmp_path):
    words = ('--corpus', str(EXAMPLE_TEXTS), '--encoder', 'lexical', '--out', 'index')
    result = run('zeroplay_jax.retrieval.build', *words, folder=tmp_path)
    assert result.returncode == 0
    *about, last = result.stderr.splitlines()
    assert last.startswith('index: 44 passages') and len(about) == 1


@pytest.mark.fault('user-10', 'reading a checkpoint of several processes, or for an export')
def test_orbax_does_not_report_sizes_that_it_does_not_log(caplog):
    from absl import logging

    from zeroplay_jax.learner import checkpoint

    checkpoint.state_reader()
    logging.set_verbosity(logging.WARNING)
    logger = logging.get_absl_logger()
    record = logger.makeRecord(
        'absl', 30, '', 0, 'Global object size logging disabled for `primary_host=None`.', (), None
    )
    assert not logger.filter(record)
    assert logger.filter(logger.makeRecord('absl', 30, '', 0, 'something else', (), None))
