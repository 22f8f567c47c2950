"""The notebooks: each plays from a clean kernel in its small setting, and what is committed was played whole."""

import json
import os
import pathlib
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


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == 'code']


def texts(cell):
    """All that a cell has shown, pictures aside."""
    for output in cell.outputs:
        yield output.get('text', '')
        for kind, data in output.get('data', {}).items():
            if not kind.startswith('image/'):
                yield data


@pytest.fixture(scope='module')
def environment(tmp_path_factory):
    """A small setting with its own place for runs."""
    folder = tmp_path_factory.mktemp('notebooks')
    small = {'ZEROPLAY_SMALL': '1', 'ZEROPLAY_RUNS': str(folder / 'runs')}
    return os.environ | FAST | small


def play(name, environment, probe):
    """Runs a notebook and then one cell more, which sets `probed`; returns the notebook and that as JSON has it."""
    notebook = read(name)
    question = f'{probe}\nimport json\nprint(json.dumps(probed, default=float))'
    notebook.cells.append(nbformat.v4.new_code_cell(question))
    place = {'metadata': {'path': str(ROOT / 'notebooks')}}
    client = nbclient.NotebookClient(notebook, timeout=300, resources=place, coalesce_streams=True)
    client.execute(env=environment)  # raises where a cell does
    answer = notebook.cells.pop().outputs[-1].text
    return notebook, json.loads(answer)


OBJECTIVES = """probed = dict(
    log_ratio_gap=np.abs(np.log(sequence_ratio) - np.where(mask, logp - old_logp, 0).sum(1) / mask.sum(1)).max(),
    learns={name: [kept[name][i][mask[i]].mean() for i in range(ROLLOUTS)] for name in kept},
    asked=list(zip(solved.tolist(), keeps.tolist())), samples=SAMPLES,
    full=full, tail=[found[True, k][0] for k in sizes], seen={name: value[0] for name, value in seen.items()},
)"""


def check_objectives(notebook, found, _):
    assert found['log_ratio_gap'] < 1e-5
    token, *sequence = found['learns'].values()
    assert any(0 < share < 1 for share in token), 'the token clip makes holes'
    for shares in sequence:
        assert set(shares) == {0.0, 1.0}, 'the sequence clip keeps or drops rollouts as a whole'
    assert all(keeps == (0 < solved < found['samples']) for solved, keeps in found['asked'])
    assert found['tail'] == sorted(found['tail'])
    assert found['tail'][-1] == pytest.approx(found['full'], rel=1e-4)
    seen = found['seen']
    assert abs(seen['top K alone']) < 1e-3 < 0.5 < seen['top K + tail'] <= seen['full']


ROLLOUTS = """probed = dict(
    answer=rollout.turns[-1].text, want=question['answers'], calls=rollout.valid_calls,
    gap=gap, outside=outside, learnt=batch.mask.sum(), written=sum(t.policy_tokens for t in rollouts),
    trusted=added(trusted), foreign=added(foreign),
)"""


def check_rollouts(notebook, found, _):
    assert found['calls'] == 3 and found['want'][0] in found['answer']
    assert found['gap'] < 1e-4
    assert found['outside'] == 0.0 and found['learnt'] == found['written']
    # Text of the outside has no token that ends a turn or answers.
    assert {'<answer>', '<|im_end|>', '<|im_start|>'} <= set(found['trusted'])
    assert found['foreign'] == []
    pages = [text for cell in code_cells(notebook) for text in texts(cell) if '<span' in text]
    assert '&lt;search&gt;' in pages[0] and '<search>' not in pages[0] + pages[1]


SELFPLAY = """import jax
furthest = lambda a, b: max(float(abs(x - y).max()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))
probed = dict(
    phases=[step.phase.name for step in steps], versions=dict(engine.weights.newest),
    moved=[furthest(learner.params, run.params) for learner in engine.learners.values()],
    before=[p.question for p in questions_before], after=[p.question for p in questions_after],
)"""


def check_selfplay(notebook, found, _):
    assert found['phases'] == ['proposer', 'generate', 'solver']
    assert found['versions'] == {'proposer': 1, 'solver': 1}
    assert all(0 < moved < 0.1 for moved in found['moved']), 'both learn'
    assert len(found['before']) == len(found['after']) == 10
    assert any(str(question).startswith('What is the ') for question in found['before'])


