"""Asks a policy a question and shows its thoughts, tool calls, their results and its answer as they come.

Without a question it opens a prompt: one question after the other, Ctrl-C stops an answer, Ctrl-D ends. Questions can
also be piped in, one per line.

Without --policy it asks a tiny built-in checkpoint (zeroplay_jax/mini/base). Without --index the policy searches
the corpus of the run that trained it, or else the miniature world with its held-out passages, as
zeroplay evaluate does.

A policy in the folder of its run is asked as it was trained: prompts, tools and lengths are read from the run's
record. Another folder with the built-in tokenizer is asked with the defaults, one with that of zeroplay_jax/mini/parts
or zeroplay_jax/mini/english as in configs/quickstart.py or configs/english.py, and any other as in configs/drzero.py,
for instruction-tuned models.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import pathlib
import re
import signal
import sys
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ml_collections import ConfigDict

from zeroplay_jax.configuration import command_line, fields, places
from zeroplay_jax.mini.question_form import form_of
from zeroplay_jax.policy import adapter_config
from zeroplay_jax.retrieval import downloads, progress
from zeroplay_jax.retrieval.command import Parser, number_type, show_messages
from zeroplay_jax.selfplay.recipe import recipe_class
from zeroplay_jax.settings import schema
from zeroplay_jax.settings.kinds import BUILT_IN_CHECKPOINT, ConfigError, is_server, refuse
from zeroplay_jax.tools import registry
from zeroplay_jax.types import UserError

if TYPE_CHECKING:
    from zeroplay_jax.session import Session

EXAMPLES = """examples:
  zeroplay ask
  zeroplay ask "What is the birthplace of Rapon?"
  zeroplay ask --policy runs/quickstart/policy/solver "What is the teacher of the founder of Mimi?"
  zeroplay ask --policy zeroplay_jax/mini/parts/base --policy runs/quickstart/policy/solver "…"
  zeroplay ask --policy runs/own/policy/solver --index indexes/own --json "who wrote it" > answer.json
  zeroplay ask --policy Qwen2.5-3B-Instruct --syntax qwen --tools search,open
  zeroplay ask --policy Qwen2.5-3B-Instruct --tools search --mcp-servers mcp.json
  zeroplay ask --index http://127.0.0.1:8000 < questions.txt
  zeroplay ask --policy runs/own/policy/solver --config.rollout.turn_tokens=256 "who wrote it"

--config.FIELD=VALUE sets any field of the config with which the policy is asked, as in the other commands.

