"""The documentation site builds without warnings, and every relative link and anchor of the pages resolves."""

import importlib.util
import re
import runpy
import sys
from xml.etree import ElementTree

import pytest
from python_process import ROOT, run_python
from removed_extras import has_left

from zeroplay_jax.configs import common
from zeroplay_jax.configuration import fields, rules
from zeroplay_jax.configuration.reference import reference
from zeroplay_jax.run import loop
from zeroplay_jax.selfplay.recipe import trained_roles

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


@needs_mkdocs
def test_the_site_has_every_page_and_loads_nothing_from_the_network(tmp_path):
    words = ('-m', 'mkdocs', 'build', '--strict', '--site-dir', tmp_path)
    result = run_python(*words, timeout=120, NO_MKDOCS_2_WARNING='1')
    assert result.returncode == 0, result.stderr
    names = {page.stem for page in tmp_path.glob('*.html')}
    assert names >= {page.stem for page in (ROOT / 'docs').glob('*.md')}
    assert not list(tmp_path.rglob('*.py'))
    from_network = r'<(?:script|img|link)\b[^>]*?(?:src|href)="(https?:[^"]*)"'
    for page in tmp_path.glob('*.html'):
        assert not re.findall(from_network, page.read_text()), page.name


def python_blocks(page):
    return re.findall(r'^```python\n(.*?)^```', (ROOT / page).read_text(), re.M | re.S)


SCRIPTS = {
    'hyperparameters.md': 'hyperparameter_page.py',
    'ablations.md': 'ablation_page.py',
    'recipe-reference.md': 'recipe_page.py',
}


def test_pages_that_a_script_writes_are_what_it_writes_now():
    for page, script in SCRIPTS.items():
        written = runpy.run_path(str(ROOT / 'docs' / script))['page']()
        is_current = (ROOT / 'docs' / page).read_text(encoding='utf-8') == written
        assert is_current, f'.venv/bin/python docs/{script} > docs/{page}'
    is_current = (ROOT / 'docs/configuration.md').read_text() == reference()
    assert is_current, 'python -m zeroplay_jax.configuration.reference > docs/configuration.md'
    assert (ROOT / 'examples/calculator/tool.py').read_text() in python_blocks('docs/tools.md')


def test_the_figures_are_those_of_their_script_and_say_what_the_configs_say():
    names = runpy.run_path(str(ROOT / 'docs/figures.py'))
    for name, text in names['figures']().items():
        is_current = (ROOT / 'docs/figures' / name).read_bytes() == text.encode()
        assert is_current, '.venv/bin/python docs/figures.py'
        ElementTree.fromstring(text)
    for system, facts in names['SYSTEMS'].items():
        config = importlib.import_module(f'zeroplay_jax.configs.{system}').get_config()
        assert all(config[role].loss in facts['loss'] for role in trained_roles(config))
        assert ('KL' in facts['loss']) == (config.solver.kl_coef > 0)
        assert ('mean only' in facts['solver_group']) == (config.solver.scale == 'none')


def test_the_pages_about_python_run(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    names = {}
    for number, block in enumerate(python_blocks('docs/api.md')):
        exec(compile(block, f'block {number} of docs/api.md', 'exec'), names)
    # Every public function is in the table.
    page = (ROOT / 'docs/api.md').read_text()
    functions = [name for name in names['zp'].__all__ if name.islower()]
    assert all(f'| `zp.{name}(' in page for name in functions)
    assert names['rollout'].turns[-1].text.strip() in capsys.readouterr().out


@pytest.mark.fault('user-11', 'the example of the README')
def test_the_python_example_of_the_readme_has_rewards_and_a_loss(tmp_path, monkeypatch, capsys):
    (example,) = python_blocks('README.md')
    statements = [x for x in example.splitlines() if x and not x.startswith('import')]
    assert len(statements) <= 10
    # Its last line trains for minutes, in the function that the command calls.
    trained = []
    monkeypatch.setattr(loop, 'run', lambda *arguments: trained.append(arguments))
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(example, 'README.md', 'exec'), names)
    assert 'search' in capsys.readouterr().out
    assert len(set(names['rewards'][0].tolist())) == 2 and abs(float(names['loss'])) > 1e-3
    ((config, workdir),) = trained
    assert config.recipe == 'drzero' and workdir == 'runs/from_python'


def test_the_derived_recipe_of_the_documentation_works(tmp_path, monkeypatch):
    examples = python_blocks('docs/recipes.md')
    recipe = next(text for text in examples if 'class Recipe(drzero.Recipe)' in text)
    page = next(text for text in examples if 'their_package.critical' in text)
    (tmp_path / 'their_package').mkdir()
    # Without this file Python's inspect, which pydantic calls, would fail: it remembers the files of modules by name,
    # and other tests have regular packages of this name.
    (tmp_path / 'their_package' / '__init__.py').touch()
    (tmp_path / 'their_package' / 'critical.py').write_text(recipe)
    monkeypatch.syspath_prepend(tmp_path)
    config = fields.default_config('their_package.critical')
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
    """The pages and the figure name files by their places in the repository or in the package."""
    for page in ('docs/reading.md', 'docs/figures/step.svg', 'AGENTS.md'):
        text = (ROOT / page).read_text(encoding='utf-8')
        paths = set(re.findall(r'[a-z_]+(?:/[a-z_]+)+\.(?:py|md)', text))
        assert len(paths) > 1
        folders = (ROOT, ROOT / 'zeroplay_jax', ROOT / 'docs')
        missing = [path for path in paths if not any((f / path).is_file() for f in folders)]
        assert all(map(has_left, missing)), missing
