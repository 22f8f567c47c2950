"""Rules about the files and folders that a config names."""

from __future__ import annotations

from collections.abc import Callable

from ml_collections import ConfigDict

from zeroplay_jax.configuration.checkpoint_rules import file_exists
from zeroplay_jax.retrieval import hub
from zeroplay_jax.retrieval.suggestions import similar_path
from zeroplay_jax.selfplay import files
from zeroplay_jax.selfplay.library import has_index
from zeroplay_jax.selfplay.recipe import Recipe
from zeroplay_jax.settings.errors import ConfigError, fail
from zeroplay_jax.types import UserError

# Field → function that reads its file and raises UserError at the first unusable line. They run here as well as in
# the run, because that one loads its libraries before: a file of 100,000 lines costs about a second.
_READERS: dict[str, Callable[[str], object]] = {
    'eval.file': files.questions,
    'eval.tasks': files.open_tasks,
    'inputs.answers': files.read_lines,
    'inputs.questions': files.questions,
    'inputs.tasks': files.open_tasks,
    'inputs.documents': files.documents,
    'retrieval.held_out': files.held_out_passages,
}


def check_retrieval(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses a missing index folder."""
    path = config.retrieval.path
    if config.retrieval.kind == 'folder' and not has_index(path):
        fix = 'build one with python -m zeroplay_jax.retrieval.build'
        fail('retrieval.path', path, 'not an index folder', fix + similar_path(path))


def check_documents(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses a search server without an index folder for a training run that reads documents from one."""
    retrieval = config.retrieval
    if retrieval.kind != 'http' or has_index(retrieval.path):
        return
    reader = ''
    if recipe.reads_documents(config):
        reader = f'recipe {config.recipe} takes its documents'
    elif retrieval.held_out:
        reader = 'retrieval.held_out is compared'
    if reader:
        problem = (
            f'not an index folder: {retrieval.url} answers searches, but {reader} from a folder'
        )
        fix = 'name the folder that the server serves by --config.retrieval.path=FOLDER'
        if 'documents' in recipe.input_files and not retrieval.held_out:
            fix += ', or a file of documents by --config.inputs.documents=FILE'
        fail('retrieval.path', retrieval.path, problem, fix + similar_path(retrieval.path))


def check_files(config: ConfigDict, recipe: type[Recipe]) -> None:
    """Refuses missing files, files that the recipe or the corpus does not take, and files with an unusable line."""
    is_world = config.retrieval.kind == 'world'
    for name, lines in (('file', 'questions with answers'), ('tasks', 'open tasks with rubrics')):
        path = config.eval[name]
        if not path:
            continue
        if is_world:
            problem = 'the miniature world has its own questions'
            fail(
                f'eval.{name}',
                path,
                problem,
                'leave it empty, or set retrieval.kind to folder or http',
            )
        if not file_exists(f'eval.{name}', path):
            fix = f'name JSON lines of {lines} to evaluate on{similar_path(path)}'
            fail(f'eval.{name}', path, 'no such file', fix)
    for name in ('answers', 'questions', 'tasks', 'documents'):
        path = config.inputs[name]
        if path and name not in recipe.input_files:
            fail(f'inputs.{name}', path, f'recipe {config.recipe} takes none', 'leave it empty')
        if path and not file_exists(f'inputs.{name}', path):
            fix = f'name a file of JSON lines{similar_path(path)}'
            fail(f'inputs.{name}', path, 'no such file', fix)
    for field, read in _READERS.items():
        section, name = field.split('.')
        path = config[section][name]
        # Files of the Hub are downloaded later.
        if path and not hub.is_name(path):
            try:
                read(path)
            except UserError as error:
                raise ConfigError(f'config.{field}: {error}') from None
