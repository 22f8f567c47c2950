"""The rules of the house: what may import what, and how long things are."""

import ast
import functools
import graphlib
import os
import re
import shlex
import shutil
import subprocess
import tokenize
import tomllib

import launch_cases
import pytest
from python_process import PIPES, ROOT
from removed_extras import REMOVED

from zeroplay_jax.extras import EXTRAS

RULES = tomllib.loads((ROOT / 'tests' / 'house.toml').read_text(encoding='utf-8'))
CODE = ('zeroplay_jax', 'retrieval', 'configs', 'benchmarks', 'tools')


def python_files(*folders):
    return sorted(path for folder in folders for path in (ROOT / folder).rglob('*.py'))


def name(path):
    return path.relative_to(ROOT).as_posix()


@functools.cache
def tree(path):
    return ast.parse(path.read_text(encoding='utf-8'))


EXTRA_FILES = {path.stem for path in (ROOT / 'zeroplay_jax' / 'extras').glob('[a-z]*')}


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
    if parts[:2] == ['zeroplay_jax', 'extras'] and {*parts[2:]} & EXTRA_FILES:
        # The package `extras` itself is the table of them.
        return 'an extra'
    return parts[1] if parts[0] == 'zeroplay_jax' and len(parts) > 1 else None


def module(path):
    return name(path).removesuffix('.py').removesuffix('/__init__').replace('/', '.')


def upward(path):
    """Imports of a file that run upward, as 'file -> module'."""
    floor = {room: level for level, rooms in enumerate(RULES['floors']) for room in rooms}
    here = floor.get(room(module(path)), len(RULES['floors']))
    return [f'{name(path)} -> {m}' for m in imports(path) if room(m) and floor[room(m)] > here]


OURS = python_files('zeroplay_jax', 'retrieval', 'configs')


def test_imports_run_downward():
    assert {room(module(path)) for path in OURS} - {None} <= set().union(*RULES['floors'])
    assert not [fault for path in OURS for fault in upward(path)]


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


def extra_of(dotted):
    """The extra that a dotted name belongs to, or None; what they share is none."""
    first, _, rest = dotted.partition('zeroplay_jax.extras.')
    extra = rest.split('.')[0]
    return extra if not first and extra in EXTRAS else None


def test_every_extra_has_a_line_in_the_table_and_stands_alone():
    assert EXTRA_FILES - {'drawing'} == EXTRAS.keys() <= {*RULES['extras']}
    for path in python_files('zeroplay_jax/extras'):
        assert {*filter(None, map(extra_of, imports(path)))} <= {extra_of(module(path))}, path


@pytest.mark.parametrize('folder', RULES['quick'])
def test_what_is_loaded_before_a_mistake_is_reported_loads_no_slow_library(folder):
    files = {module(path): path for path in OURS}
    if folder.removeprefix('extras.') in REMOVED:
        return
    for name_of_file in RULES['quick'][folder]:
        module_name = '.'.join(filter(None, ['zeroplay_jax', folder, name_of_file]))
        assert not libraries_of(module_name, files) & {*RULES['slow_libraries']}, module_name


def test_retrieval_stands_alone_and_objectives_know_arrays_only():
    for path in python_files('retrieval'):
        assert not any('zeroplay_jax' in m for m in imports(path)), name(path)
    for path in python_files('zeroplay_jax/objectives'):
        roots = {m.split('.')[0] for m in imports(path)}
        assert not {m for m in imports(path) if room(m) not in (None, 'objectives')}
        assert not roots & set('flax optax orbax transformers ml_collections'.split())
        assert path.name != 'rewards.py' or 'jax' not in roots


def test_a_library_is_imported_behind_its_door_only():
    for path in python_files(*CODE):
        for library in {m.split('.')[0] for m in imports(path)} & RULES['doors'].keys():
            assert name(path).startswith(tuple(RULES['doors'][library])), (name(path), library)


def recipe_comparisons(path):
    """Lines that compare a field or variable called recipe with something."""
    for node in ast.walk(tree(path)):
        sides = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.Match):
            sides = [node.subject]
        if 'recipe' in {getattr(side, 'attr', getattr(side, 'id', '')) for side in sides}:
            yield f'{name(path)}:{node.lineno}'


def test_nothing_but_a_recipe_knows_which_recipe_runs():
    assert not [fault for path in OURS for fault in recipe_comparisons(path)]


