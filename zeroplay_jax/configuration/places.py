"""Rules about what a config names outside the config (files, folders, checkpoints, servers), and its download."""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import shlex
import sys
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from zeroplay_jax.data import files
from zeroplay_jax.data.files import question_key
from zeroplay_jax.extras import load_extra
from zeroplay_jax.policy import adapter_config
from zeroplay_jax.policy.adapter_config import base_folder, holds_other_weights
from zeroplay_jax.retrieval import downloads, masking
from zeroplay_jax.retrieval.command import similar_path
from zeroplay_jax.retrieval.types import short
from zeroplay_jax.runtime import record as run_record
from zeroplay_jax.selfplay.library import has_index
from zeroplay_jax.selfplay.recipe import Recipe, trained_roles
from zeroplay_jax.settings.kinds import (
    BUILT_IN_CHECKPOINT,
    PROMPT_SETS,
    ConfigError,
    Problem,
    is_server,
    leaves,
    prompts_name,
    refuse,
    warn,
)
from zeroplay_jax.settings.schema import ALL_LINEARS, Config
from zeroplay_jax.types import UserError

if TYPE_CHECKING:
    from zeroplay_jax.policy.decoder import ModelConfig


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Turns errors about a file or address into ConfigError, which names the field or flag that names it."""
    try:
        yield
    except UserError as error:
        raise ConfigError(f'{name}: {error}') from None


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


def index_folder(config: Config, recipe: type[Recipe]) -> Iterator[Problem]:
    """A missing index folder."""
    path = config.retrieval.path
    if config.retrieval.kind == 'folder' and not has_index(path):
        text = 'not an index folder; build one with zeroplay index'
        yield Problem('retrieval.path', text + similar_path(path))


def documents(config: Config, recipe: type[Recipe]) -> Iterator[Problem]:
    """For training: a policy at a server, and a search server without the folder of its documents."""
    if is_server(config.policy.path):
        text = (
            'a server has no weights to train; it is for evaluate and ask; name a checkpoint folder'
        )
        yield Problem('policy.path', text)
    retrieval = config.retrieval
    if retrieval.kind != 'http' or has_index(retrieval.path):
        return
    reader = ''
    if recipe.reads_documents(config):
        reader = f'recipe {config.recipe} takes its documents'
    elif retrieval.held_out:
        reader = 'retrieval.held_out is compared'
    if reader:
        text = (
            f'not an index folder: {retrieval.url} answers searches, but {reader} from a folder; name the folder that '
            'the server serves by --config.retrieval.path=FOLDER'
        )
        if 'documents' in recipe.input_files and not retrieval.held_out:
            text += ', or a file of documents by --config.inputs.documents=FILE'
        yield Problem('retrieval.path', text + similar_path(retrieval.path))


def held_out(config: Config, recipe: type[Recipe]) -> Iterator[Problem]:
    """A list of held-out passages that is missing, or that training would read nevertheless."""
    path = config.retrieval.held_out
    if not path:
        return
    if config.retrieval.kind == 'world':
        text = 'the miniature world holds out worlds, not passages; leave it empty'
    elif not pathlib.Path(path).is_file():
        text = (
            'no such file; name JSON lines with "document_id", as zeroplay inputs cloze writes them'
        )
        text += similar_path(path)
    elif 'documents' in recipe.input_files and not config.inputs.documents:
        text = 'documents to ask about would be drawn from all passages; name a file in inputs.documents'
    else:
        return
    yield Problem('retrieval.held_out', text)


def world_files(config: Config, recipe: type[Recipe]) -> Iterator[Problem]:
    """Questions for the miniature world, which has its own."""
    for name in ('file', 'tasks'):
        if config.retrieval.kind == 'world' and config.eval[name]:
            text = 'the miniature world has its own questions; leave it empty, or set retrieval.kind to folder or http'
            yield Problem(f'eval.{name}', text)


def input_files(config: Config, recipe: type[Recipe]) -> Iterator[Problem]:
    """Missing files, and files with an unusable line."""
    values = leaves(config)
    contents: dict[str, list[Any]] = {}
    for field, read in _READERS.items():
        for path in filter(None, _paths(field, values.get(field, ''))):
            if not pathlib.Path(path).is_file() and not downloads.is_name(path):
                one_of_several = '' if path == values[field] else f'{path}: '
                text = f'no such file; name a file of JSON lines{similar_path(path)}'
                yield Problem(field, one_of_several + text)
                continue
            with _named(f'config.{field}'):
                if downloads.is_name(path):
                    # It is downloaded later.
                    downloads.check_name(path, is_file=True)
                else:
                    contents.setdefault(field, []).append(read(path))
    _warn_of_trained_questions(config, contents)
    names = [pathlib.Path(path).stem for path in config.eval.file.split(',')]
    if len(set(names)) < len(names):
        yield Problem('eval.file', 'two files have one name; rename one of them')


def _warn_of_trained_questions(config: ConfigDict, contents: Mapping[str, list[Any]]) -> None:
    """Warns of evaluated questions that are trained on; `contents`: field → what each of its files holds."""
    trained = itertools.chain(*contents.get('inputs.questions', ()))
    keys = {question_key(question.text) for question in trained}
    evaluated = list(itertools.chain(*contents.get('eval.file', ())))
    repeated = [question.text for question in evaluated if question_key(question.text) in keys]
    if repeated:
        command = ['zeroplay', 'inputs', 'questions', '--sets', config.inputs.questions]
        command += ['--not-in', config.eval.file]
        warn(
            f'{len(repeated)} of {len(evaluated)} questions of config.eval.file are trained on, such as '
            f'{short(repeated[0])}; config.inputs.questions without them: {shlex.join(command)} --out FILE'
        )


def _paths(field: str, value: str) -> list[str]:
    """Returns the paths in a field: of eval.file those between commas."""
    return value.split(',') if field == 'eval.file' else [value]


# Fields that may be a model on the Hub; others may be a file of a dataset.
_MODEL_FIELDS = ('policy.path', 'retrieval.encoder')


def policy_folder(config: Config, recipe: type[Recipe]) -> Iterator[Problem]:
    """A policy folder that is not a checkpoint, and a server without a model's name."""
    path = config.policy.path
    if is_server(path):
        example = 'http://127.0.0.1:8001/v1#model'
        yield from _address('policy.path', path, example, 'set OPENAI_API_KEY instead')
        if not urllib.parse.urlsplit(path).fragment:
            text = f'names no model; write it behind #, as in {example}'
            yield Problem('policy.path', text)
        return
    if config.policy.request:
        yield Problem('policy.request', 'only a server reads it; leave it out')
    with _named('config.policy.path'):
        if downloads.is_name(path):
            downloads.check_name(path, is_file=False)
            return
        # Of an adapter, the folder of its base.
        folder = base_folder(path or BUILT_IN_CHECKPOINT)
    text = 'no such folder'
    needed = ('config.json', 'tokenizer.json', '*.safetensors')
    missing = [pattern for pattern in needed if not any(folder.glob(pattern))]
    if folder.is_dir():
        text = f'the folder has no {", ".join(missing)}'
    fix = 'name a Hugging Face checkpoint folder (config.json, tokenizer.json, *.safetensors)'
    if missing == ['*.safetensors']:
        fix = 'write it with save_pretrained of transformers, which makes them'
    if not path:
        fix = 'train the built-in one with python -m tools.checkpoints.base_model'
    if missing:
        yield Problem('policy.path', f'{text}; {fix}{similar_path(folder)}')


