"""A corpus of one's own from end to end: passages, index, held-out questions, self-play, report."""

import json
import os
import shutil
import subprocess

import pytest
from python_process import PIPES, ROOT, config_flags, run_python
from run_files import lines, summary_of

from zeroplay_jax import quickstart
from zeroplay_jax.configs import english
from zeroplay_jax.configuration import rules
from zeroplay_jax.retrieval import folder
from zeroplay_jax.retrieval.corpus import split
from zeroplay_jax.settings.kinds import EXAMPLE_TEXTS
from zeroplay_jax.types import UserError

# So few steps may all be empty.
SMALL = config_flags("""
    stop_after_empty_steps=0 sampler.slots=16 proposer.batch=4 proposer.steps=1 pool.batch=4 pool.batches=1
    solver.batch=2 solver.steps=1 solver.samples=3 reward.solves=2 schedule.iterations=1 micro.rows=2
    eval.questions=2 eval.every=0 log.writers=()
""")


def play(place):
    words = ('--corpus=the texts', '--workdir=runs/a b', *SMALL)
    return run_python('-m', 'zeroplay_jax.quickstart', *words, cwd=place, PYTHONPATH=str(ROOT))


@pytest.fixture(scope='module')
def played(tmp_path_factory):
    """(workdir, what the command wrote) of a run on the example texts; there is a blank in every path."""
    place = tmp_path_factory.mktemp('my own')
    shutil.copytree(EXAMPLE_TEXTS, place / 'the texts')
    (place / 'the texts' / 'picture.png').write_bytes(b'\x89PNG')
    done = play(place)
    assert done.returncode == 0, done.stderr[-3000:]
    return place / 'runs' / 'a b', done


def test_the_run_has_a_report_a_policy_and_a_real_index(played):
    workdir, _ = played
    assert (workdir / 'run' / 'report.html').is_file()
    summary = summary_of(workdir / 'run')
    # Self-play without questions from outside.
    assert summary['outside_questions'] == 0
    # Whether so small a run has reward variance may depend on the processor's rounding.
    is_trained = summary['policies']['solver']['trained']
    assert (workdir / 'run' / 'policy' / 'solver' / 'model.safetensors').is_file() == is_trained
    manifest = folder.verify(workdir / 'index')
    assert manifest['kind'] == 'scann' and manifest['corpus']['passages'] == 80


def test_training_never_draws_a_held_out_document(played):
    workdir, _ = played
    titles = {split(line['contents'])[0] for line in lines(workdir, 'corpus.jsonl')}
    held_out = {question['title'] for question in lines(workdir, 'questions.jsonl')}
    log = (workdir / 'run' / 'tasks.jsonl').read_text()
    drawn = {title for title in titles if json.dumps(title) in log}
    prompts = (workdir / 'run' / 'trajectories.jsonl').read_text()
    assert len(held_out) == 6 and drawn and not drawn & held_out
    shown = {title for title in titles if f'Document: (Title: {title})' in prompts}
    assert shown and not shown & held_out


def test_training_finds_no_held_out_passage_and_evaluations_do(played):
    workdir, _ = played
    held_out = {line['document_id'] for line in lines(workdir, 'held_out.jsonl')}
    passages = {line['id'] for line in lines(workdir, 'corpus.jsonl')}
    trained = {line['document_id'] for line in lines(workdir, 'documents.jsonl')}
    assert held_out and held_out < passages and not held_out & trained
    found = {False: set(), True: set()}
    for row in lines(workdir / 'run', 'trajectories.jsonl'):
        for call in filter(None, row['turns']):
            ids = {passage['id'] for each in call['documents'] for passage in each}
            found[row['phase'] == 'evaluation'] |= ids
    assert found[False] and not found[False] & held_out
    assert found[True] & held_out


def times(workdir):
    return {path: path.stat().st_mtime_ns for path in workdir.glob('*') if path.name != 'run'}


def policy_files(workdir):
    paths = sorted((workdir / 'run' / 'policy').rglob('*'))
    return {path: path.read_bytes() for path in paths if path.is_file()}


