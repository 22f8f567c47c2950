"""The rules of the house: what may import what, and how long things are."""

import ast
import functools
import graphlib
import os
import re
import shlex
import subprocess
import tokenize
import tomllib

import pytest
from project_copy import listed
from python_process import PIPES, ROOT, run_python

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


def imports(path):
    """Dotted names a file imports, relative ones resolved; of `from a import b` both a and a.b."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(tree(path)):
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


def test_no_rooms_import_each_other_in_a_circle():
    seen = {}
    for path in OURS:
        here = room(module(path))
        seen.setdefault(here, set()).update({*map(room, imports(path))} - {here, None})
    # A circle raises.
    graphlib.TopologicalSorter(seen).prepare()


def extra_of(dotted):
    """The extra that a dotted name belongs to, or None; what they share is none."""
    first, _, rest = dotted.partition('zeroplay_jax.extras.')
    extra = rest.split('.')[0]
    return extra if not first and extra in EXTRAS else None


def test_every_extra_has_a_line_in_the_table_and_stands_alone():
    assert EXTRA_FILES - {'drawing'} == EXTRAS.keys()
    for path in python_files('zeroplay_jax/extras'):
        assert {*filter(None, map(extra_of, imports(path)))} <= {extra_of(module(path))}, path


def test_what_is_loaded_before_a_mistake_is_reported_loads_no_slow_library():
    modules = []
    for folder, files in RULES['quick'].items():
        for file in files:
            modules.append('.'.join(filter(None, ['zeroplay_jax', folder, file])))
    code = f"""import importlib, sys
from absl import flags
for name in {modules}:
    importlib.import_module(name)
    flags.FLAGS._flags().clear()  # other commands have flags of the same names
print({ ({*RULES['slow_libraries']}) } & {{*sys.modules}})
"""
    loaded = run_python('-c', code, fresh=True)
    assert loaded.stdout == 'set()\n', (loaded.stdout, loaded.stderr)


def test_retrieval_stands_alone_and_objectives_know_arrays_only():
    for path in python_files('retrieval'):
        assert not any('zeroplay_jax' in m for m in imports(path)), name(path)
    for path in python_files('zeroplay_jax/objectives'):
        roots = {m.split('.')[0] for m in imports(path)}
        assert not {m for m in imports(path) if room(m) not in (None, 'objectives')}
        assert not roots & set('flax optax orbax transformers ml_collections'.split())


def test_a_library_is_imported_behind_its_door_only():
    for path in python_files(*CODE):
        for library in {m.split('.')[0] for m in imports(path)} & RULES['doors'].keys():
            assert name(path).startswith(tuple(RULES['doors'][library])), (name(path), library)


def test_nothing_but_a_recipe_knows_which_recipe_runs():
    compared = re.compile(
        r'\brecipe (==|!=)|\.recipe (not )?in |(==|!=) (\w+\.)*recipe\b(?!\.)|match (\w+\.)*recipe:'
    )
    assert not [path for path in OURS if compared.search(path.read_text(encoding='utf-8'))]


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
    assert tokens > 0.99 * price['tokens'], f'{part}: lower its price to {tokens}'


def test_no_file_is_unfinished_or_names_a_folder_of_somebodys_machine():
    machine = re.compile(r'(?<![\w.])/(home|root|work|farm|Users)/')
    words = re.compile(r'\b(TO' + r'DO|FIX' + r'ME|XX' + r'X)\b|Not' + 'ImplementedError')
    kinds = ('.py', '.md', '.sh', '.txt', '.toml', '.html', '.js', '.css', '.ipynb')
    for name in listed('--cached', '--others', '--exclude-standard'):
        path = ROOT / name
        if path.suffix in kinds and path.is_file():
            text = path.read_text(encoding='utf-8')
            assert not machine.search(text) and not words.search(text), path


# Scripts and commands


def test_quickstart_passes_its_variables_on_whatever_is_in_them():
    variables = r""" "CORPUS=my 'own' \"texts\" (a, b) & c" 'WORKDIR=runs/a b' 'EVAL=the questions.jsonl' ENCODER=bm25
        SEED=7 "ARGS=--config.schedule.hop_ratio='(1,)' --config.solver.steps=1" """
    words = r"""-m zeroplay_jax.quickstart --corpus "my 'own' \"texts\" (a, b) & c" --workdir 'runs/a b'
        '--config.eval.file=the questions.jsonl' --encoder bm25 --seed 7
        '--config.schedule.hop_ratio=(1,)' --config.solver.steps=1"""
    # In place of Python: writes its arguments, one a line.
    variables += r""" "RUN=printf '[%s]\\n'" """
    command = ['make', '-o', '.venv/ready', 'quickstart', *shlex.split(variables)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith('MAKE')}
    result = subprocess.run(command, cwd=ROOT, env=environment, timeout=60, **PIPES)
    assert result.returncode == 0, result.stderr
    called_with = [line[1:-1] for line in result.stdout.splitlines()]
    assert called_with == shlex.split(words)