def adapter_folders(config: Config, recipe: type[Recipe]) -> Iterator[Problem]:
    """Folders of adapters that do not have the rank, alpha, layers and base of the config."""
    settings = config.policy.adapters
    for role in trained_roles(config):
        folder = config[role].adapter
        if not settings.rank or not folder or downloads.is_address(folder):
            continue
        with _named(f'config.{role}.adapter'):
            stored = adapter_config.read(folder)
        others = [linear for linear in stored.linears if linear not in ALL_LINEARS]
        if others:
            text = f'it adapts {others[0]}; train an adapter of some of {", ".join(ALL_LINEARS)}'
            yield Problem(f'{role}.adapter', text)
            continue
        pairs = (
            ('rank', settings.rank, stored.rank),
            ('alpha', settings.alpha, stored.alpha),
            ('linears', tuple(sorted(settings.linears)), stored.linears),
        )
        for name, value, stored_value in pairs:
            if value != stored_value:
                text = f'the adapter of {role}.adapter={folder} has {stored_value}; give that'
                yield Problem(f'policy.adapters.{name}', text)
        base = pathlib.Path(config.policy.path or BUILT_IN_CHECKPOINT)
        # Otherwise it is on the Hub or in a bucket, or refused by another rule.
        if base.is_dir() and not stored.base.is_dir():
            warn(
                f'the adapter of config.{role}.adapter={folder} was trained over {stored.base}, which is not here; it '
                f'is used over {base}'
            )
        elif base.is_dir() and holds_other_weights(stored.base, base):
            text = f'its adapter was trained over the weights in {stored.base}; set policy.path to that folder'
            yield Problem(f'{role}.adapter', text)


def read_policy(config: ConfigDict | Config, **computation: Any) -> tuple[ModelConfig, str]:
    """Returns the architecture in the folder of the policy, and a warning about long sequences or ''; imports JAX.

    Args:
      computation: as `overrides` of `shape.read_config`.

    Raises:
      UserError: a field of its config.json is not supported, or a setting does not go with it.
    """
    from zeroplay_jax.policy import shape

    folder = pathlib.Path(config.policy.path or BUILT_IN_CHECKPOINT)
    model = shape.read_config(folder, **computation)
    context, page = config.sampler.context, config.sampler.page
    warning = shape.check_context(folder, context, 'sampler.context')
    if any(config[role].get('distill_top_k') for role in trained_roles(config)):
        tokens = config.privileged.prompt_tokens + context
        name = 'privileged.prompt_tokens + sampler.context'
        warning = shape.check_context(folder, tokens, name)
    if model.delta is not None and 0 < page < context:
        text = f'{folder} has gated delta nets, whose state belongs to a slot; set sampler.page=0'
        refuse(config, [Problem('sampler.page', text)])
    return model, warning


