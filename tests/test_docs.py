"""The documentation site builds without warnings, and every relative link and anchor of the pages resolves."""

import ast
import importlib.util
import re
import runpy
import sys
import textwrap

import pytest
from python_process import ROOT, run_python
from removed_extras import has_left

from zeroplay_jax.configs import common
from zeroplay_jax.configuration import fields

PAGES = sorted(ROOT.glob('*.md')) + sorted(ROOT.glob('[a-z]*/*.md'))
PAGES += sorted((ROOT / 'benchmarks' / 'peers').glob('*.md'))

needs_mkdocs = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ('mkdocs', 'material')),
    reason='mkdocs-material is not installed: pip install -r requirements-docs.txt',
)


def without_code(text):
    """The Markdown text without fenced blocks, in which '#' and brackets mean something else."""
    return re.sub(r'^ *```.*?^ *```', '', text, flags=re.M | re.S)


def anchors(page):
    """The anchors of a page's headings, as GitHub and the site make them."""
    found_anchors = set()
    for heading in re.findall(r'^#+ +(.+)$', without_code(page.read_text(encoding='utf-8')), re.M):
        text = re.sub(r'\[([^\]]*)\]\([^)]*\)', r'\1', heading)
        kept_characters = re.sub(r'[^\w\- ]', '', text.strip().lower())
        found_anchors.add(kept_characters.replace(' ', '-'))
    return found_anchors


def faulty_links(page):
    """The relative links of a page that lead to a missing file or to a missing heading."""
    text = re.sub(r'`[^`\n]*`', '`code`', without_code(page.read_text(encoding='utf-8')))
    faults = []
    for link in re.findall(r'\]\(([^)\s]+)\)', text):
        if '://' in link or link.startswith('mailto:'):
            continue
        target_name, _, anchor = link.partition('#')
        target = (page.parent / target_name).resolve() if target_name else page
        if not target.exists():
            faults.append(link)
            continue
        if target.is_dir():
            target = target / 'README.md'
        if anchor and anchor not in anchors(target):
            faults.append(link)
    return faults


