"""Asks a policy a question and shows its thoughts, searches, passages and answer as they come.

Without a question it is a prompt: one question after the other, Ctrl-C stops an answer, Ctrl-D ends. Questions can also
be piped in, one per line.

Without --policy it asks the built-in tiny checkpoint as it ships (zeroplay_jax/mini/base, which a quickstart begins
with and which is often wrong; zeroplay_jax/mini/clean is seldom). Without --index the policy searches what the run
searched that trained it, or else the miniature world with its held-out passages, as zeroplay_jax.evaluate does.

A policy in the folder of its run is asked as it was trained: prompts, tool calls and lengths are read from the run's
config.json. Another folder with the built-in tokenizer is asked as configs/quickstart.py has it, and any other as
configs/drzero.py has it, for instruction-tuned models.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pathlib
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from zeroplay_jax import start
from zeroplay_jax.configs import common, drzero
from zeroplay_jax.retrieval import progress
from zeroplay_jax.retrieval.command import Parser
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.rules import BUILT_IN
from zeroplay_jax.types import UserError

EXAMPLES = """examples:
  python -m zeroplay_jax.ask
  python -m zeroplay_jax.ask "What is the birthplace of Rapon?"
  python -m zeroplay_jax.ask --policy runs/quickstart/policy/solver "What is the teacher of the founder of Mimi?"
  python -m zeroplay_jax.ask --policy runs/own/policy/solver --index indexes/own --json "who wrote it" > answer.json
  python -m zeroplay_jax.ask --index http://127.0.0.1:8000 --topk 5 < questions.txt