def test_only_recipes_name_their_roles():
    elsewhere = set()
    for path in OURS:
        texts = {node.value for node in ast.walk(tree(path)) if isinstance(node, ast.Constant)}
        is_home = name(path).startswith(tuple(RULES['homes_of_roles']))
        if not is_home and texts & {*RULES['names_of_roles']}:
            elsewhere.add(name(path))
    # One that is new, or an exception that nothing needs.
    assert elsewhere == RULES['allowed_names'].keys()


def test_files_and_functions_are_short():
    for path in python_files(*CODE):
        text = path.read_text(encoding='utf-8')
        assert len(text.splitlines()) <= 700, name(path)
        # A banner between two parts of a file says that it is two files.
        assert path not in OURS or not re.search('^# -{3,}', text, re.M), name(path)
    for path in python_files(*CODE, 'tests'):
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno - node.lineno < 80, f'{name(path)} {node.name}'


def code_tokens(path):
    """Names, operators, numbers and strings of a file; docstrings and comments cost nothing."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    lines_of_docstrings = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines_of_docstrings.update(range(docstring.lineno, docstring.end_lineno + 1))
    kinds = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
    with tokenize.open(path) as file:
        tokens = list(tokenize.generate_tokens(file.readline))
    counted = [t for t in tokens if t.type in kinds and t.start[0] not in lines_of_docstrings]
    return len(counted)


@pytest.mark.parametrize('part', RULES['prices'])
def test_no_part_is_larger_than_its_price(part):
    """The prices only fall; a commit that raises one names what left for it."""
    price = RULES['prices'][part]
    left_out = tuple(price.get('without', ()))
    paths = [
        path for path in python_files(*price['folders']) if not name(path).startswith(left_out)
    ]
    tokens = sum(map(code_tokens, paths))
    fix = 'remove as many, or raise the price in tests/house.toml and say in the commit what left'
    assert tokens <= price['tokens'], f'{part}: {tokens} of {price["tokens"]} tokens; {fix}'
    assert REMOVED or tokens > 0.99 * price['tokens'], f'{part}: lower its price to {tokens}'


def tracked():
    """The project's text files and their texts: what git tracks or would, else what lies in the folders."""
    command = 'git ls-files --cached --others --exclude-standard'
    listing = subprocess.run(command.split(), cwd=ROOT, **PIPES)
    paths = [ROOT / line for line in listing.stdout.splitlines()] or python_files(*CODE, 'tests')
    kinds = {'.py', '.md', '.sh', '.txt', '.toml', '.json', '.html', '.js', '.css', '.ipynb', ''}
    for path in paths:
        if path.is_file() and path.suffix in kinds and path.stat().st_size < 1 << 20:
            yield path, path.read_text(errors='ignore')


def test_no_file_is_unfinished_or_names_a_folder_of_somebodys_machine():
    machine = re.compile(r'(?<![\w.])/(home|root|work|farm|Users)/')
    words = re.compile(r'\b(TO' + r'DO|FIX' + r'ME|XX' + r'X)\b|Not' + 'ImplementedError')
    for path, text in tracked():
        assert not machine.search(text), path
        assert path.suffix == '.json' or not words.search(text), path


# Scripts and commands


@pytest.fixture
def clone(tmp_path):
    """A folder with what a command needs before anything is installed, and a place for fake programs."""
    shutil.copy(ROOT / 'Makefile', tmp_path)
    shutil.copytree(ROOT / 'launch', tmp_path / 'launch')
    shutil.copytree(ROOT / '.ci', tmp_path / '.ci')
    for path in (ROOT / 'pyproject.toml', *ROOT.glob('requirements*.txt')):
        shutil.copy(path, tmp_path)
    (tmp_path / 'bin').mkdir()
    return tmp_path


def fake(clone, program, script):
    return launch_cases.fake(clone / 'bin', program, script) / program


def call(clone, *command):
    environment = {key: value for key, value in os.environ.items() if not key.startswith('MAKE')}
    environment['PATH'] = f'{clone / "bin"}:{environment["PATH"]}'
    return subprocess.run(command, cwd=clone, env=environment, timeout=60, **PIPES)


