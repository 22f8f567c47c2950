"""Tests run on eight virtual CPU devices; smaller meshes are subsets."""

import gc
import math
import os
import signal
import sys

import kept_programs
import psutil
import pytest
from python_process import FLAGS

gc.set_threshold(20_000, 20, 20)  # as commands do
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
if 'xla_force_host_platform_device_count' not in os.environ.get('XLA_FLAGS', ''):
    flags = ('--xla_force_host_platform_device_count=8', FLAGS)
    os.environ['XLA_FLAGS'] = ' '.join([os.environ.get('XLA_FLAGS', ''), *flags])
# Set for the workers of this session and the commands they start.
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
    os.environ['JAX_COMPILATION_CACHE_DIR'] = kept_programs.begin_session()
    os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'

# Of one test process, in bytes: up to four, and what they start, share the machine.
MOST_MEMORY = psutil.virtual_memory().total // 8

# With --no-loadscope-reorder these files begin first, so that the test processes end at about the same time.
SLOW_FILES = """
    test_readme.py test_hosts.py test_run.py test_kills.py test_recipes.py test_ask_command.py test_papers.py
    test_package.py test_notebooks.py test_quickstart.py test_update_modes.py test_elementwise_losses.py test_learner.py
    test_rollout_means.py test_adapter_runs.py test_report_page.py test_league.py
    test_families.py test_untrained_runs.py test_qa.py test_commands.py
""".split()


def pytest_collection_modifyitems(items):
    def place(item):
        name = item.path.name
        return SLOW_FILES.index(name) if name in SLOW_FILES else len(SLOW_FILES)

    # A stable sort keeps the order within a file, which fixtures of modules rely on.
    items.sort(key=place)


def pytest_collection_finish():
    """What the imports made stays: collections of garbage pass over it."""
    gc.freeze()


@pytest.fixture(scope='session', autouse=True)
def no_lines_about_progress():
    """Tests count the lines of an error; a line about progress may come between, 30 seconds after the last one."""
    from zeroplay_jax.retrieval import progress

    progress._LINE_SECONDS = math.inf


@pytest.fixture(scope='module', autouse=True)
def handlers_of_signals_are_restored():
    """Commands replace them for good, as a process that ends with its command may."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope='module', autouse=True)
def programs_are_dropped_where_they_take_much_memory():
    """Modules share programs; thousands of them take gigabytes and slow down the rest."""
    yield
    jax = sys.modules.get('jax')
    if jax is not None and psutil.Process().memory_info().rss > MOST_MEMORY:
        jax.clear_caches()
        gc.collect()
