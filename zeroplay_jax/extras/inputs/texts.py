"""Folders of texts as people keep them: which files are read, what is in them, and the passages cut of them."""

from __future__ import annotations

import collections
import dataclasses
import lzma
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Set

from zeroplay_jax.extras.inputs.sentences import split_text
from zeroplay_jax.extras.inputs.titles import first_line_title
from zeroplay_jax.retrieval import json_text
from zeroplay_jax.retrieval.command import warn_once
from zeroplay_jax.retrieval.corpus import TEXT_SUFFIXES, BadLines
from zeroplay_jax.retrieval.json_text import Unusable
from zeroplay_jax.retrieval.rows import opened, suffix_of
from zeroplay_jax.retrieval.types import Record, contents, short, split

# Words of a passage that is cut from a longer text, as in Wikipedia-18.
WORDS = 100
# A passage that is longer by up to this factor is not cut: half a passage of Wikipedia-18 contains too few facts.
TOLERANCE = 1.5
# Files that are named for each reason why some are left out.
_NAMED_FILES = 3
# Problems that are named one by one in a line; a folder can hold files with hundreds of suffixes.
_NAMED_PROBLEMS = 8
# First letters of texts that only a converter makes into prose.
_MARKUP = re.compile(
    r'\s*(?:<doc id="|\{\\rtf|[.\']\\"|\.(?:th|dd) |warc/1\.[01]\r?\n)', re.IGNORECASE
)
# What makes a text of a manual page, whose suffix is a section.
_CONVERT = 'MANWIDTH=1000 man -P cat -l FILE > FILE.txt makes a text of a manual page, pandoc -t plain of most others'
_SECTION = re.compile(r'\.[1-9][a-z]*')
_SOFT_HYPHEN = '\u00ad'
# A word divided at the end of a line, by the hyphen of ASCII or the one that typesetters write.
_DIVIDED = re.compile(r'(?<![^\W_])([^\W_]+)[-\u2010][ \t]*\n[ \t]*([^\W_]+)')
_WORD = re.compile(r'[^\W_]+(?:-[^\W_]+)*')
# A character that the next one is printed over, for bold or underlined words (pages of man).
_OVERSTRUCK = re.compile(r'[^\n]\x08')
# Behind these the hyphen stands for the end of a later word: 'pre- and postfix'.
_SUSPENDED = ('and', 'or', 'to')
# By how many the compounds among divided words must outnumber the others before undecided ones count as compounds.
_MORE_COMPOUNDS = 3


def read_text(path: pathlib.Path) -> tuple[str, str]:
    """Returns (title, text) of a text file, as a reader sees them; ('', text) without a title.

    Lines end with line feeds; of plain text divided words are joined, and nothing is overstruck.

    Raises:
      OSError: it cannot be read.
      Unusable: it is no UTF-8 text, or markup that only a converter makes into one.
    """
    with opened(path) as stream:
        text = json_text.decode(stream.read())
    if _MARKUP.match(text):
        raise Unusable(f'a manual page or other markup; {_CONVERT}')
    text = text.replace('\r\n', '\n').replace('\r', '\n')
    # Its libraries take a moment to load.
    from zeroplay_jax.extras.inputs import markup

    form = markup.form_of(path, text)
    if form:
        title, text = markup.read(form, text)
        return (title, text) if title else first_line_title(text)
    return first_line_title(join_divided_words(_OVERSTRUCK.sub('', text)))


def join_divided_words(text: str) -> str:
    """Returns a text without soft hyphens, and with words joined that the end of a line divides.

    The hyphen is kept where the text has the word with it elsewhere, or has its second half as a word of its own. Of
    words about which the text says nothing it is kept if compounds clearly outnumber the others.
    """
    text = re.sub(rf'{_SOFT_HYPHEN}(?:\n[ \t]*)?', '', text)
    if _DIVIDED.search(text) is None:
        return text
    undivided = _DIVIDED.sub(' ', text).replace('\u2010', '-')
    words = {word.lower() for word in _WORD.findall(undivided)}
    wholes = compounds = 0
    for first, second in _DIVIDED.findall(text):
        if _is_undecided(first, second):
            wholes += f'{first}{second}'.lower() in words
            compounds += _is_compound(first, second, words)
    keeps_hyphens = compounds >= wholes + _MORE_COMPOUNDS

    def joined(divided: re.Match[str]) -> str:
        first, second = divided.groups()
        hyphenated = f'{first}-{second}'
        if first[-1].isdigit():
            # Years and pages; a smaller number begins a line of its own.
            is_range = second.isdigit() and (len(first), first) < (len(second), second)
            return hyphenated if is_range else divided.group()
        if second in _SUSPENDED:
            return divided.group()
        if f'{first}{second}'.lower() in words:
            return first + second
        # As in 'state-of-the-art'.
        is_inner_part = text[divided.start() - 1 : divided.start()] == '-'
        if is_inner_part or not _is_undecided(first, second):
            return hyphenated
        return hyphenated if keeps_hyphens or _is_compound(first, second, words) else first + second

    return _DIVIDED.sub(joined, text)


