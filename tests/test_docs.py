"""The documentation site builds without warnings, and every relative link and anchor of the pages resolves."""

import importlib.util
import pathlib
import re
import runpy
import sys
import types
from unittest import mock

import pytest
from python_process import ROOT, run_python

from zeroplay_jax.configuration import rules
from zeroplay_jax.configuration.reference import reference
from zeroplay_jax.run import loop
from zeroplay_jax.selfplay.recipe import trained_roles

PAGES = sorted(ROOT.glob('*.md')) + sorted(ROOT.glob('[a-z]*/*.md'))
PAGES += sorted((ROOT / 'benchmarks' / 'peers').glob('*.md'))


def without_code(text):
    """The Markdown text without fenced blocks, in which '#' and brackets mean something else."""
    return re.sub(r'^ *```.*?^ *```', '', text, flags=re.M | re.S)


def anchors(page):
    """The anchors of a page's headings, as GitHub and the site make them."""
    found = set()
    for heading in re.findall(r'^#+ +(.+)$', without_code(page.read_text(encoding='utf-8')), re.M):
        text = re.sub(r'\[([^\]]*)\]\([^)]*\)', r'\1', heading).strip().lower()
        found.add(re.sub(r'[^\w\- ]', '', text).replace(' ', '-'))
    return found


@pytest.mark.parametrize('page', PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_resolve(page):
    text = re.sub(r'`[^`\n]*`', '`code`', without_code(page.read_text(encoding='utf-8')))
    for name, anchor in re.findall(r'\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)', text):
        target = page.parent / name if name else page
        assert target.exists(), name
        if target.is_dir():
            target = target / 'README.md'
        assert not anchor or anchor in anchors(target), f'{name}#{anchor}'


@pytest.mark.skipif(
    not importlib.util.find_spec('material'),
    reason='mkdocs-material is not installed: pip install -r requirements-docs.txt',
)
def test_the_site_is_built_without_warnings(tmp_path):
    words = ('-m', 'mkdocs', 'build', '--strict', '--site-dir', tmp_path)
    result = run_python(*words, timeout=120, NO_MKDOCS_2_WARNING='1')
    assert result.returncode == 0, result.stderr


def python_blocks(page):
    return re.findall(r'^```python\n(.*?)^```', (ROOT / page).read_text(), re.M | re.S)


def test_pages_that_a_script_writes_are_what_it_writes_now():
    for script in ('hyperparameter_page.py', 'ablation_page.py', 'recipe_page.py'):
        names = runpy.run_path(str(ROOT / 'docs' / script))
        name = re.search(r'> docs/(\S+\.md)', names['__doc__'])[1]
        written = (ROOT / 'docs' / name).read_text(encoding='utf-8')
        assert written == names['page'](), f'.venv/bin/python docs/{script} > docs/{name}'
    is_current = (ROOT / 'docs/configuration.md').read_text() == reference()
    assert is_current, 'python -m zeroplay_jax.configuration.reference > docs/configuration.md'
    assert (ROOT / 'examples/calculator/tool.py').read_text() in python_blocks('docs/tools.md')
    names = runpy.run_path(str(ROOT / 'docs/figures.py'))
    for name, text in names['figures']().items():
        is_current = (ROOT / 'docs/figures' / name).read_text(encoding='utf-8') == text
        assert is_current, '.venv/bin/python docs/figures.py'


def test_the_page_about_python_runs(monkeypatch):
    monkeypatch.chdir(ROOT)
    names = {}
    for number, block in enumerate(python_blocks('docs/api.md')):
        exec(compile(block, f'block {number} of docs/api.md', 'exec'), names)
    page = (ROOT / 'docs/api.md').read_text()
    assert all(f'| `zp.{name}(' in page for name in names['zp'].__all__ if name.islower())


def test_the_python_example_of_the_readme_has_rewards_and_a_loss(tmp_path, monkeypatch):
    (example,) = python_blocks('README.md')
    # Its last line trains for minutes, in the function that the command calls.
    train = mock.Mock()
    monkeypatch.setattr(loop, 'run', train)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(example, 'README.md', 'exec'), names)
    assert len(set(names['rewards'][0].tolist())) == 2 and abs(float(names['loss'])) > 1e-3
    assert train.call_args.args[0].recipe == 'drzero'


def test_the_derived_recipe_of_the_documentation_works(tmp_path, monkeypatch):
    examples = python_blocks('docs/recipes.md')
    recipe = next(text for text in examples if 'class Recipe(drzero.Recipe)' in text)
    page = next(text for text in examples if 'their_package.critical' in text)
    module = types.ModuleType('their_package.critical')
    # Where Python's inspect, which pydantic calls, looks for the comments of its settings.
    module.__file__ = str(tmp_path / 'critical.py')
    pathlib.Path(module.__file__).write_text(recipe)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(recipe, module.__file__, 'exec'), vars(module))
    names = {}
    exec(compile(page, 'config', 'exec'), names)
    config = names['get_config']()
    assert trained_roles(config) == ('proposer', 'solver', 'critic')
    assert config.critical.critics == 3 and config.critic.learning_rate == 1e-6
    rules.check(config)


def test_the_files_to_read_exist():
    """Pages name files by their places in the repository or in the package."""
    for page in ('docs/reading.md', 'AGENTS.md'):
        text = (ROOT / page).read_text(encoding='utf-8')
        for path in set(re.findall(r'[a-z_]+(?:/[a-z_]+)+\.(?:py|md)', text)):
            folders = (ROOT, ROOT / 'zeroplay_jax', ROOT / 'docs')
            assert any((folder / path).is_file() for folder in folders), path
