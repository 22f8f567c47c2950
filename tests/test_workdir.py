"""The folder of a run: what belongs to it, what is refused, and what a refused run leaves behind."""

import pathlib
import shutil

import pytest
from python_process import ROOT, config_flags, run_python
from refused_calls import check_table
from run_records import begin, change_record, stored_config

from zeroplay_jax.configs import english, quickstart
from zeroplay_jax.configuration import command_line, fields
from zeroplay_jax.configuration.fields import read_stored_config
from zeroplay_jax.retrieval import downloads
from zeroplay_jax.run import run_folder
from zeroplay_jax.runtime import workdir as run_workdir
from zeroplay_jax.runtime.workdir import WorkdirError, claim
from zeroplay_jax.settings import kinds
from zeroplay_jax.types import UserError

CONFIG = {'seed': 0, 'solver': {'batch': 32}}


def test_a_run_that_did_not_start_leaves_nothing_behind(tmp_path):
    for existing in ((), ('a',), ('a', 'run')):
        folder = tmp_path.joinpath(*existing)
        folder.mkdir(exist_ok=True)
        with pytest.raises(UserError), claim(tmp_path / 'a' / 'run', CONFIG):
            raise UserError('the mesh does not fit')
        assert not list(folder.iterdir())


def test_a_lock_that_was_removed_meanwhile_protects_nothing(tmp_path, monkeypatch):
    """A second process opened the lock of a run that then did not start; it must lock the file that is there."""
    real = run_workdir._is_at
    removed = []

    def remove_once(file, path):
        if not removed:
            removed.append(path)
            path.unlink()
        return real(file, path)

    monkeypatch.setattr(run_workdir, '_is_at', remove_once)
    with claim(tmp_path, CONFIG), pytest.raises(WorkdirError, match='in use'):
        begin(tmp_path, CONFIG)
    assert removed


def test_a_section_that_the_config_lacks_is_a_difference(tmp_path):
    configs = CONFIG | {'evaluation': {'samples': 4}}, CONFIG
    for name, first, second in (('a', *configs), ('b', *configs[::-1])):
        begin(tmp_path / name, first)
        with pytest.raises(WorkdirError, match='evaluation.samples'):
            begin(tmp_path / name, second)


def test_a_schedule_may_become_longer_and_not_shorter(tmp_path):
    shorter, longer = (CONFIG | {'schedule': {'iterations': number}} for number in (1, 2))
    begin(tmp_path / 'a', shorter)
    begin(tmp_path / 'a', longer)
    begin(tmp_path / 'b', longer)
    with pytest.raises(WorkdirError, match=r'schedule.iterations \(there 2, now 1\)'):
        begin(tmp_path / 'b', shorter)


# Names in place of paths


def make_clone(folder):
    """A clone of the project as far as a built-in checkpoint is concerned; returns its package."""
    package = folder / 'zeroplay_jax'
    (package / 'mini' / 'english').mkdir(parents=True)
    (package / 'mini' / 'english' / 'base').symlink_to(kinds.ENGLISH_CHECKPOINT)
    return package


def test_another_clone_resumes_a_run_from_a_built_in_checkpoint(tmp_path, monkeypatch):
    name = 'zeroplay_jax/mini/english/base'
    workdir = tmp_path / 'run'
    begin(workdir, english.get_config())
    stored = stored_config(workdir)
    assert stored['policy']['path'] == name
    package = make_clone(tmp_path / 'clone')
    monkeypatch.setattr(kinds, 'PACKAGE', package)
    config = english.get_config()
    config.policy.path = str(package.parent / name)

    def check(path):
        """The run, stored with this path, is resumed from the checkpoint of the clone."""
        stored['policy']['path'] = path
        change_record(workdir, config=stored)
        fields.check(workdir, config)
        assert read_stored_config(workdir).policy.path == config.policy.path

    check(name)
    # As an earlier version stored it, in a clone that was moved since.
    check(f'/gone/{name}')
    # In a clone that is still there, with the same bytes; a README may change.
    other = tmp_path / 'other' / name
    shutil.copytree(kinds.ENGLISH_CHECKPOINT, other)
    (other / 'README.md').write_text('changed')
    check(f'{other.parent}/../english/base/')
    # Another checkpoint is another run still, and so is a clone with files of its own.
    check(name)
    different = package / 'mini' / 'base'
    different.mkdir()
    (other / 'generation_config.json').write_text('{}')
    for path in (different, other):
        config.policy.path = str(path)
        with pytest.raises(WorkdirError, match=r'policy\.path \(there'):
            fields.check(workdir, config)


def test_what_is_no_folder_for_a_run_is_refused(tmp_path, monkeypatch):
    """The table also has damaged records, and names of built-in files and of files in the Hub's cache."""
    monkeypatch.chdir(tmp_path)
    names = vars(run_workdir) | vars(kinds) | vars(downloads) | {'check_mesh': check_mesh}
    names['record'] = record_of
    check_table(ROOT / 'tests' / 'golden' / 'workdir_refusals.txt', names, tmp_path)
    assert not list(tmp_path.iterdir())


