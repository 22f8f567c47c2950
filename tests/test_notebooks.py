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


def play(name, environment, probe, settings=None):
    """Runs a notebook and then one cell more, which sets `probed`; returns the notebook and that as JSON has it.

    `settings`: name → text of the settings in its first cells that are filled in.
    """
    notebook = read(name)
    for setting, text in (settings or {}).items():
        for cell in code_cells(notebook):
            cell.source = cell.source.replace(f"{setting} = ''", f'{setting} = {text!r}')
    question = f'{probe}\nimport json\nprint(json.dumps(probed, default=float))'
    notebook.cells.append(nbformat.v4.new_code_cell(question))
    place = {'metadata': {'path': str(ROOT / 'notebooks')}}
    client = nbclient.NotebookClient(notebook, timeout=300, resources=place, coalesce_streams=True)
    client.execute(env=environment)  # raises where a cell does
    answer = notebook.cells.pop().outputs[-1].text
    return notebook, json.loads(answer)


# ------------------------------------------------------------------------------------------------------------
# What each notebook has to find
# ------------------------------------------------------------------------------------------------------------


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
    answer=rollout.turns[-1].text, want=question['answers'], finish=rollout.finish, calls=rollout.valid_calls,
    gap=gap, outside=outside, learnt=batch.mask.sum(), written=sum(t.policy_tokens for t in rollouts),
    least=batch.sampler_logp[batch.mask].min(), control=sorted(set(control)),
    trusted=added(trusted), foreign=added(foreign),
    observed=codec.decode(attacked.tokens[attacked.source == ENV]).count('Obey.'), attacks=attacked.valid_calls,
    forged=codec.decode(attacked.tokens[attacked.source == ENV]).count('</information><answer>'),
)"""


def check_rollouts(notebook, found, _):
    assert (found['finish'], found['calls']) == ('answer', 3)
    assert found['want'][0] in found['answer']
    assert found['gap'] < 1e-4 and found['least'] < -0.1
    assert found['outside'] == 0.0 and found['learnt'] == found['written']
    assert {'<answer>', '<|im_end|>', '<|im_start|>'} <= set(found['trusted'])
    assert found['foreign'] == []
    assert found['control'] == ['</information>', '<information>']
    # An observation may be cut before its end.
    assert 0 < found['observed'] <= found['attacks'] and not found['forged']
    pages = [text for cell in code_cells(notebook) for text in texts(cell) if '<span' in text]
    assert len(pages) == 2
    for color in ('#d9d9d9', '#b7e1b0', '#f6d0a8'):
        assert f'background:{color}' in pages[0]
    assert '&lt;search&gt;' in pages[0] and '<search>' not in pages[0] + pages[1]


SELFPLAY = """import jax
furthest = lambda a, b: max(float(abs(x - y).max()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))
probed = dict(
    phases=[step.phase.name for step in steps], played=len(log), versions=dict(engine.weights.newest),
    valid=[values['proposer/valid_rate'] for step, values in log if step.phase.name == 'proposer'],
    batch=config.proposer.batch,
    counts=[counts.tolist() for counts in solve_counts], solves=config.reward.solves,
    moved={name: furthest(learner.params, run.params) for name, learner in engine.learners.items()},
    questions=[[p.question for p in made] for made in (questions_before, questions_after)],
    scores=[list(values) for values in scores.values()],
)"""


def check_selfplay(notebook, found, _):
    assert found['phases'] == ['proposer', 'generate', 'solver'] and found['played'] == 3
    assert found['versions'] == {'proposer': 1, 'solver': 1}
    assert all(0 < moved < 0.1 for moved in found['moved'].values()), 'both learn'
    for counts, valid in zip(found['counts'], found['valid'], strict=True):
        assert len(counts) == found['solves'] + 1
        assert sum(counts) == round(valid * found['batch']) > 0
    before, after = found['questions']
    assert len(before) == len(after) == 10
    assert any(str(question).startswith('What is the ') for question in before)
    assert all(0 <= share <= 1 for scores in found['scores'] for share in scores)
    assert found['scores'][0][0] > 0
    shown = [text for cell in code_cells(notebook) for text in texts(cell)]
    assert any('mean of 1, 2, 3' in text for text in shown)


OWN = """probed = dict(
    files=len(files),
    rewards=[m.get(f'{m["phase"]}/reward_mean') for m in metrics if m['phase'] in ('proposer', 'solver')],
    invented=[t['info']['question'] for t in invented], last=last['info']['question'], same=same,
    titles=[path.read_text().split()[0] for path in files],
)"""


def check_own(notebook, found, environment):
    work = pathlib.Path(environment['ZEROPLAY_RUNS']) / 'notebook_own'
    manifest = json.loads((work / 'index' / 'manifest.json').read_text())
    assert manifest['corpus']['passages'] == found['files'] == len(found['titles'])
    assert len(found['rewards']) == 2 and all(reward > 0 for reward in found['rewards'])
    words = set(re.findall(r'\w+', ' '.join(found['invented'])))
    assert words & set(found['titles']), 'the proposer asks about these texts'
    assert found['same'] is True, 'transformers writes with these weights what our sampler wrote'
    summary = json.loads((work / 'run' / 'summary.json').read_text())
    assert summary['outside_questions'] == 0 and summary['questions'] == 12
    page = (work / 'run' / 'report.html').read_text()
    assert page.startswith('<!') and found['last'] in page


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


OWN_TEXTS = """summary = json.loads((WORK / 'run' / 'summary.json').read_text())
asked = [json.loads(line) for line in questions.read_text().splitlines()]
probed = dict(
    policy=json.loads((WORK / 'run' / 'run.json').read_text())['config']['policy']['path'], asked=asked,
    invented=[t['info']['question'] for t in invented], same=same, questions=summary['questions'],
)"""


@pytest.mark.long
@pytest.mark.fault('user-2', 'notebook 04 with a folder of English texts and no questions')
def test_a_corpus_of_the_users_own_trains_the_policy_that_reads_it(environment):
    settings = {'TEXTS': 'zeroplay_jax/mini/texts'}
    _, found = play('04_bring_your_own', environment, OWN_TEXTS, settings)
    assert found['policy'].endswith('zeroplay_jax/mini/english/base')
    assert found['questions'] == 12 and found['same'] is True and found['invented']
    assert len(found['asked']) >= 20
    assert all('____' in asked['question'] for asked in found['asked'])


# ------------------------------------------------------------------------------------------------------------
# What is committed
# ------------------------------------------------------------------------------------------------------------


def test_all_notebooks_are_tested_and_listed():
    assert sorted(path.stem for path in (ROOT / 'notebooks').glob('*.ipynb')) == list(NAMES)
    page = (ROOT / 'notebooks' / 'README.md').read_text()
    assert all(f'({name}.ipynb)' in page for name in NAMES)


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


# ------------------------------------------------------------------------------------------------------------
# The first cell
# ------------------------------------------------------------------------------------------------------------


def test_the_first_cell_is_the_same_install_cell_everywhere():
    first = {read(name).cells[0].source for name in NAMES}
    assert len(first) == 1 and first.pop().startswith('# @title Install\n')


def install(folder, repository=''):
    source = read(NAMES[0]).cells[0].source
    source = source.replace("REPOSITORY = ''", f'REPOSITORY = {repository!r}')
    return run_python('-c', f'{source}\nprint(os.getcwd())', cwd=folder, timeout=60)


def test_without_a_checkout_or_an_address_one_line_says_what_to_do(tmp_path):
    result = install(tmp_path)
    assert result.returncode == 1 and 'fill in REPOSITORY' in result.stderr
    assert len(result.stderr.splitlines()) == 1
    result = install(tmp_path, str(tmp_path / 'nowhere'))
    assert result.returncode == 1 and 'could not be cloned' in result.stderr.splitlines()[-1]


@pytest.mark.fault('user-10', 'pins for other versions of Python, and all packages there')
def test_an_address_is_cloned_once_and_nothing_is_installed_again(tmp_path):
    source, place = tmp_path / 'source', tmp_path / 'place'
    (source / 'zeroplay_jax').mkdir(parents=True)
    place.mkdir()
    (source / 'zeroplay_jax' / '__init__.py').touch()
    # The second pin is for a Python that nobody has.
    pins = f'nbformat=={nbformat.__version__}\nnbformat==0.1; python_version < "3"\n'
    (source / 'requirements.txt').write_text(f'# comment\n{pins}')
    git = ['git', '-c', 'user.name=a', '-c', 'user.email=a@b', '-C', str(source)]
    for words in (['init', '--quiet'], ['add', '.'], ['commit', '--quiet', '-m', 'one']):
        subprocess.run([*git, *words], check=True)
    for address in (f'file://{source}', ''):
        result = install(place, address)
        assert result.stdout.splitlines() == ['ready', str(place / 'zeroplay')], result.stderr
