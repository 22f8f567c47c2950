"""A corpus of one's own from end to end: passages, index, held-out questions, self-play, report."""

import json
import os
import shutil
import sys

import pytest
from python_process import ROOT, config_flags, run_python
from run_files import lines, summary_of

from zeroplay_jax import quickstart
from zeroplay_jax.configs import english
from zeroplay_jax.configuration import rules
from zeroplay_jax.retrieval import folder
from zeroplay_jax.settings.kinds import EXAMPLE_TEXTS
from zeroplay_jax.types import UserError

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


def test_every_step_says_what_it_made(played):
    _, done = played
    text = done.stdout
    assert '== corpus: 15 of 16 files are English text; 80 passages' in text
    assert ' questions about 15 documents, of ' in text and '== sentences not asked about: ' in text
    assert '== index: bm25 in runs/a b/index' in text
    assert 'Exact match on held-out questions' in text
    assert 'start: zeroplay_jax/mini/english/base, shown how to fill blanks' in text
    assert 'the report is runs/a b/run/report.html' in text
    assert 'warning: the texts: 1 of 16 files are left out: 1 .png' in done.stderr


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
    assert manifest['kind'] == 'bm25' and manifest['corpus']['passages'] == 80


def test_training_never_draws_a_held_out_passage(played):
    workdir, _ = played
    ids = {line['id'] for line in lines(workdir, 'corpus.jsonl')}
    held_out = {line['document_id'] for line in lines(workdir, 'held_out.jsonl')}
    log = (workdir / 'run' / 'tasks.jsonl').read_text()
    drawn = {passage for passage in ids if json.dumps(passage) in log}
    assert len(held_out) > 15 and drawn and not drawn & held_out


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
    flags = [f'--corpus={texts}', f'--workdir={workdir}', *arguments]
    return quickstart._prepare(flags)


def contents(workdir):
    return {path.name: path.read_bytes() for path in workdir.iterdir() if path.is_file()}


def test_bm25_and_own_questions(texts, tmp_path, capsys):
    own = tmp_path / 'own questions.jsonl'
    own.write_text(json.dumps({'question': 'Who discovered Titan?', 'answer': 'Huygens'}) + '\n')
    workdir = tmp_path / 'w'
    flags = ('--seed=3', f'--config.eval.file={own}', '--config.solver.steps=1')
    command = prepare(texts, workdir, *flags)
    assert folder.read_manifest(workdir / 'index')['kind'] == 'bm25'
    # Own questions may be about any document: none is held out.
    assert not english.get_config(str(workdir)).retrieval.held_out
    assert 'have no ____' in capsys.readouterr().err
    assert command[-3:] == ['--config.seed=3', *flags[1:]]


def test_other_settings_are_another_run_over_the_same_index(texts, tmp_path):
    workdir = tmp_path / 'w'
    runs = []
    solver, proposer = '--config.solver.steps=1', '--config.proposer.steps=1'
    for flags in ((), (solver, proposer), (), ('--seed=1',)):
        runs.append(prepare(texts, workdir, *flags)[2])
    # The same settings in another order, and what a resumed run may change.
    for flags in (
        (proposer, solver),
        ('--config.progress=False',),
        ('--config.schedule.iterations=5', '--seed=1'),
    ):
        runs.append(prepare(texts, workdir, *flags)[2])
    names = [run.rpartition('/')[2] for run in runs]
    assert names == ['run', 'run2', 'run', 'run3', 'run2', 'run', 'run3']
    # `run.json` would be read as the record of a run in the workdir itself.
    assert not (workdir / 'run.json').exists()


def test_results_of_searches_are_as_long_as_the_passages(texts, tmp_path):
    workdir = tmp_path / 'w'
    prepare(texts, workdir)
    usual = english.get_config(str(workdir))
    passages = [json.loads(line) for line in (workdir / 'corpus.jsonl').open()]
    for passage in passages:
        passage['contents'] += ' zqx' * 100
    (workdir / 'corpus.jsonl').write_text('\n'.join(map(json.dumps, passages)))
    longer = english.get_config(str(workdir))
    assert longer.rollout.observation_tokens >= 3 * 200 > usual.rollout.observation_tokens
    # The proposer's prompt has one passage.
    assert longer.rollout.prompt_tokens >= 256 + 60
    rules.check(longer, is_training=False)


def test_the_passages_that_are_measured_are_of_the_whole_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(english, '_PASSAGES', 10)
    texts = ['short'] * 50 + ['long ' * 300] * 50
    lines = [json.dumps({'id': str(number), 'contents': text}) for number, text in enumerate(texts)]
    (tmp_path / 'corpus.jsonl').write_text('\n'.join(lines))
    assert english.get_config(str(tmp_path)).rollout.observation_tokens > 3 * 300


def test_an_evaluation_needs_no_file_of_training(texts, tmp_path):
    workdir = tmp_path / 'w'
    prepare(texts, workdir)
    (workdir / 'documents.jsonl').unlink()
    flags = (f'--config={ROOT}/configs/english.py:{workdir}', '--config.eval.questions=2')
    done = run_python('-m', 'zeroplay_jax.evaluate', *flags, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr[-2000:]


def test_an_interrupted_command_gives_the_same_files(texts, tmp_path, monkeypatch):
    whole, stopped = tmp_path / 'whole', tmp_path / 'stopped'
    prepare(texts, whole)
    for step in ('_make_questions', '_make_index'):
        with monkeypatch.context() as patch:
            patch.setattr(quickstart, step, interrupt)
            with pytest.raises(SystemExit) as caught:
                quickstart.main([f'--corpus={texts}', f'--workdir={stopped}'])
            assert caught.value.code == 130
    prepare(texts, stopped)
    assert contents(whole) == contents(stopped)
    assert folder.fingerprint(whole / 'index') == folder.fingerprint(stopped / 'index')


def test_the_run_has_a_process_of_its_own(texts, tmp_path, monkeypatch):
    """The index was built with the devices of JAX, which a run divides before they exist, and a resumed run has not."""
    replaced = []
    monkeypatch.setattr(os, 'execv', lambda program, words: replaced.extend([program, *words]))
    quickstart.main([f'--corpus={texts}', f'--workdir={tmp_path}/w'])
    assert replaced[:4] == [sys.executable, sys.executable, '-m', 'zeroplay_jax.main']
    assert f'--workdir={tmp_path}/w/run' in replaced


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
    assert 'was begun with another encoder' in refused(capsys, *arguments, '--encoder=lexical')
    (texts / 'saturn.txt').write_text('Saturn\nAnother text.')
    line = refused(capsys, *arguments)
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
