"""The tables and figures of the five papers: each has a command that parses, or a reason why it has none."""

import importlib
import shlex
import tomllib

import pytest
from python_process import ROOT, run_python

from zeroplay_jax.configs import ablations
from zeroplay_jax.evaluation import pictures

PAPERS = tomllib.loads((ROOT / 'tests' / 'golden' / 'papers.toml').read_text(encoding='utf-8'))
COMMANDS = sorted({row['command'] for row in PAPERS.values() if 'command' in row})
# Commands whose flags are absl's; the others have a parser of argparse.
OF_ABSL = ('evaluate', 'main')
# One process each, because the flags of a config's fields are defined once.
PARSE = """
import importlib, sys
from zeroplay_jax.configuration import command_line
module, *words = sys.argv[1:]
importlib.import_module(f'zeroplay_jax.{module}')
assert command_line.parse_flags([module, *words]) == [module]
"""


def test_every_table_and_figure_has_a_command_or_a_reason():
    for name, row in PAPERS.items():
        assert row.keys() <= {'command', 'report', 'rows', 'not'}, name
        assert row.keys() & {'command', 'report', 'not'}, name
    papers = {name.split(',')[0] for name in PAPERS}
    assert papers == {'SSP', 'π-Play', 'Dr. Zero', 'DSPO', 'SCOPE'}


def test_every_figure_of_the_data_file_belongs_to_a_paper_and_every_row_is_a_config():
    drawn = {row['report'] for row in PAPERS.values() if 'report' in row}
    # Two more, beside a figure that turns on them.
    assert drawn == pictures.figures().keys() - {'piplay_divergence', 'scope_length'}
    for name, row in PAPERS.items():
        for config in row.get('rows', ()):
            assert config in ablations.ROWS, name


@pytest.mark.parametrize('line', COMMANDS)
def test_every_command_parses(line):
    module, *words = shlex.split(line)
    if module in OF_ABSL:
        result = run_python('-c', PARSE, module, *words)
        assert result.returncode == 0, result.stderr[-2000:]
        return
    parser = importlib.import_module(f'zeroplay_jax.{module}')._parser()
    known, for_evaluate = parser.parse_known_args(words)
    # Those of the solver, which `zeroplay_jax.evaluate` reads.
    assert not for_evaluate or known.policy