def test_the_same_command_repeats_no_step(played):
    workdir, _ = played
    place = workdir.parents[1]
    before, policies = times(workdir), policy_files(workdir)
    summary = (workdir / 'run' / 'summary.json').read_bytes()
    again = play(place)
    assert again.returncode == 0, again.stderr[-2000:]
    assert again.stdout.count('== ') == 1 and 'the report is' in again.stdout
    assert times(workdir) == before
    assert summary == (workdir / 'run' / 'summary.json').read_bytes()
    assert policies == policy_files(workdir)


# ---- without a run ---------------------------------------------------------------------------------------


@pytest.fixture
def texts(tmp_path):
    return shutil.copytree(EXAMPLE_TEXTS, tmp_path / 'texts')


def prepare(texts, workdir, *arguments):
    """What `main` does before the run; returns the run's command line."""
    flags = [f'--corpus={texts}', f'--workdir={workdir}', '--encoder=bm25', *arguments]
    return quickstart._prepare(flags)


def contents(workdir):
    return {path.name: path.read_bytes() for path in workdir.iterdir() if path.is_file()}


def test_an_interrupted_command_gives_the_same_files(texts, tmp_path, monkeypatch):
    whole, stopped = tmp_path / 'whole', tmp_path / 'stopped'
    prepare(texts, whole)
    for step in ('_make_questions', '_make_index'):
        with monkeypatch.context() as patch:
            patch.setattr(quickstart, step, interrupt)
            with pytest.raises(SystemExit) as caught:
                quickstart.main([f'--corpus={texts}', f'--workdir={stopped}', '--encoder=bm25'])
            assert caught.value.code == 130
    prepare(texts, stopped)
    assert contents(whole) == contents(stopped)
    assert folder.fingerprint(whole / 'index') == folder.fingerprint(stopped / 'index')


def interrupt(*_):
    raise KeyboardInterrupt


def refused(capsys, *arguments):
    """The one line with which the command ends."""
    with pytest.raises(SystemExit) as caught:
        quickstart.main(list(map(str, arguments)))
    captured = capsys.readouterr()
    assert caught.value.code == 2 and captured.err.count('\n') == 1, captured.err
    assert captured.err.startswith('zeroplay_jax: ')
    return captured.err


def test_a_workdir_of_something_else_is_refused(texts, tmp_path, capsys):
    workdir = tmp_path / 'w'
    prepare(texts, workdir)
    before = contents(workdir)
    arguments = (f'--corpus={texts}', f'--workdir={workdir}')
    assert 'was begun with another encoder' in refused(capsys, *arguments)
    (texts / 'saturn.txt').write_text('Saturn\nAnother text.')
    line = refused(capsys, *arguments, '--encoder=bm25')
    assert 'was begun with another corpus' in line
    assert contents(workdir) == before


def test_a_folder_of_the_user_is_not_written_into(texts, tmp_path, capsys):
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine' / 'corpus.jsonl').write_text('{}')
    line = refused(capsys, f'--corpus={texts}', f'--workdir={tmp_path / "mine"}')
    assert 'is not empty and was not made from a corpus' in line
    assert contents(tmp_path / 'mine') == {'corpus.jsonl': b'{}'}


def test_the_config_is_sound(texts, tmp_path):
    prepare(texts, tmp_path / 'w')
    config = english.get_config(str(tmp_path / 'w'))
    rules.check(config)
    assert config.eval.questions >= 200
    assert config.retrieval.held_out == str(tmp_path / 'w' / 'held_out.jsonl')
    # Documents of `zeroplay_jax.extras.inputs documents` or of a small corpus have one hop.
    assert tuple(english.get_config().schedule.hop_ratio) == (1.0,)
    with pytest.raises(UserError, match='not an index folder'):
        rules.check(english.get_config())


def make(*arguments, **environment):
    """What `make -n quickstart` would run."""
    command = ['make', '-n', 'quickstart', *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, **PIPES)
