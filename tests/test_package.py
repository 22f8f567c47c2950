"""The project as other people install it: complete distributions, and a package of theirs that trains with it."""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile

import pytest
from packaging.requirements import Requirement
from project_copy import listed
from python_process import ROOT, finish, kill, wait_for
from python_process import start as start_command
from run_files import check_same_run, lines

OUTSIDE = ROOT / 'tests' / 'outside_package'
EXAMPLES = ROOT / 'examples'
SOURCES = ('pyproject.toml', 'MANIFEST.in', 'README.md', 'LICENSE', 'requirements.txt')
FOLDERS = ('zeroplay_jax', 'retrieval', 'configs')


def pip(*arguments, python=sys.executable):
    command = [sys.executable, '-m', 'pip', '--python', str(python), *map(str, arguments)]
    subprocess.run([*command, '--quiet', '--disable-pip-version-check'], check=True, timeout=300)


@pytest.fixture(scope='module')
def distributions(tmp_path_factory):
    """(sdist, wheel), the wheel built from the sdist. Built from a copy: setuptools leaves files behind."""
    source = tmp_path_factory.mktemp('source')
    for name in SOURCES:
        shutil.copy(ROOT / name, source)
    for name in FOLDERS:
        ignored = shutil.ignore_patterns('__pycache__')
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    out = tmp_path_factory.mktemp('distributions')
    build = f'from setuptools import build_meta; build_meta.build_sdist({str(out)!r})'
    subprocess.run(
        [sys.executable, '-c', build], cwd=source, check=True, capture_output=True, timeout=300
    )
    (sdist,) = out.glob('*.tar.gz')
    pip('wheel', sdist, '--no-deps', '--no-build-isolation', '--wheel-dir', out)
    (wheel,) = out.glob('*.whl')
    return sdist, wheel


@pytest.fixture(scope='module')
def python(distributions, tmp_path_factory):
    """The interpreter of a new environment with the wheel, the outside package and the examples.

    Their dependencies are those of this environment, by a path file. It comes after the environment's own packages.
    """
    folder = tmp_path_factory.mktemp('environment')
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', folder], check=True)
    interpreter = folder / 'bin' / 'python'
    pip('install', '--no-deps', distributions[1], python=interpreter)
    (site_packages,) = folder.glob('lib/python*/site-packages')
    dependencies = {sysconfig.get_path('purelib'), sysconfig.get_path('platlib')}
    (site_packages / 'dependencies.pth').write_text('\n'.join(dependencies) + '\n')
    sources = [shutil.copytree(source, folder / source.name) for source in (OUTSIDE, EXAMPLES)]
    pip('install', '--no-deps', '--no-build-isolation', *sources, python=interpreter)
    # A leftover of the build must not stand in for what was installed.
    for source in sources:
        shutil.rmtree(source)
    return interpreter


def start(python, folder, *arguments):
    return start_command([python, *arguments], folder, PYTHONPATH='')


def test_the_wheel_holds_every_file_once_and_below_one_name(distributions):
    packed = zipfile.ZipFile(distributions[1]).namelist()
    names = [name for name in packed if not re.search(r'\.dist-info/|\.md$', name)]
    expected = []
    for name in listed('-co', '--exclude-standard', *FOLDERS):
        # Links to the other folders are no files.
        if (ROOT / name).is_file() and not name.endswith('.md'):
            expected.append(f'zeroplay_jax/{name.removeprefix("zeroplay_jax/")}')
    assert sorted(names) == sorted(expected)


def test_the_installed_package_is_the_wheels_and_requires_what_the_project_does(python, tmp_path):
    code = (
        'import importlib.metadata as m, json, zeroplay_jax as zp\n'
        'print(json.dumps([zp.__file__, m.requires("zeroplay-jax")]))'
    )
    out, _ = finish(start(python, tmp_path, '-c', code))
    file, requires = json.loads(out)
    assert pathlib.Path(file).is_relative_to(python.parents[1])
    required = (ROOT / 'requirements.txt').read_text().splitlines()
    pins = {Requirement(line) for line in required if line and not line.startswith('#')}
    assert pins < {Requirement(line) for line in requires}
    # Its command finds the configs of the project.
    command = (python.parent / 'zeroplay', 'train', '--config=configs/quickstart.py')
    _, err = finish(start_command(command, tmp_path, PYTHONPATH=''), status=2)
    assert 'no folder for the run' in err


# All in one process, because each would load the libraries.
CHECK = """
import glob, sys
from zeroplay_jax.configuration import fields, rules
for config in sorted(glob.glob(sys.argv[1])):
    try:
        rules.check(fields.config_of_file(config))
        print('sound', config.split('/')[-2])
    except Exception as error:
        print('refused', config.split('/')[-2], error)
"""


def test_the_examples_are_packages_that_a_user_can_install(python, tmp_path):
    configs = f'{python.parents[1]}/lib/python*/site-packages/examples/*/config.py'
    out, _ = finish(start(python, tmp_path, '-c', CHECK, configs))
    assert len(out.splitlines()) >= 6
    # One example needs a library that is not among those of the project.
    for line in out.splitlines():
        assert line.startswith('sound ') or 'it imports openenv, which is not installed' in line


def start_training(python, folder, workdir):
    (config,) = python.parents[1].glob('lib/python*/site-packages/zp_outside/config.py')
    words = ('-m', 'zeroplay_jax.main', f'--config={config}', f'--workdir={workdir}')
    return start(python, folder, *words)


@pytest.fixture(scope='module')
def whole_run(python, tmp_path_factory):
    folder = tmp_path_factory.mktemp('elsewhere')
    finish(start_training(python, folder, 'whole'))
    return folder / 'whole'


def test_an_outside_package_trains_its_roles_with_its_tool_loss_and_reward(whole_run):
    steps = [r for r in lines(whole_run) if r['phase'] == 'solver']
    assert len(steps) == 3
    rows = lines(whole_run, 'trajectories.jsonl')
    for role in ('solver', 'critic'):
        assert any(step.get(f'{role}/gradient_norm') for step in steps)
        assert (whole_run / 'policy' / role / 'model.safetensors').is_file()
        assert any(row['role'] == role for row in rows)
    # The critic makes two updates per batch, so its ratio moves and the loss penalises it.
    assert any(step.get('critic/ratio_penalty') for step in steps)
    assert all('solver/reward/zp_outside.rewards:last_word' in step for step in steps)
    # Only the outside tool has this error, which depends on the rollout's earlier calls.
    assert any(call['error'] == 'nothing_new' for row in rows for call in row['turns'] if call)


def test_an_outside_run_that_is_killed_ends_like_one_that_was_not(whole_run, python):
    folder = whole_run.parent
    killed = folder / 'killed'
    process = start_training(python, folder, 'killed')
    # A checkpoint has its final name once it is complete; step 2 of 5 is in the middle.
    wait_for((killed / 'checkpoints' / '2').is_dir, process)
    kill(process)
    assert not (killed / 'summary.json').exists()
    _, err = finish(start_training(python, folder, 'killed'))
    assert 'resumes at step' in err
    check_same_run(whole_run, killed)