exit status: 0; 2 after a mistake in the command, which is named in one line; 130 after Ctrl-C.
"""

# Seconds for a search server to answer whether it is there.
READY_SECONDS = 5.0
LABEL = 10
COLOURS = {
    'question': '1',
    'think': '2',
    'text': '0',
    'search': '1;36',
    'passages': '34',
    'answer': '1;32',
    'error': '31',
    'note': '2',
}
ENDINGS = {
    'answer': 'its tags do not match',
    'malformed': 'it stands inside a search that was never closed',
    'eos': 'the policy ended without one',
    'turn_tokens': 'a turn was longer than the policy may write at a time',
    'turns': 'no turn is left (--turns)',
    'context': 'its context is full',
}


def _number(kind: Callable[[str], Any], least: float) -> Callable[[str], Any]:
    def read(text: str):
        with contextlib.suppress(ValueError):
            if least <= (value := kind(text)) < float('inf'):
                return value
        raise argparse.ArgumentTypeError(
            f'{text!r} is not possible; give a number of {least} or more'
        )

    return read


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog='python -m zeroplay_jax.ask',
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add('question', nargs='?', help='in quotes; without it, a prompt')
    add(
        '--policy',
        metavar='PATH',
        help='Hugging Face folder, such as runs/quickstart/policy/solver',
    )
    add(
        '--index',
        metavar='PATH',
        help='folder of python -m retrieval.build, or http://… of python -m retrieval.server',
    )
    add(
        '--tools',
        choices=('search_r1', 'qwen'),
        help='<search>…</search> or <tool_call>{json}</tool_call>',
    )
    add(
        '--turns',
        metavar='N',
        type=_number(int, 1),
        help='turns at most; the last one cannot search',
    )
    add(
        '--topk',
        metavar='N',
        type=_number(int, 1),
        help='passages per search, at most those that there are',
    )
    add(
        '--temperature',
        metavar='T',
        type=_number(float, 0),
        default=0.0,
        help='0, the default, is greedy',
    )
    add(
        '--seed',
        metavar='N',
        type=_number(int, 0),
        default=0,
        help='of what is sampled at a temperature above 0',
    )
    add(
        '--json',
        action='store_true',
        help='print nothing but the trajectory, one JSON object per question',
    )
    args, rest = parser.parse_known_args(argv)
    if rest:
        mend = 'put the question in quotes' if rest[0][:1] != '-' else '--help shows the flags'
        raise UserError(f'{rest[0]!r} has no meaning here; {mend}')
    return args


# ------------------------------------------------------------------------------------------------------------
# Settings: how this policy is asked
# ------------------------------------------------------------------------------------------------------------


def _folder(path: str | None) -> pathlib.Path:
    folder = pathlib.Path(path) if path is not None else BUILT_IN
    below = sorted([*folder.glob('policy/*/config.json'), *folder.glob('*/config.json')])
    mend = 'name a Hugging Face folder (config.json, tokenizer.json, *.safetensors)'
    if below:
        mend = f'name a policy in it: {", ".join(str(path.parent) for path in below)}'
    if not folder.is_dir():
        raise UserError(f'--policy {path}: no such folder; {mend}')
    for pattern in ('config.json', 'tokenizer.json', '*.safetensors'):
        if not any(folder.glob(pattern)):
            raise UserError(f'--policy {folder}: the folder has no {pattern}; {mend}')
    return folder


def settings(folder: pathlib.Path):
    """The config by which a policy folder is asked; see the head of this file.

    Raises:
      UserError: the run that the folder lies in has a config that this version does not know.
    """
    run = folder.absolute().parent.parent / 'config.json'
    try:
        stored = json.loads(run.read_text(encoding='utf-8'))
        ours = (
            isinstance(stored, dict)
            and {'recipe', 'rollout', 'tools', 'retrieval'} <= stored.keys()
        )
    except (OSError, ValueError):
        ours = False
    if ours:
        config = common.get_config().lock()
        try:
            _fill(config, stored)
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f'{run}: not a config of this version ({error}); copy the policy elsewhere'
            ) from None
        return config
    if (folder / 'tokenizer.json').read_bytes() == (BUILT_IN / 'tokenizer.json').read_bytes():
        return common.get_config()
    config = drzero.get_config()
    config.retrieval.update(kind='world', path='')
    most = json.loads((folder / 'config.json').read_text(encoding='utf-8')).get(
        'max_position_embeddings'
    )
    if isinstance(most, int):
        config.sampler.context = min(config.sampler.context, most)
    return config


def _fill(config, stored: dict) -> None:
    for name, value in stored.items():
        if isinstance(value, dict):
            _fill(config[name], value)
        else:
            config[name] = tuple(value) if isinstance(value, list) else value


def _with_flags(config, args: argparse.Namespace):
    """Flags on top; more turns or passages get more room."""
    c = config.rollout
    need = c.max_turns * (c.turn_tokens + c.observation_tokens)
    c.max_turns = args.turns or c.max_turns
    top_k = args.topk or config.tools.top_k
    c.observation_tokens = -(
        -c.observation_tokens * max(top_k, config.tools.top_k) // config.tools.top_k
    )
    config.sampler.context += max(0, c.max_turns * (c.turn_tokens + c.observation_tokens) - need)
    config.tools.top_k, config.seed = top_k, args.seed
    config.tools.family = args.tools or config.tools.family
    if args.index is not None:
        served = args.index.startswith(('http://', 'https://'))
        place = (
            dict(kind='http', url=args.index)
            if served
            else dict(kind='folder', path=args.index, encoder='')
        )
        config.retrieval.update(place)
    if (
        config.retrieval.kind == 'folder'
        and not (pathlib.Path(config.retrieval.path) / 'manifest.json').is_file()
    ):
        whose = (
            f'--index {args.index}'
            if args.index is not None
            else f'{config.retrieval.path} (searched by its run)'
        )
        raise UserError(
            f'{whose}: no index folder; build one with python -m retrieval.build and name it with --index'
        )
    return config


# ------------------------------------------------------------------------------------------------------------
# Showing
# ------------------------------------------------------------------------------------------------------------


class Printer:
    """What `Agent.ask` tells, as labelled lines; coloured on a terminal."""

    def __init__(self, colour: bool, clean: Callable[[str], str]):
        self._colour, self._clean = colour, clean
        self._open, self._blank = '', ''

    def tell(self, kind: str, content: Any) -> None:
        """One event of a rollout."""
        if kind == 'end':
            self._end()
        elif kind == 'queries':
            for query in content:
                self.line('search', query)
        elif kind == 'call':
            self.line('search', content)
        elif kind == 'passages':
            for number, found in enumerate(content, 1):
                if len(content) > 1:
                    self.line('passages', f'of search {number}', label='')
                for place, passage in enumerate(found, 1):
                    self.line(
                        'passages', f'{passage["title"]}: {passage["text"]}', label=f'  [{place}]'
                    )
                if not found:
                    self.line('passages', 'no passage found', label='')
        elif kind == 'error':
            self.line('error', content)
        else:
            self._stream(kind, content)

    def line(self, kind: str, text: str, label: str | None = None) -> None:
        """A line of its own; line ends inside become blanks."""
        self._end()
        self._begin(kind, kind if label is None else label)
        self._write(' '.join(text.split()))
        self._end()

    def _stream(self, kind: str, text: str) -> None:
        """Text that goes on; blanks around it are left out."""
        if self._open != kind:
            self._end()
            text = text.lstrip()
            if not text:
                return
            self._begin(kind, '' if kind == 'text' else kind)
        whole = self._blank + text
        shown = whole.rstrip()
        self._blank = whole[len(shown) :]
        self._write(shown)

    def _begin(self, kind: str, label: str) -> None:
        if self._colour:
            sys.stdout.write(f'\x1b[{COLOURS[kind]}m')
        sys.stdout.write(f'{label:{LABEL}}')
        self._open = kind

    def _write(self, text: str) -> None:
        sys.stdout.write(self._clean(text).replace('\n', '\n' + ' ' * LABEL))
        sys.stdout.flush()

    def _end(self) -> None:
        if self._open:
            sys.stdout.write('\x1b[0m\n' if self._colour else '\n')
            sys.stdout.flush()
        self._open = self._blank = ''


def _leave(*_: Any) -> NoReturn:
    """Ctrl-C: out at once, whatever library or server is waited for."""
    if sys.stdout.isatty():
        os.write(1, b'\x1b[0m\n')
    os._exit(130)


# ------------------------------------------------------------------------------------------------------------
# Asking
# ------------------------------------------------------------------------------------------------------------


class _Session:
    """A loaded agent, and how its answers are shown."""

    def __init__(self, args: argparse.Namespace, folder: pathlib.Path, config):
        from zeroplay_jax.evaluation import asking  # loads JAX: only once the command is sound

        self.asking, self.args, self.folder, self.config = asking, args, folder, config
        self.codec = asking.open_codec(folder)
        self.prompt = asking.solver_prompt(config.recipe)
        if args.question is not None:
            asking.check_question(config, self.codec, self.prompt, args.question)
        if config.retrieval.kind != 'http':
            start.load_libraries()
        self.searcher = asking.open_searcher(config, READY_SECONDS)
        self.agent = asking.Agent(config, folder, self.codec, self.searcher.search, self.prompt)
        colour = (
            sys.stdout.isatty()
            and 'NO_COLOR' not in os.environ
            and os.environ.get('TERM') != 'dumb'
        )
        self.printer = Printer(colour, asking.clean)
        self.asked = 0

    def answer(self, question: str, stoppable: bool = False) -> None:
        """Asks and shows; with `stoppable` Ctrl-C ends the answer only."""
        self.asking.check_question(self.config, self.codec, self.prompt, question)
        number, self.asked = self.asked, self.asked + 1
        with contextlib.ExitStack() as waiting:
            waiting.enter_context(progress.clock('thinking'))  # a first answer waits for XLA

            def tell(kind: str, content: Any) -> None:
                waiting.close()
                self.printer.tell(kind, content)

            heard = {} if self.args.json else {'tell': tell}
            found = self.agent.ask(
                question, number, self.args.temperature, stoppable=stoppable, **heard
            )
        if found is None:
            self.printer.line('note', 'stopped', label='')
            return
        if self.args.json:
            about = {
                'policy': str(self.folder),
                'search': self.searcher.about,
                'temperature': self.args.temperature,
            }
            whole = (
                self.asking.record(self.codec, question, found) | about | {'seed': self.args.seed}
            )
            print(self.asking.one_line_json(whole), flush=True)
        elif self.asking.answer_of(found) is None:
            self.printer.line('note', f'no answer: {ENDINGS[found.finish]}', label='')
        if warning := self.searcher.warning():
            print(f'zeroplay_jax.ask: {self.asking.clean(warning)}', file=sys.stderr)

    def greet(self) -> None:
        """What a prompt begins with."""
        which = (
            ' (as it ships; --policy zeroplay_jax/mini/clean is seldom wrong)'
            if self.args.policy is None
            else ''
        )
        self.printer.line('note', f'{self.folder}{which}', label='policy')
        self.printer.line('note', self.searcher.about, label='search')
        for question in self.searcher.examples:
            self.printer.line('note', question, label='try')
        self.printer.line('note', 'Ctrl-C stops an answer, Ctrl-D ends', label='')


def _converse(session: _Session) -> int:
    """The prompt on a terminal."""
    import readline  # noqa: F401, input() edits lines with it

    session.greet()
    while True:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            question = input('ask> ')
        except (EOFError, KeyboardInterrupt) as end:
            print()
            return 0 if isinstance(end, EOFError) else 130
        signal.signal(signal.SIGINT, lambda *_: None)  # an answer listens itself
        if question.strip():
            try:
                session.answer(question, stoppable=True)
            except UserError as error:
                print(f'zeroplay_jax.ask: {error}', file=sys.stderr)


def _run(argv: list[str] | None) -> int:
    args = _arguments(argv)
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):  # in a notebook it may be something else
            stream.reconfigure(errors='replace')
    if args.question is not None:  # bytes that are no UTF-8
        args.question = args.question.encode(errors='surrogateescape').decode(errors='replace')
    if args.question is not None and not args.question.strip():
        raise UserError('the question is empty; write one, or none for a prompt')
    if args.question is None and args.json and sys.stdin.isatty():
        raise UserError('--json without a question; give one, or pipe questions in, one per line')
    folder = _folder(args.policy)
    config = _with_flags(settings(folder), args)
    signal.signal(signal.SIGINT, _leave)
    with progress.clock('loading'):
        session = _Session(args, folder, config)
    if args.question is not None:
        session.answer(args.question)
    elif terminal:
        return _converse(session)
    else:
        return _from_pipe(session)
    return 0


def _from_pipe(session: _Session) -> int:
    """A question per line; one that cannot be asked does not keep the others from it."""
    status = 0
    for line in filter(str.strip, sys.stdin):
        if not session.args.json:
            session.printer.line('question', line)
        try:
            session.answer(line.strip())
        except UserError as error:
            print(f'zeroplay_jax.ask: {error}', file=sys.stderr, flush=True)
            status = 2
    return status


def main(argv: list[str] | None = None) -> int:
    """Asks; returns the exit status."""
    try:
        return _run(argv)
    except (UserError, RetrievalError) as error:
        print(f'zeroplay_jax.ask: {error}', file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == '__main__':
    sys.exit(main())