exit status: 0; 2 after a mistake in the command, which is named in one line; 130 after Ctrl-C.
"""

_NAME = 'zeroplay ask'
_POLICY_FIELD = '--config.policy.path='
# Read from the config schema, because rollout/call_syntax.py would load transformers before the command is checked.
SYNTAXES: tuple[str, ...] = typing.get_args(schema.Tools.model_fields['syntax'].annotation)


def _parser() -> Parser:
    """Returns the parser of the command line; without a flag the config decides, except for temperature and seed."""
    parser = Parser(
        prog='zeroplay ask',
        description=__doc__,
        epilog=EXAMPLES,
    )
    parser.add_argument('question', nargs='?', help='in quotes; without it, a prompt')
    parser.add_argument(
        '--policy',
        metavar='PATH',
        action='append',
        help='Hugging Face folder, such as runs/quickstart/policy/solver, hf://owner/model, or gs://bucket/path; given '
        'twice, both answer; or http(s)://…/v1#MODEL, a model at a server',
    )
    parser.add_argument(
        '--index',
        metavar='PATH',
        help='folder of zeroplay index, or http://… of zeroplay serve',
    )
    parser.add_argument(
        '--tools',
        metavar='NAME,…',
        help=f'{", ".join(registry.BUILT_IN)}, or package.module:attribute',
    )
    parser.add_argument(
        '--mcp-servers',
        metavar='FILE',
        help='JSON file with "mcpServers", whose tools are offered beside the others, or the address of one server',
    )
    parser.add_argument(
        '--syntax',
        choices=SYNTAXES,
        help='how tools are called: <search>…</search> (search_r1), <tool_call>{json}</tool_call> (qwen), …',
    )
    parser.add_argument(
        '--temperature',
        metavar='T',
        type=number_type(float, 0),
        default=0.0,
        help='0, the default, is greedy',
    )
    parser.add_argument(
        '--json',
        action='store_true',
        help='print only the trajectory, one JSON object per question',
    )
    return parser


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    """Returns the arguments.

    Raises:
      UserError: a mistake in the command line.
    """
    args, unknown = _parser().parse_known_args(argv)
    args.fields = [word for word in unknown if word.startswith(fields.PREFIX)]
    for field in args.fields:
        # Other commands have the field; here the folder decides about the config, so the flag comes first.
        if field.startswith(_POLICY_FIELD) and args.policy is None:
            args.policy = [field.removeprefix(_POLICY_FIELD)]
    unknown = [word for word in unknown if not word.startswith(fields.PREFIX)]
    if unknown:
        fix = '--help shows the flags'
        if not unknown[0].startswith('-'):
            fix = 'put the question in quotes'
        raise UserError(f'{unknown[0]!r} has no meaning here; {fix}')
    if args.question is not None:
        _check_encoding(args.question)
        if not args.question.strip():
            raise UserError('the question is empty; write one, or none for a prompt')
    elif args.json and sys.stdin.isatty():
        raise UserError('--json without a question; give one, or pipe questions in, one per line')
    return args


def _check_encoding(question: str) -> None:
    """Raises UserError for a question that was not UTF-8; bytes that are no UTF-8 have arrived as surrogates."""
    # UTF-16 has a NUL beside every ASCII character; a line of it may have nothing else.
    is_utf16 = '\0' in question
    if is_utf16 or re.search('[\ud800-\udfff]', question):
        charset = 'utf-16' if is_utf16 else 'latin1'
        raise UserError(
            f'the question is not UTF-8; set the terminal to it, or convert a file with iconv -f {charset} -t utf-8'
        )


def _policy_folder(path: str | None) -> pathlib.Path | str:
    """Returns the folder of --policy, or of the built-in checkpoint if `path` is None; a server's address as it is.

    Raises:
      UserError: the folder is not a checkpoint; the error lists checkpoints inside it.
    """
    if path is None:
        return BUILT_IN_CHECKPOINT
    if is_server(path):
        return path
    path = downloads.fetch_model(command_line.policy_of_iteration(path))
    config = fields.default_config()
    config.policy.path = path
    try:
        refuse(config, places.policy_folder(config, recipe_class(config.recipe)))
    except ConfigError as error:
        # A likely mistake: the folder of a run, or of `make quickstart CORPUS=…`, instead of a policy in it.
        folder = pathlib.Path(path)
        inside = []
        for name in ('tokenizer.json', adapter_config.CONFIG_FILE):
            for pattern in ('*', 'policy/*', 'run/policy/*'):
                inside += [str(file.parent) for file in folder.glob(f'{pattern}/{name}')]
        if not inside:
            raise
        raise UserError(f'{error}; in it are {", ".join(sorted(inside))}') from None
    return pathlib.Path(path)


def _lacks_index(config: ConfigDict) -> bool:
    """Returns whether a config has no corpus: that of a policy that reads English, outside a run."""
    return config.retrieval.kind == 'folder' and not config.retrieval.path


def _apply_flags(config: ConfigDict, folder: pathlib.Path | str, args: argparse.Namespace) -> None:
    """Writes the values of the flags into the config of the policy in a folder.

    Raises:
      UserError: the index folder is missing, or a field that cannot be set.
    """
    if args.syntax is not None:
        config.tools.syntax = args.syntax
    if args.tools is not None:
        config.tools.names = tuple(name.strip() for name in args.tools.split(','))
    if args.mcp_servers is not None:
        config.tools.mcp_servers = args.mcp_servers
        # Their tools join those of --tools or of the run.
        if 'mcp' not in config.tools.names:
            config.tools.names = (*config.tools.names, 'mcp')
    if args.index is not None:
        fields.set_fields(config, command_line.index_fields(args.index))
    fields.set_fields(config, args.fields)
    for name in config.tools.names:
        registry.check_name(name)
    recipe = recipe_class(config.recipe)
    refuse(config, places.addresses(config, recipe))
    if is_server(config.policy.path):
        refuse(config, places.policy_folder(config, recipe))
    # No other file of the policy's run is read.
    if config.retrieval.kind == 'folder':
        places.fetch(config, section_name='retrieval')
        if _lacks_index(config):
            raise UserError(
                f'{folder}: this policy searches no built-in corpus; name an index with --index'
            )
        refuse(config, places.index_folder(config, recipe))


def _is_coloured() -> bool:
    """Returns whether to colour the output (https://no-color.org)."""
    is_wanted = 'NO_COLOR' not in os.environ and os.environ.get('TERM') != 'dumb'
    return is_wanted and sys.stdout.isatty()


def _exit_at_once(*_: Any) -> NoReturn:
    """Handler of SIGINT outside of a prompt: ends the process with status 130."""
    if sys.stdout.isatty():
        os.write(1, b'\x1b[0m\n')
    # os._exit is not delayed by a library that is loading or a thread that waits for a server.
    os._exit(130)


def _answer(sessions: Sequence[Session], question: str, stoppable: bool = False) -> bool:
    """Has all policies answer; for each that the question cannot be put to there is a line on stderr, and False."""
    is_asked = True
    for session in sessions:
        if len(sessions) > 1 and not session.as_json:
            session.printer.line('note', str(session.folder), label='policy')
        try:
            session.answer(question, stoppable)
        except UserError as error:
            print(f'{_NAME}: {error}', file=sys.stderr, flush=True)
            is_asked = False
    return is_asked


def _run_prompt(sessions: Sequence[Session]) -> int:
    """Asks the questions typed at a terminal until Ctrl-D or Ctrl-C; returns the exit status."""
    import readline  # noqa: F401, input() edits lines with it

    for session in sessions:
        session.greet()
    while True:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            question = input('ask> ')
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()
            return 130
        # While an answer runs, the session installs a handler of its own.
        signal.signal(signal.SIGINT, lambda *_: None)
        if question.strip():
            _answer(sessions, question, stoppable=True)


def _run_pipe(sessions: Sequence[Session]) -> int:
    """Asks every line of stdin; returns the exit status, 2 if some line could not be asked."""
    status = 0
    for line in sys.stdin:
        # Files of Windows begin with a byte order mark.
        question = line.removeprefix('\ufeff').strip()
        if not question:
            continue
        # A question that cannot be asked does not stop the others.
        try:
            _check_encoding(question)
        except UserError as error:
            print(f'{_NAME}: {error}', file=sys.stderr, flush=True)
            status = 2
            continue
        if not sessions[0].as_json:
            sessions[0].printer.line('question', question)
        if not _answer(sessions, question):
            status = 2
    return status


def _load(
    args: argparse.Namespace, configs: Mapping[pathlib.Path | str, ConfigDict]
) -> list[Session]:
    """Loads libraries, corpus and the weights in each folder, and returns a session for each."""
    command_line.prepare_process()
    # These imports load JAX, so they follow the checks of the command.
    from zeroplay_jax import session
    from zeroplay_jax.evaluation.render import Printer

    return [
        session.Session(
            config,
            folder,
            Printer(_is_coloured()),
            temperature=args.temperature,
            as_json=args.json,
            # Of several policies some may be asked.
            first_question=args.question if len(configs) == 1 else None,
            form=form_of(folder) if isinstance(folder, pathlib.Path) else None,
        )
        for folder, config in configs.items()
    ]


def _run(argv: list[str] | None) -> int:
    """Asks the question of the command line, or those of a prompt or stdin; returns the exit status.

    Replaces the handler of SIGINT, which is not restored.
    """
    args = _arguments(argv)
    # This import loads transformers, which --help and a wrong command need not wait for.
    from zeroplay_jax.run.policy_settings import settings

    # Bytes of a pipe that are not UTF-8 stay visible to `_check_encoding`.
    stdin_errors = 'replace' if sys.stdin.isatty() else 'surrogateescape'
    for stream, errors in ((sys.stdin, stdin_errors), (sys.stdout, 'replace')):
        # In a notebook the standard streams have other types.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    configs = {folder: settings(folder) for folder in map(_policy_folder, args.policy or [None])}
    indexes = {config.retrieval.path for config in configs.values()} - {''}
    for folder, config in configs.items():
        # The policy before training searches the index of the run that began with it.
        if _lacks_index(config) and len(indexes) == 1:
            [config.retrieval.path] = indexes
        _apply_flags(config, folder, args)
    # Libraries now load in C++ code, where a KeyboardInterrupt would be delayed.
    signal.signal(signal.SIGINT, _exit_at_once)
    with progress.clock('loading libraries, index and policy'):
        sessions = _load(args, configs)
    if args.question is not None:
        return 0 if _answer(sessions, args.question) else 2
    if sys.stdin.isatty() and sys.stdout.isatty():
        return _run_prompt(sessions)
    # A prompt in a pipe would mix with the answers.
    return _run_pipe(sessions)


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit status; errors of the user are one line on stderr."""
    try:
        return _run(argv)
    except UserError as error:
        print(f'{_NAME}: {error}', file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == '__main__':
    show_messages(logging.WARNING)
    sys.exit(main())
