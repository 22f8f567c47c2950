"""What a reader sees of a text in Markdown, reStructuredText or HTML: its title, and each of its blocks.

All forms are read as HTML: markdown-it and docutils write it. A block is a paragraph, heading, list item or cell.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import html.parser
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import docutils.core
import docutils.nodes
import markdown_it
import mdit_py_plugins.admon
import mdit_py_plugins.deflist
import mdit_py_plugins.footnote
from docutils.parsers.rst import Directive, directives, roles
from docutils.writers import html5_polyglot

from zeroplay_jax.extras.inputs.titles import TITLE_CHARACTERS, front_title, without_front_matter
from zeroplay_jax.retrieval.json_text import Unusable

# Suffix of a file → the form of its text.
FORMS = {
    '.md': 'markdown',
    '.mdx': 'markdown',
    '.markdown': 'markdown',
    '.rst': 'rst',
    '.html': 'html',
    '.htm': 'html',
    '.xhtml': 'html',
}
_HTML = re.compile(
    r'\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)?(?:<!doctype html|<html)', re.I | re.S
)
_COMMENT = re.compile(r'<!--.*?(?:-->|\Z)', re.S)
# The parser of Markdown takes quadratic time for marks without an end, up to the next empty line.
_LONGEST_BLOCK = 50_000
# Elements inside of a line; all others end a block.
_INLINE = frozenset(
    'a abbr acronym b bdi bdo big cite code data del dfn em font i img ins kbd label mark nobr q s samp small span '
    'strike strong sub sup time tt u var wbr'.split()
)
_EMPTY = frozenset('area base br col embed hr img input link meta source track wbr'.split())
# Blocks of which one ends where the next one of the same name begins.
_SIBLINGS = frozenset('dd dt li td th tr'.split())
# Blocks inside of each other that are counted; browsers have such a limit too.
_DEEPEST = 512
# What a page shows beside its text, by element, role and class.
_BESIDE = frozenset('button footer math nav noscript script select style svg template'.split())
_ROLES = frozenset('banner contentinfo doc-backlink doc-noteref navigation search'.split())
_CLASSES = frozenset(
    'contents footnote-backref footnote-ref footnote-reference headerlink label lineno linenos navfooter navheader '
    'system-message toc'.split()
)


def form_of(path: pathlib.Path, text: str) -> str:
    """Returns the form of a text: one of `FORMS`, or '' for plain text."""
    # Sphinx calls its sources index.rst.txt.
    named = [FORMS[suffix] for suffix in map(str.lower, path.suffixes) if suffix in FORMS]
    return 'html' if _HTML.match(text) else named[-1] if named else ''


def read(form: str, text: str) -> tuple[str, str]:
    """Returns (title, text) of a text of a form; the blocks of the text have empty lines between them.

    The title is that of the front matter, the first heading of level one, or that of the page; '' without any.
    """
    title = ''
    longest = max(map(len, re.split(r'\n\s*\n', text)))
    if form == 'markdown' and longest > _LONGEST_BLOCK:
        raise Unusable(f'Markdown with more than {_LONGEST_BLOCK} characters without an empty line')
    if form == 'markdown':
        title = ' '.join(_page(_markdown().renderInline(front_title(text))).blocks)
        text = _markdown().render(without_front_matter(text))
    elif form == 'rst':
        text = _html_of_rst(text)
    page = _page(text)
    titles = [title, page.heading, page.title]
    title = next((one for one in titles if 0 < len(one) <= TITLE_CHARACTERS), '')
    blocks = page.blocks[1:] if page.blocks[:1] == [title] else page.blocks
    return title, '\n\n'.join(blocks)


def _page(text: str) -> _Page:
    """Returns the page that an HTML text shows."""
    page = _Page()
    # The parser would look for the end of every comment and tag without one, which takes quadratic time.
    page.feed(_COMMENT.sub('', text) + '<!---->')
    page.close()
    page.end_block()
    return page


@functools.cache
def _markdown() -> markdown_it.MarkdownIt:
    """Returns the parser of Markdown with tables, footnotes, notes and lists of definitions."""
    parser = markdown_it.MarkdownIt('commonmark').enable('table').enable('strikethrough')
    for plugin in (
        mdit_py_plugins.admon.admon_plugin,
        mdit_py_plugins.deflist.deflist_plugin,
        mdit_py_plugins.footnote.footnote_plugin,
    ):
        parser.use(plugin)
    return parser


class _Page(html.parser.HTMLParser):
    """Collects the blocks of a page; of one that marks its main part, those of this part."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[str] = []
        self.title = self.heading = ''
        self._parts: list[str] = []
        # Open elements by name that are left out, preformatted, headings or the main part → how deep they are nested.
        self._depths: dict[str, list[str]] = {}
        # Open blocks, outermost first, and how many of them were open where the part that is left out began.
        self._blocks: list[str] = []
        self._blocks_before = 0
        self._is_over = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or '' for name, value in attrs}
        classes = set(values.get('class', '').split())
        self._count(tag, 1)
        is_block = tag not in _INLINE and tag not in _EMPTY
        innermost = self._blocks[-1] if self._blocks else ''
        if is_block and (innermost == 'p' or (innermost == tag and tag in _SIBLINGS)):
            self._blocks.pop()
        is_beside = (
            tag in _BESIDE or values.get('role') in _ROLES or not _CLASSES.isdisjoint(classes)
        )
        if is_beside and tag not in _EMPTY and 'beside' not in self._depths:
            self._open('beside', tag)
            self._blocks_before = len(self._blocks)
        if is_block and len(self._blocks) < _DEEPEST:
            self._blocks.append(tag)
        if tag not in _INLINE:
            self.end_block()
        if tag == 'main' or values.get('role') == 'main':
            self.blocks.clear()
            self._is_over = False
            self._open('main', tag)
        for name in ('pre', 'h1', 'title'):
            if tag == name:
                self._open(name, tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in _INLINE:
            self.end_block()
        self._count(tag, -1)
        if tag in self._blocks:
            while self._blocks.pop() != tag:
                pass
        # The end of the element around it ends a part that has no end of its own.
        if len(self._blocks) < self._blocks_before:
            self._depths.pop('beside', None)

    def handle_data(self, data: str) -> None:
        if 'beside' not in self._depths and not self._is_over:
            self._parts.append(data)

    def end_block(self) -> None:
        """Ends the block in progress."""
        text = ''.join(self._parts)
        self._parts.clear()
        line = ' '.join(text.split())
        if not line:
            return
        if 'title' in self._depths:
            self.title = self.title or line
            return
        if 'h1' in self._depths:
            self.heading = self.heading or line
        self.blocks.append(text.strip('\n') if 'pre' in self._depths else line)

    def _open(self, name: str, tag: str) -> None:
        self._depths.setdefault(name, [tag])

    def _count(self, tag: str, change: int) -> None:
        """Counts an element that begins or ends inside of an open one of the same tag, and closes that at the last."""
        for name, tags in list(self._depths.items()):
            if tags[0] != tag or tag in _EMPTY:
                continue
            if change > 0:
                tags.append(tag)
            else:
                tags.pop()
            if not tags:
                del self._depths[name]
                self._is_over = self._is_over or name == 'main'


class _AnyDirective(Directive):
    """A directive that docutils does not know, such as one of Sphinx: its argument and its content are text."""

    has_content = True
    optional_arguments = 1
    final_argument_whitespace = True
    option_spec = collections.defaultdict(lambda: directives.unchanged, {'': directives.unchanged})

    def run(self) -> list[docutils.nodes.Node]:
        node = docutils.nodes.container()
        # One without content, such as `highlight`, shows nothing.
        if self.arguments and self.content:
            node += docutils.nodes.paragraph(text=self.arguments[0])
        self.state.nested_parse(self.content, self.content_offset, node)
        return [node]


def _any_role(name: str, raw: str, text: str, *_: Any, **__: Any) -> tuple[list[Any], list[Any]]:
    """A role that docutils does not know: its text without the target (`text <target>`, `~module.name`)."""
    shown = re.sub(r'\s*<[^<>]*>$', '', docutils.utils.unescape(text)) or text
    if shown.startswith('~'):
        shown = shown.rpartition('.')[2].lstrip('~')
    return [docutils.nodes.inline(raw, shown.lstrip('!'))], []


class _Translator(html5_polyglot.HTMLTranslator):
    """Shows no image: with `:loading: embed` docutils would read its file, whatever the settings say."""

    def visit_image(self, node: docutils.nodes.Element) -> None:
        raise docutils.nodes.SkipNode


# No file that a text names is read, and no message of the parser is part of the text.
_RST = {
    '_disable_config': True,
    'file_insertion_enabled': False,
    'raw_enabled': False,
    'report_level': 5,
    'halt_level': 5,
    'initial_header_level': '1',
    'syntax_highlight': 'none',
    'embed_stylesheet': False,
    'stylesheet_path': None,
}


def _html_of_rst(text: str) -> str:
    """Returns the body of the page that docutils makes of reStructuredText."""
    writer = html5_polyglot.Writer()
    writer.translator_class = _Translator
    try:
        with _any_names():
            parts = docutils.core.publish_parts(text, writer=writer, settings_overrides=_RST)
    except RecursionError:
        raise Unusable('reStructuredText with too many parts inside of each other') from None
    return parts['html_body']


@contextlib.contextmanager
def _any_names() -> Iterator[None]:
    """Lets docutils take directives and roles that it does not know; it has no other place for them."""
    find_directive, find_role = directives.directive, roles.role

    def directive(name: str, *others: Any) -> tuple[Any, list[Any]]:
        found, messages = find_directive(name, *others)
        return (found, messages) if found else (_AnyDirective, [])

    def role(name: str, *others: Any) -> tuple[Any, list[Any]]:
        found, messages = find_role(name, *others)
        return (found, messages) if found else (_any_role, [])

    directives.directive, roles.role = directive, role
    try:
        yield
    finally:
        directives.directive, roles.role = find_directive, find_role
