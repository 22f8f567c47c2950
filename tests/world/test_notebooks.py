"""The notebooks: each plays from a clean kernel in its small setting, and what is committed was played whole."""

import os
import re
import subprocess

import nbclient
import nbformat
import pytest
from python_process import FAST, ROOT, run_python

MACHINE = re.compile(
    r'(?<![\w.])/(home|root|tmp|Users|var|mnt|opt|content|work)/|/dist-packages/|site-packages'
)


def read(name):
    return nbformat.read(ROOT / 'notebooks' / f'{name}.ipynb', as_version=4)


# What each notebook has to find, in the names of its cells.
FOUND = {
    '01_objectives': """
ratio_of_means = np.where(mask, logp - old_logp, 0).sum(1) / mask.sum(1)
assert np.abs(np.log(sequence_ratio) - ratio_of_means).max() < 1e-5
# The token clip makes holes; the others keep or drop rollouts as a whole.
token, *sequence = [[kept[name][i][mask[i]].mean() for i in range(ROLLOUTS)] for name in kept]
assert any(0 < share < 1 for share in token) and all(set(shares) == {0, 1} for shares in sequence)
""",
    '02_rollouts_and_search': """
assert rollout.valid_calls == 3 and question['answers'][0] in rollout.turns[-1].text
assert gap < 1e-4 and outside == 0
assert batch.mask.sum() == sum(t.policy_tokens for t in rollouts)
# Text of the outside has no token that ends a turn or answers.
assert {'<answer>', '<|im_end|>'} <= set(added(trusted)) and added(foreign) == []
""",
    '03_selfplay': """
assert [step.phase.name for step in steps] == ['proposer', 'generate', 'solver']
assert dict(engine.weights.newest) == {'proposer': 1, 'solver': 1}
assert len(questions_before) == len(questions_after) == 10
""",
    '04_bring_your_own': """
# transformers writes with these weights what our sampler wrote.
assert same is True
assert json.loads((WORK / 'run' / 'summary.json').read_text())['outside_questions'] == 0
titles = {path.read_text().split()[0] for path in files}
assert any(title in t['info']['question'] for t in invented for title in titles)
""",
}


@pytest.mark.parametrize('name', FOUND)
def test_a_notebook_plays_from_a_clean_kernel(name, tmp_path):
    notebook = read(name)
    notebook.cells.append(nbformat.v4.new_code_cell(FOUND[name]))
    place = {'metadata': {'path': str(ROOT / 'notebooks')}}
    client = nbclient.NotebookClient(notebook, timeout=300, resources=place)
    small = {'ZEROPLAY_SMALL': '1', 'ZEROPLAY_RUNS': str(tmp_path / 'runs')}
    # Raises where a cell does.
    client.execute(env=os.environ | FAST | small)


def test_all_notebooks_are_tested_and_listed():
    assert sorted(path.stem for path in (ROOT / 'notebooks').glob('*.ipynb')) == list(FOUND)
    assert len({read(name).cells[0].source for name in FOUND}) == 1


@pytest.mark.parametrize('name', FOUND)
def test_outputs_are_committed_whole_and_name_no_machine(name):
    notebook = read(name)
    cells = [cell for cell in notebook.cells if cell.cell_type == 'code']
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    for output in outputs:
        assert output.output_type != 'error' and output.get('name') != 'stderr'
        shown = {'text': output.get('text', ''), **output.get('data', {})}
        for kind, text in shown.items():
            assert kind.startswith('image/') or not MACHINE.search(text)
    assert any('image/png' in output.get('data', {}) for output in outputs)


def install(folder, repository):
    source = read('01_objectives').cells[0].source
    source = source.replace("REPOSITORY = ''", f'REPOSITORY = {repository!r}')
    return run_python('-c', f'{source}\nprint(os.getcwd())', cwd=folder, timeout=60)


def test_an_address_is_cloned_once_and_nothing_is_installed_again(tmp_path):
    source, place = tmp_path / 'source', tmp_path / 'place'
    (source / 'zeroplay_jax').mkdir(parents=True)
    place.mkdir()
    (source / 'zeroplay_jax' / '__init__.py').touch()
    # The second pin is for a Python that nobody has.
    pins = f'nbformat=={nbformat.__version__}\nnbformat==0.1; python_version < "3"\n'
    (source / 'requirements.txt').write_text(f'# comment\n{pins}')
    commit = 'git init --quiet; git add .; git -c user.name=a -c user.email=a@b commit -qm one'
    subprocess.run(commit, shell=True, cwd=source, check=True)
    for address in (f'file://{source}', ''):
        result = install(place, address)
        assert result.stdout.splitlines() == ['ready', str(place / 'zeroplay')], result.stderr
