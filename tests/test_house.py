"""The rules of the house: what may import what, how long things are, how commands greet a strange machine."""

import ast
import functools
import graphlib
import os
import re
import shutil
import subprocess

import launch_cases
import pytest
from python_process import PIPES, ROOT

CODE = ('zeroplay_jax', 'retrieval', 'configs', 'benchmarks', 'tools')

# Imports run downward: a room sees its own floor and the ones below it.
FLOORS = (
    {'types', 'runtime', 'policy', 'objectives', 'retrieval', 'settings'},
    {'tools'},
    {'rollout', 'learner', 'mini'},
    {'data'},
    {'selfplay'},
    {'recipes'},
    {'evaluation', 'configuration'},
    {'training', 'configs'},
    {'api_arguments'},
    {'api'},
    {'__main__', 'main', 'evaluate', 'compare', 'ask', 'report', 'inputs', 'quickstart', 'export'},
)
# Heavy or changeable libraries stay behind one door each: where they may be imported.
DOORS = {
    'google': ('retrieval/objects.py',),
    'flax': ('zeroplay_jax/policy/', 'benchmarks/peers/'),
    'clu': ('zeroplay_jax/runtime/log.py',),
    'jsonschema': ('zeroplay_jax/tools/argument_schema.py',),
    'matplotlib': ('zeroplay_jax/evaluation/report_builder.py', 'benchmarks/claims.py'),
    'mcp': ('zeroplay_jax/tools/mcp',),
    'mlflow': ('zeroplay_jax/runtime/log.py',),
    'pyarrow': ('retrieval/rows.py',),
    'pydantic': (
        'zeroplay_jax/settings/',
        'zeroplay_jax/configuration/',
        'zeroplay_jax/tools/argument_schema.py',
    ),
    'rich': ('zeroplay_jax/training/screen.py',),
    'scann': ('retrieval/', 'benchmarks/'),
    'tensorflow': ('retrieval/', 'benchmarks/', 'zeroplay_jax/configuration/command_line.py'),
    'tensorflow_text': ('retrieval/',),
    'torch': ('benchmarks/',),
    'wandb': ('zeroplay_jax/runtime/log.py',),
}
# Loaded before a mistake in a command is reported, within a second: neither they nor what they import load these.
SLOW_LIBRARIES = {'flax', 'jax', 'optax', 'orbax', 'scann', 'tensorflow', 'transformers'}
QUICK = {
    '': ('main', 'evaluate', 'export', 'inputs', 'quickstart', 'report', 'types'),
    'configuration': ('check', 'command_line', 'fields', 'places', 'rules'),
    'data': ('builders', 'chains', 'cloze', 'cloze_files', 'files'),
    'objectives': ('advantages', 'answers', 'format_scores', 'registry', 'rewards'),
    'recipes': ('datasets', 'drzero', 'dspo', 'piplay', 'proposing', 'scope', 'solving', 'ssp'),
    'rollout': ('foreign_text', 'pages', 'prompts'),
    'runtime': ('disk', 'record', 'remote_workdir', 'signals', 'workdir'),
    'selfplay': ('answers', 'library', 'recipe', 'schedule'),
    'settings': ('kinds', 'renamed', 'rollouts', 'schema'),
    'tools': ('argument_schema', 'base', 'calculator', 'mcp', 'registry', 'search'),
}
# The engine knows no recipe. Names of roles belong to recipes, their configs and the worlds they were
# trained in; elsewhere a name is one of these, for the reason given.
NAMES_OF_ROLES = ('proposer', 'solver')
HOMES_OF_ROLES = ('zeroplay_jax/recipes/', 'zeroplay_jax/mini/', 'tools/', 'configs/')
ALLOWED_NAMES = {
    'zeroplay_jax/api.py': 'the role and prompt that notebooks sample',
    'zeroplay_jax/selfplay/recipe.py': 'the default of Recipe.evaluated_role',
    'zeroplay_jax/rollout/prompts.py': 'a shared prompt is called solver',
    'zeroplay_jax/selfplay/answers.py': 'asks for that prompt',
    'zeroplay_jax/evaluation/play.py': 'the default of an argument; runs pass evaluated_role',
    'zeroplay_jax/evaluation/question_sets.py': 'the default of an argument; runs pass evaluated_role',
}


def python_files(*folders):
    return sorted(path for folder in folders for path in (ROOT / folder).rglob('*.py'))


def name(path):
    return path.relative_to(ROOT).as_posix()