OWN = """probed = dict(
    rewards=[m.get(f'{m["phase"]}/reward_mean') for m in metrics if m['phase'] in ('proposer', 'solver')],
    invented=[t['info']['question'] for t in invented], same=same,
    titles=[path.read_text().split()[0] for path in files],
)"""


def check_own(notebook, found, environment):
    work = pathlib.Path(environment['ZEROPLAY_RUNS']) / 'notebook_own'
    assert len(found['rewards']) == 2 and all(reward > 0 for reward in found['rewards'])
    words = set(re.findall(r'\w+', ' '.join(found['invented'])))
    assert words & set(found['titles']), 'the proposer asks about these texts'
    assert found['same'] is True, 'transformers writes with these weights what our sampler wrote'
    summary = json.loads((work / 'run' / 'summary.json').read_text())
    assert summary['outside_questions'] == 0 and summary['questions'] == 12
    assert (work / 'run' / 'report.html').read_text().startswith('<!')


CHECKS = {
    '01_objectives': (OBJECTIVES, check_objectives),
    '02_rollouts_and_search': (ROLLOUTS, check_rollouts),
    '03_selfplay': (SELFPLAY, check_selfplay),
    '04_bring_your_own': (OWN, check_own),
}
NAMES = tuple(CHECKS)


@pytest.mark.parametrize('name', NAMES)
def test_a_notebook_plays_from_a_clean_kernel(name, environment):
    probe, check = CHECKS[name]
    notebook, found = play(name, environment, probe)
    check(notebook, found, environment)


def test_all_notebooks_are_tested_and_listed():
    assert sorted(path.stem for path in (ROOT / 'notebooks').glob('*.ipynb')) == list(NAMES)
    page = (ROOT / 'notebooks' / 'README.md').read_text()
    assert all(f'({name}.ipynb)' in page for name in NAMES)
    install_cells = {read(name).cells[0].source for name in NAMES}
    assert len(install_cells) == 1 and install_cells.pop().startswith('# @title Install\n')


@pytest.mark.parametrize('name', NAMES)
def test_outputs_are_committed_whole_and_name_no_machine(name):
    notebook, path = read(name), ROOT / 'notebooks' / f'{name}.ipynb'
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    for output in outputs:
        assert output.output_type != 'error' and output.get('name') != 'stderr'
    assert any('image/png' in output.get('data', {}) for output in outputs)
    assert not [text for cell in cells for text in texts(cell) if MACHINE.search(text)]
    assert path.stat().st_size < 600_000
    assert set(notebook.metadata) <= {'colab', 'kernelspec', 'language_info'}
    assert not any(cell.metadata for cell in notebook.cells)


def install(folder, repository=''):
    source = read(NAMES[0]).cells[0].source
    source = source.replace("REPOSITORY = ''", f'REPOSITORY = {repository!r}')
    return run_python('-c', f'{source}\nprint(os.getcwd())', cwd=folder, timeout=60)


@pytest.mark.fault('user-10', 'pins for other versions of Python, and all packages there')
def test_an_address_is_cloned_once_and_nothing_is_installed_again(tmp_path, user_reads):
    source, place = tmp_path / 'source', tmp_path / 'place'
    (source / 'zeroplay_jax').mkdir(parents=True)
    place.mkdir()
    (source / 'zeroplay_jax' / '__init__.py').touch()
    # The second pin is for a Python that nobody has.
    pins = f'nbformat=={nbformat.__version__}\nnbformat==0.1; python_version < "3"\n'
    (source / 'requirements.txt').write_text(f'# comment\n{pins}')
    result = install(place)
    assert result.returncode == 1 and 'fill in REPOSITORY' in result.stderr
    git = ['git', '-c', 'user.name=a', '-c', 'user.email=a@b', '-C', str(source)]
    for words in (['init', '--quiet'], ['add', '.'], ['commit', '--quiet', '-m', 'one']):
        subprocess.run([*git, *words], check=True)
    for address in (f'file://{source}', ''):
        result = install(place, address)
        assert result.stdout.splitlines() == ['ready', str(place / 'zeroplay')], result.stderr
    user_reads('right: ready')
