"""MkDocs hook: shows README files of the repository as pages of the site and adapts the links between all pages.

Pages link as they would on GitHub, relative to their place in the repository. On the site

- a link to another page of the site points to that page;
- a link to any other file of the repository is replaced by its text, because the site holds no source files;
- a link to a missing file stays as it is, so that MkDocs reports it and the strict build fails.
"""

import pathlib
import posixpath
import re

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parents[1]

# Files outside docs/ → their names on the site.
PAGES = {
    'CHANGELOG.md': 'changelog.md',
    'CONTRIBUTING.md': 'contributing.md',
    'README.md': 'readme.md',
    'benchmarks/README.md': 'benchmarks.md',
    'benchmarks/peers/README.md': 'benchmarks-peers.md',
    'benchmarks/results/claims.md': 'claims-table.md',
    'benchmarks/results/claims.svg': 'claims.svg',
    'benchmarks/results/game.svg': 'game.svg',
    'benchmarks/results/quickstart.svg': 'quickstart.svg',
    'launch/README.md': 'launch.md',
    'notebooks/README.md': 'notebooks.md',
    'retrieval/README.md': 'retrieval.md',
    'zeroplay_jax/objectives/README.md': 'objectives.md',
    'zeroplay_jax/recipes/README.md': 'recipe-differences.md',
}

# A fenced block, a link (or a picture, which begins with '!'), or code in a line. Code is matched so that its brackets
# are not taken for links; a link comes before code in a line, because its text may be code.
CODE_OR_LINK = re.compile(
    r'^ *```.*?^ *```'
    r'|(?P<mark>!?)\[(?P<label>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)'
    r'|`[^`\n]*`',
    re.M | re.S,
)


def on_files(files, config):
    """Adds the files of PAGES to the site's files."""
    for source_path, site_path in PAGES.items():
        files.append(File.generated(config, site_path, abs_src_path=str(ROOT / source_path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """The page's text with its links adapted to the site."""
    return adapt_links(markdown, page.file.src_uri)


def adapt_links(text: str, page_name: str) -> str:
    """The text with every relative link adapted; `page_name` is the page's name on the site."""
    page_folder = posixpath.dirname(repository_path(page_name))

    def adapt(match: re.Match) -> str:
        target = match['target']
        if target is None or '://' in target:
            return match[0]
        target_path = posixpath.normpath(posixpath.join(page_folder, target))
        if (ROOT / target_path).is_dir():
            # A link to a folder opens its README.md on GitHub.
            target_path = posixpath.join(target_path, 'README.md')
        if target_path in PAGES:
            anchor = match['anchor'] or ''
            return f'{match["mark"]}[{match["label"]}]({PAGES[target_path]}{anchor})'
        if target_path.startswith('docs/') and (ROOT / target_path).exists():
            # All pages of the site are in one folder.
            anchor = match['anchor'] or ''
            site_path = target_path.removeprefix('docs/')
            return f'{match["mark"]}[{match["label"]}]({site_path}{anchor})'
        is_source_file = (ROOT / target_path).exists() and not target_path.startswith('docs/')
        return match['label'] if is_source_file else match[0]

    return CODE_OR_LINK.sub(adapt, text)


def repository_path(page_name: str) -> str:
    """The path of a page in the repository, from its name on the site."""
    for source_path, name in PAGES.items():
        if name == page_name:
            return source_path
    return f'docs/{page_name}'