@functools.cache
def tree(path):
    return ast.parse(path.read_text(encoding='utf-8'))


def imports(path, at_load=False):
    """Dotted names a file imports, relative ones resolved; of `from a import b` both a and a.b.

    With `at_load` those that loading the file imports: not those in functions or for type checkers.
    """
    package = path.relative_to(ROOT).parent.parts
    for node in tree(path).body if at_load else ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (real_folder(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = real_folder('.'.join((*base, *filter(None, [node.module]))))
            yield module
            yield from (real_folder(f'{module}.{alias.name}') for alias in node.names)


def real_folder(dotted):
    """The name without the links: `zeroplay_jax/retrieval` is the folder `retrieval`, so are the configs."""
    return re.sub(r'^zeroplay_jax\.(?=(retrieval|configs)\b)', '', dotted)


def room(dotted):
    """The room a dotted name of ours belongs to, or None."""
    parts = dotted.split('.')
    if parts[0] in ('retrieval', 'configs'):
        return parts[0]
    return parts[1] if parts[0] == 'zeroplay_jax' and len(parts) > 1 else None


def module(path):
    return name(path).removesuffix('.py').removesuffix('/__init__').replace('/', '.')


def upward(path):
    """Imports of a file that run upward, as 'file -> module'."""
    floor = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
    here = floor.get(room(module(path)), len(FLOORS))
    return [f'{name(path)} -> {m}' for m in imports(path) if room(m) and floor[room(m)] > here]


OURS = python_files('zeroplay_jax', 'retrieval', 'configs')


def test_imports_run_downward():
    assert not [fault for path in OURS for fault in upward(path)]


def test_an_import_upward_is_seen(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), 'ROOT', tmp_path)
    path = tmp_path / 'zeroplay_jax' / 'objectives' / 'advantages.py'
    path.parent.mkdir(parents=True)
    path.write_text('from ..learner import learner\n')
    assert upward(path)[0] == 'zeroplay_jax/objectives/advantages.py -> zeroplay_jax.learner'


def test_every_room_has_a_floor():
    assert {room(module(path)) for path in OURS} - {None} <= set().union(*FLOORS)


def test_no_imports_in_a_circle():
    known = {module(path) for path in OURS}
    files = {
        module(path): {m for m in imports(path) if m in known} - {module(path)} for path in OURS
    }
    rooms = {}
    for file, seen in files.items():
        rooms.setdefault(room(file), set()).update({room(m) for m in seen} - {room(file), None})
    for graph in (files, rooms):
        # A circle raises.
        assert {*graphlib.TopologicalSorter(graph).static_order()} >= graph.keys()


def libraries_of(module_name, files):
    """Libraries that loading a module loads, through any number of files of the project."""
    libraries = set()
    loaded, waiting = set(), [module_name]
    while waiting:
        current = waiting.pop()
        if current in loaded:
            continue
        loaded.add(current)
        for dotted in imports(files[current], at_load=True):
            if room(dotted) is None and not dotted.startswith('zeroplay_jax'):
                libraries.add(dotted.split('.')[0])
            elif dotted in files:
                waiting.append(dotted)
    return libraries


@pytest.mark.parametrize('folder', QUICK)
def test_what_is_loaded_before_a_mistake_is_reported_loads_no_slow_library(folder):
    files = {module(path): path for path in OURS}
    for name_of_file in QUICK[folder]:
        module_name = '.'.join(filter(None, ['zeroplay_jax', folder, name_of_file]))
        assert not libraries_of(module_name, files) & SLOW_LIBRARIES, module_name


def test_the_entry_of_a_module_stands_last():
    """What stands behind it is not defined yet when the module is run as a command."""
    for path in python_files(*CODE):
        for statement in tree(path).body[:-1]:
            is_entry = isinstance(statement, ast.If) and '__name__' in ast.unparse(statement.test)
            assert not is_entry, f'{name(path)}:{statement.lineno}'


def test_retrieval_stands_alone():
    for path in python_files('retrieval'):
        assert not any('zeroplay_jax' in m for m in imports(path)), name(path)


def test_objectives_know_arrays_only():
    for path in python_files('zeroplay_jax/objectives'):
        roots = {m.split('.')[0] for m in imports(path)}
        assert not {m for m in imports(path) if room(m) not in (None, 'objectives')}
        assert not roots & {'flax', 'optax', 'orbax', 'transformers', 'ml_collections'}
        assert path.name != 'rewards.py' or 'jax' not in roots


def test_a_library_is_imported_behind_its_door_only():
    for path in python_files(*CODE):
        for library in {m.split('.')[0] for m in imports(path)} & DOORS.keys():
            assert name(path).startswith(DOORS[library]), (name(path), library)


def recipe_comparisons(path):
    """Lines that compare a field or variable called recipe with something."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            names = {getattr(side, 'attr', getattr(side, 'id', '')) for side in sides}
            if 'recipe' in names:
                yield f'{name(path)}:{node.lineno}'
        elif isinstance(node, ast.Match) and 'recipe' in ast.unparse(node.subject):
            yield f'{name(path)}:{node.lineno}'


def role_names(path):
    """Lines with a text that is the name of a role."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Constant) and node.value in NAMES_OF_ROLES:
            yield f'{name(path)}:{node.lineno}'


def test_nothing_but_a_recipe_knows_which_recipe_runs():
    assert not [fault for path in OURS for fault in recipe_comparisons(path)]


def test_only_recipes_name_their_roles():
    named = {name(path) for path in OURS if any(role_names(path))}
    elsewhere = {path for path in named if not path.startswith(HOMES_OF_ROLES)}
    assert elsewhere == ALLOWED_NAMES.keys(), 'one that is new, or an exception that nothing needs'


def test_a_comparison_with_a_recipe_is_seen(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), 'ROOT', tmp_path)
    path = tmp_path / 'engine.py'
    path.write_text("if config.recipe == 'ssp' and 'x' in (recipe,):\n    role = 'solver'\n")
    assert list(recipe_comparisons(path)) == ['engine.py:1']
    assert list(role_names(path)) == ['engine.py:2']


