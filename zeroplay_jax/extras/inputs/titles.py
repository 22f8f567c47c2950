"""Titles of text files: the first line, or of Markdown the title in its front matter or its main heading."""

from __future__ import annotations

import pathlib
import re

import yaml

# A longer first line of a text is not its title but its first paragraph.
_TITLE_WORDS = 15
# The same in languages without blanks between words, and for texts that have no other line.
TITLE_CHARACTERS = 200
# Characters of a file in which its title is looked for, where that takes longer for each further line; and of a field
# of front matter, because parsers take quadratic time for nested brackets.
_HEAD_CHARACTERS = 20_000
_FIELD_CHARACTERS = 1_000
# Lines of a Markdown file in which its main heading is looked for; later ones are sections.
_HEADING_LINES = 10
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
_COMMENT = re.compile(r'<!--.*?-->', re.DOTALL)
# No pattern reads past a mark that may begin another match: without ends, that would take quadratic time.
_TARGET = r'\](?:\([^()]*(?:\([^()]*\)[^()]*)*\)|\[[^][]*\])'
_IMAGE = re.compile(r'!\[[^][]*' + _TARGET)
# The text of a link is its first group.
_LINK = re.compile(r'\[([^][]*)' + _TARGET)
_TAG = re.compile(r'</?[a-zA-Z][^<>]*>')
_REFERENCE = re.compile(r'\s*\[[^\]]+\]:\s')
_FENCE = re.compile(r'\s*(?:```|~~~)')
_MAIN_HEADING = re.compile(r'#[ \t]+(.+)')
_UNDERLINE = re.compile(r'=+\s*')
# A first line that is underlined, and maybe overlined (reStructuredText). The title is the second group.
_UNDERLINED_TITLE = re.compile(
    r'(?:([=~^#*+_-])\1{2,}[ \t]*\n)?[ \t]*(\S[^\n]*)\n([=~^#*+_-])\3{2,}[ \t]*(?:\n|\Z)'
)
# Between the columns of a table, whose head is between two rulers, too.
_COLUMNS = re.compile(r'\S(?: {2,}|\t)\S')
_EMPHASIS = re.compile(r'\*+|`+|(?<!\w)_+|(?<!_)_++(?!\w)')


def without_front_matter(whole_text: str) -> str:
    """Returns a text without the front matter (YAML, TOML) at its start, which is no prose."""
    front_matter = _FRONT_MATTER.match(whole_text)
    if front_matter is None:
        return whole_text
    return whole_text[front_matter.end() :]


def split_title(whole_text: str, name: str) -> tuple[str, str]:
    """Returns (title, text) of a text file, without front matter; ('', text) if it has no title.

    The title is the first of these that exists and has at most `TITLE_CHARACTERS`. The lines that it is taken from are
    no part of the text.

    1. Of Markdown: `title` of the front matter.
    2. Of Markdown: the first heading of level one, if it is among the first lines.
    3. The first line, if it is short, contains a letter, has no full stop at its end and is followed by text. Lines of
       marks above and below it (reStructuredText) are left out. Of Markdown it is the first one behind images, badges,
       tags, comments and lines of links only, which are left out, too.

    Args:
      whole_text: content of a file.
      name: name of the file, with any folders in front.
    """
    text = without_front_matter(whole_text)
    if pathlib.PurePath(name).suffix.lower() != '.md':
        return first_line_title(text)
    front_title = _front_title(whole_text)
    text = _without_decoration(text)
    heading, text_below = _main_heading(text)
    # Most files repeat the title of their front matter as a heading.
    for title in (front_title, heading):
        if title and len(title) <= TITLE_CHARACTERS and text_below.strip():
            return title, text_below
    return first_line_title(text)


def _front_title(whole_text: str) -> str:
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
    return _plain(title)


def first_line_title(text: str) -> tuple[str, str]:
    """Returns (title, text) by the rule 3 of `split_title`, ('', text) without a title."""
    first_line, _, text_below = text.strip().partition('\n')
    underlined = _UNDERLINED_TITLE.match(text.lstrip())
    if underlined and not _COLUMNS.search(underlined[2]):
        first_line, text_below = underlined[2], text.lstrip()[underlined.end() :]
    # Markdown headings start with '#'.
    title = ' '.join(first_line.lstrip('# ').split())
    is_short = len(title.split()) <= _TITLE_WORDS and len(title) <= TITLE_CHARACTERS
    # A horizontal rule or a date does not name a text.
    has_letter = any(character.isalpha() for character in title)
    if is_short and has_letter and not title.endswith('.') and text_below.strip():
        return title, text_below
    return '', text


def _main_heading(text: str) -> tuple[str, str]:
    """Returns (first heading of level one, text without it if it is the first line); ('', text) without one."""
    lines = text.split('\n', _HEADING_LINES)
    is_code = False
    for number, line in enumerate(lines[:_HEADING_LINES]):
        # A comment in a block of code looks like a heading.
        if _FENCE.match(line):
            is_code = not is_code
        if is_code:
            continue
        below = lines[number + 1 :]
        title = ''
        heading = _MAIN_HEADING.match(line)
        if heading:
            title = _plain(heading[1].rstrip('# \t\r'))
        elif below and line.strip() and _UNDERLINE.fullmatch(below[0]):
            title = _plain(line)
            below = below[1:]
        if any(character.isalpha() for character in title):
            return title, '\n'.join(below) if number == 0 else text
    return '', text


def _without_decoration(text: str) -> str:
    """Returns a Markdown text from its first line with words on: without badges, images, tags, comments, link lists."""
    text = text.lstrip()
    text, rest = text[:_HEAD_CHARACTERS], text[_HEAD_CHARACTERS:]
    while text:
        comment = _COMMENT.match(text)
        line, _, below = text.partition('\n')
        if comment:
            text = text[comment.end() :].lstrip()
            continue
        words = _LINK.sub('', _IMAGE.sub('', _TAG.sub('', line)))
        has_words = any(character.isalnum() for character in words)
        # A line without any markup, such as a horizontal rule, is left as it is.
        if words == line or (has_words and not _REFERENCE.match(line)):
            break
        text = below.lstrip()
    return text + rest


def _plain(line: str) -> str:
    """Returns a line of Markdown without images, tags, emphasis and the addresses of links."""
    text = _TAG.sub('', _IMAGE.sub('', line))
    return ' '.join(_EMPHASIS.sub('', _LINK.sub(r'\1', text)).split())
