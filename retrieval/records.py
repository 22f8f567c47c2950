"""A passage in wire form: the title in double quotes on the first line, the text after it (Search-R1, verl)."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Record:
    """One passage as its source file has it.

    Attributes:
      id: unique in the corpus.
      contents: the wire form.
      document: name of the document of the passage, such as a file of a folder; '' where the source has none. Passages
        without it belong to one document if they have the same title.
    """

    id: str
    contents: str
    document: str = ''


def contents(title: str, text: str) -> str:
    """Returns the wire form of a passage."""
    return f'"{title}"\n{text}'


def split(contents: str) -> tuple[str, str]:
    """Returns (title, text) of a passage in wire form; no title where the first line is not in quotes."""
    # `splitlines` would split at other characters as well; only a line feed ends the title.
    first_line, _, text = contents.partition('\n')
    if len(first_line) >= 2 and first_line[0] == first_line[-1] == '"':
        return first_line[1:-1], text
    return '', contents