def test_files_and_functions_are_short():
    for path in python_files(*CODE):
        assert len(path.read_text().splitlines()) <= 700, name(path)
    for path in python_files(*CODE, 'tests'):
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno - node.lineno < 80, f'{name(path)} {node.name}'


def tracked():
    """The project's text files and their texts: what git tracks or would, else what lies in the folders."""
    command = 'git ls-files --cached --others --exclude-standard'
    listing = subprocess.run(command.split(), cwd=ROOT, **PIPES)
    paths = [ROOT / line for line in listing.stdout.splitlines()] or python_files(*CODE, 'tests')
    kinds = {'.py', '.md', '.sh', '.txt', '.toml', '.json', '.html', '.js', '.css', '.ipynb', ''}
    for path in paths:
        if path.is_file() and path.suffix in kinds and path.stat().st_size < 1 << 20:
            yield path, path.read_text(errors='ignore')


def test_no_file_names_a_folder_of_somebodys_machine():
    machine = re.compile(r'(?<![\w.])/(home|root|work|farm|Users)/')
    assert not [name(path) for path, text in tracked() if machine.search(text)]


def test_nothing_is_left_unfinished():
    words = re.compile(r'\b(TO' + r'DO|FIX' + r'ME|XX' + r'X)\b|Not' + 'ImplementedError')
    named = [name(path) for path, text in tracked() if words.search(text)]
    assert not [file for file in named if not file.endswith('.json')]


# Scripts and commands


SCRIPTS = [ROOT / '.ci' / 'run', *sorted((ROOT / 'launch').glob('*.sh'))]


def test_shell_scripts_are_sound():
    if not shutil.which('shellcheck'):
        pytest.skip('shellcheck is not installed')
    result = subprocess.run(['shellcheck', *SCRIPTS], **PIPES)
    assert result.returncode == 0, result.stdout


def test_scripts_can_be_executed():
    assert not [name(path) for path in SCRIPTS if not os.access(path, os.X_OK)]


@pytest.fixture
def clone(tmp_path):
    """A folder with what a command needs before anything is installed, and a place for fake programs."""
    shutil.copy(ROOT / 'Makefile', tmp_path)
    shutil.copytree(ROOT / 'launch', tmp_path / 'launch')
    shutil.copytree(ROOT / '.ci', tmp_path / '.ci')
    for path in ROOT.glob('requirements*.txt'):
        shutil.copy(path, tmp_path)
    (tmp_path / 'bin').mkdir()
    return tmp_path


def fake(clone, program, script):
    return launch_cases.fake(clone / 'bin', program, script) / program


def call(clone, *command):
    environment = {key: value for key, value in os.environ.items() if not key.startswith('MAKE')}
    environment['PATH'] = f'{clone / "bin"}:{environment["PATH"]}'
    return subprocess.run(command, cwd=clone, env=environment, timeout=60, **PIPES)