def record_of(content):
    """Begins a run whose record has this content."""
    workdir = pathlib.Path('run')
    begin(workdir, CONFIG)
    try:
        (workdir / 'run.json').write_bytes(content)
        begin(workdir, CONFIG)
    finally:
        shutil.rmtree(workdir)


def check_mesh(rows=16, **sizes):
    config = quickstart.get_config()
    config.micro.rows = rows
    config.mesh.update({'replica': 1, 'fsdp': 1, 'model': 1} | sizes)
    command_line.check_devices(config)


WRONG_COLUMNS = 'retrieval.kind=http retrieval.path=index eval.file=questions.jsonl'


@pytest.mark.parametrize(
    ('changes', 'line'),
    [
        ('seed=1', 'seed (there 0, now 1); choose another workdir'),
        (WRONG_COLUMNS, 'config.eval.file: questions.jsonl, line 1: '),
    ],
)
def test_what_cannot_run_is_refused_before_jax_is_loaded(tmp_path, changes, line):
    begin(tmp_path / 'run', quickstart.get_config())
    (tmp_path / 'index').mkdir()
    (tmp_path / 'index' / 'manifest.json').write_text('{}')
    (tmp_path / 'questions.jsonl').write_text('{"question": "who?", "reply": "x"}\n')
    # If it were imported, JAX would end the process.
    (tmp_path / 'jax.py').write_text('raise SystemExit("jax was imported")\n')
    words = [f'--config={ROOT}/configs/quickstart.py', '--workdir=run', *config_flags(changes)]
    paths = {'PYTHONPATH': f'{tmp_path}:{ROOT}', 'PYTHONDONTWRITEBYTECODE': '1'}
    before = sorted(tmp_path.rglob('*'))
    result = run_python('-m', 'zeroplay_jax.main', *words, cwd=tmp_path, fresh=True, **paths)
    assert result.returncode == 2
    assert line in result.stderr and len(result.stderr.splitlines()) == 1, result.stderr
    assert sorted(tmp_path.rglob('*')) == before


# What a run reads


@pytest.fixture
def read_files(tmp_path, monkeypatch):
    """A config with files of its own, in the current folder."""
    monkeypatch.chdir(tmp_path)
    config = quickstart.get_config()
    pathlib.Path('policy').mkdir()
    for name in ('config.json', 'tokenizer.json', 'model.safetensors', 'README.md'):
        pathlib.Path('policy', name).write_text(name)
    pathlib.Path('index').mkdir()
    pathlib.Path('index', 'manifest.json').write_text('{"files": 1}')
    pathlib.Path('questions.jsonl').write_text('{"question": "who?"}\n')
    pathlib.Path('documents.jsonl').write_text('{"title": "a"}\n')
    config.policy.path = 'policy'
    config.retrieval.update(kind='http', path='index')
    config.eval.file = 'questions.jsonl'
    config.inputs.documents = 'documents.jsonl'
    return config


def record(config, workdir, index='hash 1', is_resumed=True):
    if is_resumed:
        (workdir / 'checkpoints' / '1').mkdir(parents=True, exist_ok=True)
    inputs, _ = run_folder.check(workdir, config)
    start = dict(index=index, template={}, roles={}, weights={}, policies={}, is_resumed=is_resumed)
    run_folder.begin(workdir, config, inputs, **start)


@pytest.mark.parametrize(
    ('path', 'field'),
    [
        ('policy/model.safetensors', 'policy.path: model.safetensors has other bytes'),
        ('index/manifest.json', 'retrieval.path: manifest.json has other bytes'),
        ('questions.jsonl', 'eval.file: questions.jsonl has other bytes'),
        ('documents.jsonl', 'inputs.documents: documents.jsonl has other bytes'),
        ('policy/more.json', 'policy.path: more.json is new'),
    ],
)
def test_a_resume_on_other_content_is_refused_in_one_line(read_files, path, field):
    workdir = pathlib.Path('run')
    workdir.mkdir()
    record(read_files, workdir, is_resumed=False)
    record(read_files, workdir)
    path = pathlib.Path(path)
    # Of the same length, where the file was there.
    path.write_text(path.read_text()[::-1] if path.exists() else 'new')
    with pytest.raises(UserError, match=f'config.{field}; bring that back, .*--from=run$') as error:
        record(read_files, workdir)
    assert '\n' not in str(error.value)
    # Before the first checkpoint nothing was learnt from it.
    shutil.rmtree(workdir / 'checkpoints')
    record(read_files, workdir, is_resumed=False)
    record(read_files, workdir)


def test_files_that_a_run_does_not_read_may_change_and_another_server_index_may_not(read_files):
    workdir = pathlib.Path('run')
    workdir.mkdir()
    record(read_files, workdir)
    pathlib.Path('policy/README.md').write_text('changed')
    pathlib.Path('questions.jsonl').touch()
    record(read_files, workdir)
    with pytest.raises(UserError, match='config.retrieval.url: hash 1 is missing'):
        record(read_files, workdir, index='hash 2')


# Files that a run writes