def _is_undecided(first: str, second: str) -> bool:
    """Returns whether a divided word can be written with or without its hyphen, unlike 'GPT-4' and 'Anglo-Saxon'."""
    is_word = first.isalpha() and second.isalpha() and second.islower()
    # Nor 'x-axis' and 'COVID-related'.
    return is_word and len(first) > 1 and not first.isupper()


def _is_compound(first: str, second: str, words: Set[str]) -> bool:
    """Returns whether the words of a text show that a divided word is written with its hyphen."""
    if f'{first}{second}'.lower() in words or second in _SUSPENDED:
        return False
    return f'{first}-{second}'.lower() in words or second in words


def files_of(source: pathlib.Path) -> list[pathlib.Path]:
    """Returns the texts in a folder; of a single text itself."""
    if not source.is_dir():
        return [source]
    texts = [path for path in files_below(source) if suffix_of(path) in TEXT_SUFFIXES]
    return [path for path in texts if path.is_file() and not path.name.startswith('.')]


def files_below(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns all files below a folder but those of hidden folders such as `.git` and `.venv`, also by links.

    Folders that can be reached in several ways are read once; links to a folder above are not followed.
    """
    paths = []
    visited = {str(parent) for parent in folder.resolve().parents}
    for place, folders, names in os.walk(folder, followlinks=True):
        target = os.path.realpath(place)
        if target in visited or (place != str(folder) and os.path.basename(target).startswith('.')):
            folders.clear()
            continue
        visited.add(target)
        # Folders have their own name rather than that of a link beside them.
        visible = [name for name in folders if not name.startswith('.')]
        folders[:] = sorted(
            visible, key=lambda name: (pathlib.Path(place, name).is_symlink(), name)
        )
        files = [pathlib.Path(place, name) for name in names]
        # A link to nothing is among them, so that it is counted.
        paths += [path for path in files if path.is_file() or not path.exists()]
    return sorted(paths)


def text_name(source: pathlib.Path, path: pathlib.Path) -> str:
    """Returns the name of a text file: its path relative to the source folder. Ids of passages begin with it."""
    name = path.name
    if path != source:
        name = path.relative_to(source).as_posix()
    # Linux allows any bytes in names; ids are UTF-8 without line feeds.
    return os.fsencode(name).decode('utf-8', 'replace').replace('\n', ' ')


@dataclasses.dataclass
class Inventory:
    """Counts the units of a source: the files of a folder of texts, or the passages of a corpus file before any cut.

    Attributes:
      unit: 'files' or 'passages'.
      usable: number of units that are English prose.
      problems: reason → number of units that are not. Files of other formats and bad lines of a corpus file are among
        them. Passages of a corpus file are counted here even where they are kept (see `write_clean`).
      passages: number of passages that were written.
      names: of a folder, reason → names of the first files of that reason, in the order of all names.
    """

    unit: str
    usable: int = 0
    problems: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    passages: int = 0
    names: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def add(self, number: int, problem: str, name: str = '') -> None:
        """Counts one unusable unit; `name` is that of a file, `number` is not used (see `corpus.BadLines.add`)."""
        reason = re.split(' at byte', problem)[0]
        self.problems[reason] += 1
        if name:
            names = [*self.names.get(reason, ()), _printable(name)]
            self.names[reason] = sorted(names)[:_NAMED_FILES]

    def left_out(self) -> str:
        """Returns what becomes of the unusable units, in a line; '' without any."""
        if not self.unusable:
            return ''
        # In a file of passages, all but empty ones are indexed (see `write_clean`).
        consequence = 'left out' if self.unit == 'files' else 'not asked about'
        total = self.usable + self.unusable
        return f'{self.unusable} of {total} {self.unit} are {consequence}: {self}'

    @property
    def unusable(self) -> int:
        """Number of units with a problem."""
        return self.problems.total()

    def __str__(self) -> str:
        # The most frequent problem comes first, ties by name, so that the same source gives the same line.
        ordered = sorted(self.problems.items(), key=lambda item: (-item[1], item[0]))
        counts = []
        for problem, count in ordered[:_NAMED_PROBLEMS]:
            names = ', '.join(self.names.get(problem, ()))
            more = ', …' if count > _NAMED_FILES else ''
            counts.append(f'{count} {problem} ({names}{more})' if names else f'{count} {problem}')
        others = sum(count for _, count in ordered[_NAMED_PROBLEMS:])
        return ', '.join([*counts, f'{others} others'] if others else counts)


def _printable(name: str) -> str:
    """Returns a name with characters that could control a terminal replaced: names of files may hold any bytes."""
    return ''.join(character if character.isprintable() else '\ufffd' for character in name)


def _count_other_files(
    source: pathlib.Path, texts: set[pathlib.Path], inventory: Inventory
) -> None:
    """Counts the files of a folder that are not read as texts as problems of `inventory`, by their suffix."""
    for path in files_below(source):
        if path not in texts:
            suffix = suffix_of(path)
            problem = _printable(suffix) or 'without suffix'
            if _SECTION.fullmatch(suffix):
                problem = f'manual pages ({_CONVERT})'
            if not path.exists():
                problem = 'links to nothing'
            if path.name.startswith('.'):
                problem = 'hidden'
            inventory.add(0, problem, text_name(source, path))


def passages_of(
    source: pathlib.Path,
    skipped: BadLines | Inventory,
    passage_words: int,
    problem_of: Callable[[str], str | None] = lambda text: None,
) -> Iterator[tuple[int, Record]]:
    """Yields (file number from 1, passage) of a folder of texts or of one text.

    Args:
      source: the folder or text.
      skipped: receives the files that cannot be used. An `Inventory` also counts the others, and the files that are no
        texts, of which a line is logged otherwise.
      passage_words: words of a passage at most; 0: 100 words each, whatever the sentences.
      problem_of: returns why the text of a file, without its front matter, cannot be used; None if it can.
    """
    files = files_of(source)
    inventory = skipped if isinstance(skipped, Inventory) else Inventory('files', len(files))
    if source.is_dir():
        _count_other_files(source, set(files), inventory)
    if inventory is not skipped and inventory.unusable:
        warn_once(f'{source}: {inventory.left_out()}')
    untitled = []
    for number, path in enumerate(files, 1):
        name = text_name(source, path)
        try:
            title, text = read_text(path)
            problem = problem_of(text)
        # The last two: of a packed file.
        except (OSError, Unusable, EOFError, lzma.LZMAError) as error:
            problem = getattr(error, 'strerror', None) or str(error)
        if problem is not None:
            skipped.add(number, problem, name)
            continue
        parts = split_text(text, passage_words) if passage_words else _blocks_of_words(text)
        if not parts:
            skipped.add(number, 'empty', name)
            continue
        if inventory is skipped:
            inventory.usable += 1
        if not title:
            title = pathlib.PurePath(name).stem
            untitled.append(name)
        for part_number, part in enumerate(parts):
            yield number, Record(f'{name}#{part_number}', contents(title, part), document=name)
    if untitled:
        warn_once(
            f'{source}: texts without a title: {len(untitled)}, the first is {short(untitled[0])}; each has the name '
            'of its file instead'
        )


def _blocks_of_words(text: str) -> list[str]:
    """Returns a text in blocks of `WORDS` words."""
    words = text.split()
    return [' '.join(words[start : start + WORDS]) for start in range(0, len(words), WORDS)]


def split_record(record: Record, max_words: int) -> Iterator[Record]:
    """Yields a passage unchanged, or if it is too long the passages that it is cut into.

    The new passages keep the title; their ids are that of the old passage with '#' and a number from 0. Consecutive
    passages with the same title are one document, so the tool `open` shows all of them. Those of a passage without a
    title get its id as the name of their document.

    Args:
      record: a passage of a corpus file.
      max_words: words of a passage at most; a text of up to `TOLERANCE` times as many is not cut.
    """
    title, text = split(record.contents)
    if len(text.split()) <= TOLERANCE * max_words:
        yield record
        return
    document = record.document
    if not document and not title:
        document = record.id
    for number, passage_text in enumerate(split_text(text, max_words)):
        yield Record(f'{record.id}#{number}', contents(title, passage_text), document)
