"""Titles of plain texts, by their first line, and front matter of Markdown."""

from __future__ import annotations

import re

import yaml

# A longer first line of a text is not its title but its first paragraph.
_TITLE_WORDS = 15
# The same in languages without blanks between words, and for texts that have no other line.
TITLE_CHARACTERS = 200
# Characters of a field of front matter, because parsers take quadratic time for nested brackets.
_FIELD_CHARACTERS = 1_000
# YAML between two lines of dashes at the start of a Markdown file, as Jekyll and Obsidian write it, or TOML between two
# lines of plus signs (Hugo). The key in the first line of YAML tells it from a text that begins with a horizontal rule.
_FRONT_MATTER = re.compile(
    r'\s*(?:---[ \t]*\r?\n(?=[\w-]+[ \t]*:).*?^(?:---|\.\.\.)|\+\+\+[ \t]*\r?\n.*?^\+\+\+)[ \t]*$',
    re.DOTALL | re.MULTILINE,
)
# With the lines that go on with it, which are indented.
_FRONT_TITLE = re.compile(r'^title[ \t]*[:=][ \t]*(.*(?:\n[ \t]+.*)*)$', re.MULTILINE)
# A text with one quotation mark at each end and none of its kind between them.
_ONCE_QUOTED = re.compile(r"""(['"])((?:(?!\1).)*)\1""")
# A first line that is underlined, and maybe overlined (reStructuredText). The title is the second group.
_UNDERLINED_TITLE = re.compile(
    r'(?:([=~^#*+_-])\1{2,}[ \t]*\n)?[ \t]*(\S[^\n]*)\n([=~^#*+_-])\3{2,}[ \t]*(?:\n|\Z)'
)
# Between the columns of a table, whose head is between two rulers, too.
_COLUMNS = re.compile(r'\S(?: {2,}|\t)\S')


def without_front_matter(whole_text: str) -> str:
    """Returns a text without the front matter (YAML, TOML) at its start, which is no prose."""
    front_matter = _FRONT_MATTER.match(whole_text)
    if front_matter is None:
        return whole_text
    return whole_text[front_matter.end() :]


def front_title(whole_text: str) -> str:
    """Returns the title in the front matter; '' if there is none."""
    front_matter = _FRONT_MATTER.match(whole_text)
    field = _FRONT_TITLE.search(front_matter[0]) if front_matter else None
    if field is None:
        return ''
    try:
        # Titles of TOML have the form of YAML. Of this loader every scalar is a text.
        title = yaml.load(f'title: {field[1]}'[:_FIELD_CHARACTERS], yaml.BaseLoader)['title']
        # Escapes for two halves of one character (JSON).
        title = title.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
    # The last three: a number that is too large, another value than a text, nesting without end.
    except (yaml.YAMLError, ValueError, OverflowError, AttributeError, RecursionError):
        # Not YAML, by a colon or a quotation mark.
        quoted = _ONCE_QUOTED.fullmatch(field[1].strip())
        title = quoted[2] if quoted else field[1].strip()
    return ' '.join(title.split())[:_FIELD_CHARACTERS]


def first_line_title(text: str) -> tuple[str, str]:
    """Returns (title, text) of a plain text, ('', text) without a title.

    The title is the first line, if it is short, contains a letter, has no full stop at its end and is followed by text.
    Lines of marks above and below it are left out.
    """
    first_line, _, text_below = text.strip().partition('\n')
    underlined = _UNDERLINED_TITLE.match(text.lstrip())
    if underlined and not _COLUMNS.search(underlined[2]):
        first_line, text_below = underlined[2], text.lstrip()[underlined.end() :]
    # Many texts have headings of Markdown.
    title = ' '.join(first_line.lstrip('# ').split())
    is_short = len(title.split()) <= _TITLE_WORDS and len(title) <= TITLE_CHARACTERS
    # A horizontal rule or a date does not name a text.
    has_letter = any(character.isalpha() for character in title)
    if is_short and has_letter and not title.endswith('.') and text_below.strip():
        return title, text_below
    return '', text