def fetch(config: ConfigDict, section_name: str = '') -> None:
    """Replaces names on the Hub and addresses in a bucket by the paths of their local copies, in place.

    Downloads what is missing or outdated; a model may take minutes. Paths of what comes with the package, such as
    zeroplay_jax/mini/base, become those of this installation.

    Args:
      config: is changed.
      section_name: only its fields; '': all.

    Raises:
      ConfigError: one line; what could not be fetched.
    """
    for name, value in leaves(config).items():
        if isinstance(value, str) and name.startswith(f'{section_name}.' if section_name else ''):
            fetch_one = downloads.fetch_model if name in _MODEL_FIELDS else downloads.fetch_file
            with _named(f'config.{name}'):
                fetched = ','.join(map(fetch_one, _paths(name, value)))
                config.update_from_flattened_dict({name: fetched})


def elsewhere(config: ConfigDict) -> list[str]:
    """Returns the fields that have a name on the Hub or an address in a bucket."""
    names = []
    for name, value in leaves(config).items():
        paths = _paths(name, value) if isinstance(value, str) else []
        if any(downloads.is_address(path) or downloads.is_name(path) for path in paths):
            names.append(name)
    return names


def fetch_model(flag: str, path: str) -> str:
    """Returns the local folder of a model of the Hub or in a bucket, downloaded if need be; a path as it is.

    Args:
      flag: the flag or field, for the error.
      path: a name of the Hub, gs://bucket/path, or a path.

    Raises:
      ConfigError: one line; it could not be fetched.
    """
    with _named(flag):
        return downloads.fetch_model(path)


def keep_prompts(config: ConfigDict, workdir: str | pathlib.Path, keeps_sets: bool = True) -> None:
    """Gives a config the prompts of a user with which the run in a workdir began, in place, and says so.

    Their file may be gone by now, or may have another text.

    Args:
      workdir: folder or address of a run; without a record that can be read nothing changes.
      keeps_sets: whether a config with a set of ours is left as it is.
    """
    given = str(config.get('prompts'))
    if keeps_sets and given in PROMPT_SETS:
        return
    # Only a run with such prompts loads this code.
    from zeroplay_jax.runtime.workdir import local_run

    try:
        recorded = run_record.read(local_run(workdir))
    except UserError:
        return
    text = str(recorded.config.get('prompts')) if recorded else ''
    if '\n' in text:
        print(
            f'note: the prompts are those with which {workdir} began ({prompts_name(text)}), from its '
            f'{run_record.FILE_NAME}, whatever config.prompts={prompts_name(given)} has now',
            file=sys.stderr,
        )
        config.prompts = text


def addresses(config: Config, recipe: type[Recipe]) -> Iterator[Problem]:
    """Addresses in use that are no web addresses, or hold a password or key."""
    if config.judge.kind == 'endpoint':
        example, key = 'http://127.0.0.1:8001/v1', 'set OPENAI_API_KEY instead'
        yield from _address('judge.url', config.judge.url, example, key)
    if config.retrieval.kind == 'http':
        tunnel = 'give an address without one, such as that of a tunnel'
        yield from _address('retrieval.url', config.retrieval.url, 'http://127.0.0.1:8000', tunnel)
    servers = config.tools.mcp_servers
    if 'mcp' in config.tools.names and '://' in servers:
        headers = 'give a file with headers instead'
        yield from _address('tools.mcp_servers', servers, 'http://127.0.0.1:8000/mcp', headers)
    elif 'mcp' in config.tools.names:
        # The keys of a server may be set on another machine only, so that they are not looked up here.
        load_extra('mcp').read_servers(servers)


def check_programs(config: ConfigDict) -> None:
    """Refuses MCP servers whose program is not on this machine."""
    servers = config.tools.mcp_servers
    if 'mcp' in config.tools.names and '://' not in servers:
        mcp = load_extra('mcp')
        for server in mcp.read_servers(servers):
            mcp.check_program(server)


def _address(field: str, address: str, example: str, password_fix: str) -> Iterator[Problem]:
    """Yields what is wrong with an address.

    Args:
      field: name of the setting.
      example: an address of this kind.
      password_fix: what to do about a password or key.
    """
    try:
        parts = urllib.parse.urlsplit(address)
        # `urlsplit` reads the port at the first access, and raises there.
        is_address = parts.scheme in ('http', 'https') and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        yield Problem(field, f'not a web address; give one such as {example}')
    # A run writes its config into its workdir and into its report.
    elif masking.hide(address) != address:
        yield Problem(field, f'the config must hold no password or key; {password_fix}')


# Rules about what lies on a disk.
RULES = (adapter_folders, index_folder, held_out, input_files, policy_folder)