def said(result):
    """The one line of a command about the machine."""
    (line,) = [x for x in result.stderr.splitlines() if x.startswith('zeroplay_jax: ')]
    return line


def refused(clone, *command):
    result = call(clone, 'make', *command)
    assert result.returncode != 0 and not (clone / '.venv').exists()
    return said(result)


@pytest.mark.parametrize('version', ['3.10.14', '3.14.0'])
def test_make_refuses_another_python_in_one_line(clone, version):
    python = fake(clone, 'python-other', f'echo {version} somewhere venv')
    line = refused(clone, 'quickstart', f'PYTHON={python}')
    assert 'needs Python 3.11, 3.12 or 3.13' in line and f'is {version}' in line


def test_make_refuses_a_python_without_venv(clone):
    python = fake(clone, 'python-bare', 'echo 3.12.4 somewhere bare')
    line = refused(clone, 'check', f'PYTHON={python}')
    assert 'apt-get install python3.12-venv' in line


@pytest.mark.parametrize(
    ('option', 'answer', 'hint'),
    [('-s', 'Darwin', 'Linux'), ('-r', '4.4.0-19041-Microsoft', 'WSL2')],
)
def test_make_refuses_another_system_in_one_line(clone, option, answer, hint):
    fake(clone, 'uname', f'if [ "$1" = {option} ]; then echo {answer}; else echo Linux; fi')
    assert hint in refused(clone, 'quickstart')


def test_make_finds_a_python_by_itself_past_a_broken_name(clone):
    for program in ('python3.11', 'python3.12'):
        fake(clone, program, 'exit 127')
    fake(clone, 'python3.13', 'echo 3.13.1 /opt/python3.13 venv')
    result = call(clone, 'launch/python.sh')
    assert result.returncode == 0 and result.stdout.strip() == '/opt/python3.13'
    assert 'Linux and Python 3.13.1' in said(result)


@pytest.fixture
def fake_environment(clone):
    """An environment whose Python writes its arguments, one a line."""
    programs = clone / '.venv' / 'bin'
    programs.mkdir(parents=True)
    launch_cases.fake(programs, 'python', 'for argument; do echo "[$argument]"; done')
    fake(clone, 'python-check', 'exit 0').replace(clone / 'launch' / 'python.sh')
    (clone / '.venv' / 'ready').touch()
    return clone


def arguments(clone, *variables):
    """What the fake Python was called with by `make quickstart`."""
    result = call(clone, 'make', 'quickstart', *variables)
    assert result.returncode == 0, result.stderr
    return [line[1:-1] for line in result.stdout.splitlines() if line.startswith('[')]


def test_quickstart_passes_workdir_and_seed_on(fake_environment):
    words = arguments(fake_environment, 'WORKDIR=some where', 'SEED=7')
    assert words[:3] == ['-m', 'zeroplay_jax.main', '--config=configs/quickstart.py']
    assert words[3:] == ['--workdir=some where', '--config.seed=7']
    assert '--workdir=runs/quickstart' in arguments(fake_environment)


def test_quickstart_passes_a_corpus_on_whatever_is_in_its_path(fake_environment):
    corpus = """my 'own' "texts" (a, b) & c"""
    chosen = ['WORKDIR=runs/a b', 'EVAL=the questions.jsonl', 'ENCODER=bm25', 'SEED=7']
    flags = "ARGS=--config.schedule.hop_ratio='(1,)' --config.solver.steps=1"
    words = arguments(fake_environment, f'CORPUS={corpus}', *chosen, flags)
    assert words[:4] == ['-m', 'zeroplay_jax.quickstart', '--corpus', corpus]
    assert words[4:8] == ['--workdir', 'runs/a b', '--eval', 'the questions.jsonl']
    more = '--encoder bm25 --seed 7 --config.schedule.hop_ratio=(1,) --config.solver.steps=1'
    assert words[8:] == more.split()
    # Without a workdir the command chooses one.
    few = '-m zeroplay_jax.quickstart --corpus texts --encoder lexical --seed 0'
    assert arguments(fake_environment, 'CORPUS=texts') == few.split()


def test_continuous_integration_runs_lint_and_the_tests(clone):
    fake(clone, 'make', 'echo "make got: $*"; exit 3')
    for program in ('chromium', 'shellcheck'):
        fake(clone, program, 'exit 0')
    result = call(clone, '.ci/run')
    assert (result.stdout, result.returncode) == ('make got: lint test\n', 3)