@pytest.mark.parametrize('page', PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_resolve(page):
    assert not faulty_links(page)


def build(folder):
    words = ('-m', 'mkdocs', 'build', '--strict', '--site-dir', folder)
    return run_python(*words, timeout=120, NO_MKDOCS_2_WARNING='1')


@pytest.fixture(scope='module')
def site(tmp_path_factory):
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp('docs') / 'site'
    result = build(folder)
    assert result.returncode == 0, result.stderr
    return folder


@needs_mkdocs
def test_the_site_has_every_page(site):
    for page in sorted((ROOT / 'docs').glob('*.md')):
        assert (site / f'{page.stem}.html').is_file()
    assert not list(site.rglob('*.py'))


@needs_mkdocs
def test_the_site_loads_nothing_from_the_network(site):
    for page in site.glob('*.html'):
        loaded = re.findall(
            r'<(?:script|img|link)\b[^>]*?(?:src|href)="(https?:[^"]*)"', page.read_text()
        )
        assert not loaded, page.name


@needs_mkdocs
def test_the_hook_leaves_code_and_missing_files_alone():
    spec = importlib.util.spec_from_file_location('pages', ROOT / 'docs' / 'repository_pages.py')
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    cases = {
        '[a](../launch/README.md#one-machine)': '[a](launch.md#one-machine)',
        '[a](../launch/)': '[a](launch.md)',
        '[`b`](../configs/drzero.py)': '`b`',
        '[a](results.md)': '[a](results.md)',
        '[a](../missing.md)': '[a](../missing.md)',
        '[a](https://example.org/x)': '[a](https://example.org/x)',
        '`[a](../launch/README.md)`': '`[a](../launch/README.md)`',
        '```\n[a](../launch/README.md)\n```': '```\n[a](../launch/README.md)\n```',
    }
    for written, expected in cases.items():
        assert hook.adapt_links(written, 'results.md') == expected
    assert hook.adapt_links('[a](../retrieval/README.md)', 'launch.md') == '[a](retrieval.md)'


def python_blocks(page):
    return re.findall(r'^```python\n(.*?)^```', (ROOT / page).read_text(), re.M | re.S)


def test_the_page_of_all_fields_is_that_of_the_schema():
    from zeroplay_jax.configuration.reference import reference

    is_current = (ROOT / 'docs/configuration.md').read_text() == reference()
    assert is_current, 'python -m zeroplay_jax.configuration.reference > docs/configuration.md'


def test_the_page_about_parts_of_recipes_is_that_of_their_docstrings():
    command = '.venv/bin/python docs/recipe_page.py > docs/recipe-reference.md'
    page = runpy.run_path(str(ROOT / 'docs/recipe_page.py'))['page']()
    assert (ROOT / 'docs/recipe-reference.md').read_text(encoding='utf-8') == page, command


@pytest.mark.fault('nov29-D4', 'the names that recipes import')
def test_the_reference_has_what_recipes_of_others_import():
    """All that the examples, the recipe from outside and the page import from modules of the reference."""
    page = (ROOT / 'docs/recipe-reference.md').read_text(encoding='utf-8')
    documented = dict.fromkeys(re.findall(r'^## `(.+)`$', page, re.M))
    for section in page.split('\n## ')[1:]:
        documented[section.split('`')[1]] = re.findall(r'^### `(\w+)`$', section, re.M)
    # `rewards` has the functions of `answers`, too.
    names = {name for of_module in documented.values() for name in of_module}
    sources = [path.read_text(encoding='utf-8') for path in ROOT.glob('examples/*/recipe.py')]
    sources += [path.read_text() for path in ROOT.glob('tests/outside_package/zp_outside/*.py')]
    sources += python_blocks('docs/recipes.md')
    missing = set()
    for source in sources:
        for node in ast.walk(ast.parse(textwrap.dedent(source))):
            if isinstance(node, ast.ImportFrom) and node.module in documented:
                missing |= {each.name for each in node.names} - names
    # Types of settings, and names that stand for others.
    types = {'Fraction', 'NonNegativeFloat', 'PositiveFloat', 'PositiveInt', 'Json', 'UserError'}
    assert missing <= types


def test_the_tool_of_the_documentation_works():
    from zeroplay_jax.tools.base import Invocation

    file = ROOT / 'examples/calculator/tool.py'
    assert file.read_text() in python_blocks('docs/tools.md')
    names = runpy.run_path(str(file))
    arguments = names['Calculator']().validated({'expression': '(1998 - 1934) / 4'})
    assert names['Calculator']().run([Invocation(arguments)])[0].text == '16'


def test_the_page_about_python_runs(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    names = {}
    for number, block in enumerate(python_blocks('docs/api.md')):
        exec(compile(block, f'block {number} of docs/api.md', 'exec'), names)
    # Every public function is in the table.
    page = (ROOT / 'docs/api.md').read_text()
    functions = [name for name in names['zp'].__all__ if name.islower()]
    assert all(f'| `zp.{name}(' in page for name in functions)
    assert names['rollout'].turns[-1].text.strip() in capsys.readouterr().out


def test_the_derived_recipe_of_the_documentation_works(tmp_path, monkeypatch):
    from zeroplay_jax.configuration import rules
    from zeroplay_jax.configuration.fields import default_config
    from zeroplay_jax.selfplay.recipe import trained_roles

    examples = python_blocks('docs/recipes.md')
    recipe = next(text for text in examples if 'class Recipe(drzero.Recipe)' in text)
    page = next(text for text in examples if 'their_package.critical' in text)
    (tmp_path / 'their_package').mkdir()
    # Without this file Python's inspect, which pydantic calls, would fail: it remembers the files of modules by name,
    # and other tests have regular packages of this name.
    (tmp_path / 'their_package' / '__init__.py').touch()
    (tmp_path / 'their_package' / 'critical.py').write_text(recipe)
    monkeypatch.syspath_prepend(tmp_path)
    config = default_config('their_package.critical')
    assert trained_roles(config) == ('proposer', 'solver', 'critic')
    names = {}
    exec(compile(page, 'config', 'exec'), names)
    config = names['get_config']()
    assert config.critical.critics == 3 and config.critic.learning_rate == 1e-6
    rules.check(config)
    for name in [name for name in sys.modules if name.split('.')[0] == 'their_package']:
        del sys.modules[name]  # other tests have packages of this name


def test_the_page_about_preemption_names_all_fields_that_a_resumed_run_may_change():
    text = (ROOT / 'docs/tpu-gpu.md').read_text(encoding='utf-8')
    paragraph = next(part for part in text.split('\n\n') if '`distributed.…`' in part)
    named = re.findall(r'`([^`]+)`', paragraph)
    for field in fields.changeable_fields(common.get_config()):
        assert field in named or f'{field.partition(".")[0]}.…' in named, field


def test_the_files_to_read_exist():
    """docs/reading.md and AGENTS.md name files by their places in the repository or in the package."""
    for page in ('docs/reading.md', 'AGENTS.md'):
        text = (ROOT / page).read_text(encoding='utf-8')
        paths = set(re.findall(r'[a-z_]+(?:/[a-z_]+)+\.(?:py|md)', text))
        assert len(paths) > 1
        folders = (ROOT, ROOT / 'zeroplay_jax', ROOT / 'docs')
        missing = [path for path in paths if not any((f / path).is_file() for f in folders)]
        assert all(map(has_left, missing)), missing