@pytest.mark.parametrize(
    ('program', 'says', 'line'),
    [
        ('python-other', '3.10.14 somewhere venv', 'is 3.10.14'),
        ('python-other', '3.14.0 somewhere venv', 'needs Python 3.11, 3.12 or 3.13'),
        ('python-other', '3.12.4 somewhere bare', 'apt-get install python3.12-venv'),
        ('uname', 'Darwin', 'Linux'),
        ('uname', '4.4.0-19041-Microsoft', 'WSL2'),
    ],
)
def test_make_refuses_another_python_or_system_in_one_line(clone, program, says, line):
    # The system is asked for its name with -s, and for its release with -r.
    script = f'[ "$1" = -{"s" if says == "Darwin" else "r"} ] && echo {says} || echo Linux'
    fake(clone, program, script if program == 'uname' else f'echo {says}')
    python = [] if program == 'uname' else [f'PYTHON={clone}/bin/{program}']
    result = call(clone, 'make', 'quickstart', *python)
    assert result.returncode != 0 and not (clone / '.venv').exists()
    (said,) = [x for x in result.stderr.splitlines() if x.startswith('zeroplay_jax: ')]
    assert line in said


def test_make_finds_a_python_by_itself_past_a_broken_name(clone):
    for program in ('python3.11', 'python3.12'):
        fake(clone, program, 'exit 127')
    fake(clone, 'python3.13', 'echo 3.13.1 /opt/python3.13 venv')
    result = call(clone, 'launch/python.sh')
    assert result.returncode == 0 and result.stdout.strip() == '/opt/python3.13'
    assert 'Linux and Python 3.13.1' in result.stderr


@pytest.fixture
def fake_environment(clone):
    """An environment whose Python writes its arguments, one a line."""
    programs = clone / '.venv' / 'bin'
    programs.mkdir(parents=True)
    launch_cases.fake(programs, 'python', 'for argument; do echo "[$argument]"; done')
    fake(clone, 'python-check', 'exit 0').replace(clone / 'launch' / 'python.sh')
    (clone / '.venv' / 'ready').touch()
    return clone


MAIN = '-m zeroplay_jax.main --config=configs/quickstart.py'
CORPUS = '-m zeroplay_jax.quickstart --corpus'


@pytest.mark.parametrize(
    ('variables', 'words'),
    [
        ('', f'{MAIN} --workdir=runs/quickstart --config.seed=0'),
        ("'WORKDIR=some where' SEED=7", f"{MAIN} '--workdir=some where' --config.seed=7"),
        # Without a workdir the command chooses one.
        ('CORPUS=texts', f'{CORPUS} texts --encoder bm25 --seed 0'),
        (
            """ "CORPUS=my 'own' \\"texts\\" (a, b) & c" 'WORKDIR=runs/a b' 'EVAL=the questions.jsonl' ENCODER=bm25
            SEED=7 "ARGS=--config.schedule.hop_ratio='(1,)' --config.solver.steps=1" """,
            f"""{CORPUS} "my 'own' \\"texts\\" (a, b) & c" --workdir 'runs/a b' '--config.eval.file=the questions.jsonl'
            --encoder bm25 --seed 7 '--config.schedule.hop_ratio=(1,)' --config.solver.steps=1""",
        ),
    ],
)
def test_quickstart_passes_its_variables_on_whatever_is_in_them(fake_environment, variables, words):
    result = call(fake_environment, 'make', 'quickstart', *shlex.split(variables))
    assert result.returncode == 0, result.stderr
    called_with = [line[1:-1] for line in result.stdout.splitlines() if line.startswith('[')]
    assert called_with == shlex.split(words)


def test_make_installs_the_command_into_an_environment_of_its_own_folder(fake_environment):
    environment = fake_environment / '.venv'
    launch_cases.fake(environment / 'bin', 'pip', '')

    def printed():
        (environment / 'ready').unlink()
        return call(fake_environment, 'make', '.venv/ready').stdout

    assert printed().endswith('[--editable]\n[.]\n')
    environment.rename(fake_environment / 'of_another')
    environment.symlink_to('of_another')
    assert printed().endswith('[requirements.txt]\n')


def test_continuous_integration_runs_lint_all_tests_and_ten_mutations(fake_environment):
    fake(fake_environment, 'chromium', 'exit 0')
    fake(fake_environment, 'make', 'echo "[$*]"')
    result = call(fake_environment, '.ci/run')
    words = ['[lint]', '[test]', '[test-world]', '[tests/mutate.py]', '[--draw]', '[10]']
    assert (result.stdout.split(), result.returncode) == (words, 0)
    fake(fake_environment, 'make', 'test "$*" = lint || exit 3')
    assert call(fake_environment, '.ci/run').returncode == 3
