"""A corpus of one's own from end to end: passages, index, held-out questions, self-play, report."""

import json
import pathlib
import shutil

import input_files
import pytest
from python_process import ROOT, config_flags, run_python
from refused_calls import refused
from run_files import lines, summary_of

from zeroplay_jax import quickstart
from zeroplay_jax.configs import english
from zeroplay_jax.configuration import rules
from zeroplay_jax.retrieval import folder
from zeroplay_jax.settings.kinds import EXAMPLE_TEXTS

# So few steps may all be empty.
SMALL = config_flags("""
    stop_after_empty_steps=0 sampler.slots=16 proposer.batch=4 proposer.steps=1 pool.batch=4 pool.batches=1
    solver.batch=2 solver.steps=1 solver.samples=3 reward.solves=2 schedule.iterations=1 micro.rows=2
    eval.questions=2 eval.every=0 log.writers=()
""")


def play(place):
    # Of another seed so small a run learns nothing.
    words = ('--corpus=the texts', '--workdir=runs/a b', '--seed=1', *SMALL)
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
    workdir, done = played
    assert 'the report is runs/a b/run/report.html' in done.stdout
    assert (workdir / 'run' / 'report.html').is_file()
    assert 'warning: the texts: 1 of 16 files are left out: 1 .png' in done.stderr
    # Whether so small a run has reward variance may depend on the processor's rounding.
    is_trained = summary_of(workdir / 'run')['policies']['solver']['trained']
    assert (workdir / 'run' / 'policy' / 'solver' / 'model.safetensors').is_file() == is_trained
    manifest = folder.verify(workdir / 'index')
    assert manifest['kind'] == 'bm25' and manifest['corpus']['passages'] == 80


def test_training_neither_draws_nor_finds_a_held_out_passage_and_evaluations_do(played):
    workdir, _ = played
    passages = {line['id'] for line in lines(workdir, 'corpus.jsonl')}
    held_out = {line['document_id'] for line in lines(workdir, 'held_out.jsonl')}
    assert len(held_out) > 15 and held_out < passages
    log = (workdir / 'run' / 'tasks.jsonl').read_text()
    drawn = {passage for passage in passages if json.dumps(passage) in log}
    assert drawn and not drawn & held_out
    found = {False: set(), True: set()}
    for row in lines(workdir / 'run', 'trajectories.jsonl'):
        for call in filter(None, row['turns']):
            ids = {passage['id'] for each in call['documents'] for passage in each}
            found[row['phase'] == 'evaluation'] |= ids
    assert found[False] and not found[False] & held_out
    assert found[True] & held_out


def contents(*folders):
    paths = [path for folder in folders for path in folder.iterdir()]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def test_the_same_command_repeats_no_step(played):
    workdir, _ = played
    made = (workdir, workdir / 'index', workdir / 'run' / 'policy' / 'solver')
    before = contents(*filter(pathlib.Path.is_dir, made)), summary_of(workdir / 'run')
    again = play(workdir.parents[1])
    assert again.returncode == 0, again.stderr[-2000:]
    assert again.stdout.count('== ') == 1 and 'the report is' in again.stdout
    after = contents(*filter(pathlib.Path.is_dir, made)), summary_of(workdir / 'run')
    assert before == after


# ---- without a run ---------------------------------------------------------------------------------------


@pytest.fixture
def texts(tmp_path):
    return shutil.copytree(EXAMPLE_TEXTS, tmp_path / 'texts')


def prepare(texts, workdir, *arguments):
    """What `main` does before the run; returns the run's command line."""
    flags = [f'--corpus={texts}', f'--workdir={workdir}', *arguments]
    return quickstart._prepare(flags)


def test_the_config_is_sound_and_own_questions_hold_nothing_out(texts, tmp_path):
    prepare(texts, tmp_path / 'w')
    config = english.get_config(str(tmp_path / 'w'))
    rules.check(config)
    assert config.retrieval.held_out == str(tmp_path / 'w' / 'held_out.jsonl')
    own = input_files.write(tmp_path / 'own.jsonl', {'question': 'Who?', 'answer': 'Huygens'})
    flags = ('--seed=3', f'--config.eval.file={own}', '--config.solver.steps=1')
    command = prepare(texts, tmp_path / 'own', *flags)
    assert command[-3:] == ['--config.seed=3', *flags[1:]]
    # They may be about any document.
    assert not english.get_config(str(tmp_path / 'own')).retrieval.held_out


def test_other_settings_are_another_run_over_the_same_index(texts, tmp_path):
    solver, proposer = '--config.solver.steps=1', '--config.proposer.steps=1'
    # What a resumed run may change makes no other one, nor does the order of settings.
    for name, *flags in (
        ('run',),
        ('run2', solver, proposer),
        ('run', '--config.progress=False'),
        ('run3', '--seed=1'),
        ('run2', proposer, solver),
        ('run3', '--config.schedule.iterations=5', '--seed=1'),
    ):
        command = prepare(texts, tmp_path / 'w', *flags)
        assert command[2] == f'--workdir={tmp_path}/w/{name}'


def interrupt(*_):
    raise KeyboardInterrupt


def test_an_interrupted_command_gives_the_same_files(texts, tmp_path, monkeypatch):
    whole, stopped = tmp_path / 'whole', tmp_path / 'stopped'
    prepare(texts, whole)
    for step in ('_make_questions', '_make_index'):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(quickstart, step, interrupt)
            prepare(texts, stopped)
    prepare(texts, stopped)
    assert contents(whole, whole / 'index') == contents(stopped, stopped / 'index')


def test_a_workdir_of_something_else_is_refused_and_left_alone(texts, tmp_path):
    workdir, mine = tmp_path / 'w', tmp_path / 'mine'
    prepare(texts, workdir)
    mine.mkdir()
    (mine / 'corpus.jsonl').write_text('{}')
    before = contents(workdir)
    assert 'is not empty and was not made from a corpus' in refused(prepare, texts, mine)
    line = refused(prepare, texts, workdir, '--encoder=lexical')
    assert 'was begun with another encoder' in line
    (texts / 'saturn.txt').write_text('Saturn\nAnother text.')
    assert 'was begun with another corpus' in refused(prepare, texts, workdir)
    assert contents(workdir) == before and contents(mine) == {'corpus.jsonl': b'{}'}
