"""The folder of a run: what belongs to it, what is refused, and what a refused run leaves behind."""

import pathlib
import shutil

import pytest
from python_process import ROOT, run_python
from refused_calls import check_table, refused
from run_records import begin, begin_run, stored_config

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


def test_another_clone_resumes_a_run_from_a_built_in_checkpoint(tmp_path, monkeypatch):
    name, workdir, config = 'zeroplay_jax/mini/english/base', tmp_path / 'run', english.get_config()
    begin(workdir, config)
    assert stored_config(workdir)['policy']['path'] == name
    package = tmp_path / 'clone' / 'zeroplay_jax'
    shutil.copytree(kinds.ENGLISH_CHECKPOINT, package.parent / name)
    monkeypatch.setattr(kinds, 'PACKAGE', package)
    config.policy.path = str(package.parent / name)
    fields.check(workdir, config)
    assert read_stored_config(workdir).policy.path == config.policy.path


def test_what_is_no_folder_for_a_run_is_refused(tmp_path, monkeypatch):
    """The table also has damaged records, and names of built-in files and of files in the Hub's cache."""
    monkeypatch.chdir(tmp_path)
    names = vars(run_workdir) | vars(kinds) | vars(downloads) | {'check_mesh': check_mesh}
    names |= {'CONFIG': CONFIG, 'begun': begun}
    check_table(ROOT / 'tests' / 'golden' / 'workdir_refusals.txt', names, tmp_path)
    assert not list(tmp_path.iterdir())


def begun(*contents):
    """Begins a run again and again, with these configs, or where its record is these bytes."""
    workdir = pathlib.Path('run')
    try:
        for content in contents:
            if isinstance(content, bytes):
                (workdir / 'run.json').write_bytes(content)
                content = CONFIG
            begin(workdir, content)
    finally:
        shutil.rmtree(workdir)


def check_mesh(rows=16, **sizes):
    config = quickstart.get_config()
    config.micro.rows = rows
    config.mesh.update({'replica': 1, 'fsdp': 1, 'model': 1} | sizes)
    command_line.check_devices(config)


def test_what_cannot_run_is_refused_before_jax_is_loaded(tmp_path):
    begin(tmp_path / 'run', quickstart.get_config())
    # If it were imported, JAX would end the process.
    (tmp_path / 'jax.py').write_text('raise SystemExit("jax was imported")\n')
    words = [f'--config={ROOT}/configs/quickstart.py', '--workdir=run', '--config.seed=1']
    paths = {'PYTHONPATH': f'{tmp_path}:{ROOT}', 'PYTHONDONTWRITEBYTECODE': '1'}
    before = sorted(tmp_path.rglob('*'))
    result = run_python('-m', 'zeroplay_jax.main', *words, cwd=tmp_path, fresh=True, **paths)
    assert result.returncode == 2 and result.stderr.count('\n') == 1, result.stderr
    assert 'seed (there 0, now 1); choose another workdir' in result.stderr
    assert sorted(tmp_path.rglob('*')) == before


# What a run reads


@pytest.fixture
def config(tmp_path, monkeypatch):
    """One with files of its own, in the current folder."""
    monkeypatch.chdir(tmp_path)
    for folder in ('policy', 'index', 'run'):
        (tmp_path / folder).mkdir()
    for name in ('config.json', 'tokenizer.json', 'model.safetensors', 'README.md'):
        pathlib.Path('policy', name).write_text(name)
    for name in ('index/manifest.json', 'questions.jsonl', 'documents.jsonl'):
        pathlib.Path(name).write_text('{"question": "who?"}\n')
    config = quickstart.get_config()
    config.policy.path = 'policy'
    config.retrieval.update(kind='http', path='index')
    config.eval.file = 'questions.jsonl'
    config.inputs.documents = 'documents.jsonl'
    return config


def record(config, index='hash 1', is_resumed=True):
    workdir = pathlib.Path('run')
    inputs, _ = run_folder.check(workdir, config)
    begin_run(workdir, config, inputs, is_resumed, index=index)


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
def test_a_resume_on_other_content_is_refused_in_one_line(config, path, field):
    record(config, is_resumed=False)
    record(config)
    path = pathlib.Path(path)
    # Of the same length, where the file was there.
    path.write_text(path.read_text()[::-1] if path.exists() else 'new')
    line = refused(record, config)
    assert f'config.{field}; bring that back, ' in line and line.endswith('--from=run')
    # Before the first checkpoint nothing was learnt from it.
    shutil.rmtree('run/checkpoints')
    record(config, is_resumed=False)
    record(config)


def test_files_that_a_run_does_not_read_may_change_and_another_server_index_may_not(config):
    record(config)
    pathlib.Path('policy/README.md').write_text('changed')
    pathlib.Path('questions.jsonl').touch()
    record(config)
    assert 'config.retrieval.url: hash 1 is missing' in refused(record, config, 'hash 2')
