"""The report page: what is written, and what a headless Chromium makes of it."""

import json
import os
import select
import shutil
import subprocess

import pytest

from zeroplay_jax.evaluation import report, statistics

CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser')
FLAGS = (
    '--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync '
    '--disable-component-update --remote-debugging-pipe --window-size=1300,1000'
).split()
ATTACK = '<script>document.title="owned"</script></script><!--<img src=x onerror="document.title=\'owned\'">'
NUL = b'\0'


def _trajectory(i):
    solver, page = bool(i % 2), f'Page {i}: Gumu lies in Lomi. {ATTACK} <answer>trap</answer>'
    return {
        'step': 1 + i,
        'iteration': i // 100,
        'phase': 'solver' if solver else 'proposer',
        'role': 'solver' if solver else 'proposer',
        'group': 0,
        'reward': 1.0 if i % 5 == 0 else 0.0,
        'parts': {'exact_match': 1.0 if i % 5 == 0 else 0.0},
        'advantage': 0.5,
        'drop': None if solver else 'no_answer',
        'finish': 'answer',
        'info': {
            'question': f'Where is Gumu number {i}? {ATTACK}',
            'answers': ['Lomi'],
            'document': {'title': 'Gumu'},
        },
        'segments': [
            {'source': 'prompt', 'text': f'Answer in <answer>…</answer>. {ATTACK} ' + 'Be brief. ' * 40},
            {'source': 'policy', 'text': f'<think>look {i} up</think>\n<search>Gumu</search>'},
            {'source': 'env', 'text': f'<information>{page}</information>'},
            {'source': 'policy', 'text': f'so it is <answer>Lomi {i}</answer> {ATTACK}'},
        ],
    }


def _write_run(folder, count=300):
    phases = ['evaluation'] + ['proposer', 'solver'] * 20 + ['evaluation']
    metrics = [{'step': i, 'iteration': i // 20, 'phase': phase} for i, phase in enumerate(phases)]
    for row in metrics:
        row |= {'em/hop1': 0.5, 'em/hop2': 0.25} if row['phase'] == 'evaluation' else {'reward_mean': float('nan')}
        row |= {} if row['phase'] == 'evaluation' else {'entropy': 0.5, 'k_histogram/0': 3, 'k_histogram/5': 1}
    flags = {'before': [1, 0, 0, 0], 'after': [1, 1, 1, 0]}
    sides = {side: {hop: values * 5 for hop in (1, 2, 3)} for side, values in flags.items()}
    summary = statistics.summarise(**sides) | {
        'seed': 7,
        'steps': 42,
        'seconds': 61.0,
        'outside_questions': 0,
    }
    trajectories = [_trajectory(i) for i in range(count)]
    (folder / 'summary.json').write_text(json.dumps(summary))
    for name, rows in (('metrics', metrics), ('trajectories', trajectories)):
        (folder / f'{name}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return folder


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    return _write_run(tmp_path_factory.mktemp('run'))


# ------------------------------------------------------------------------------- files


def test_data_cannot_close_its_script_element(run):
    page = report.write_report(run).read_text()
    assert page.count('</script>') == 2  # the data's own end and the program's
    assert '<img' not in page and 'NaN' not in page
    assert "default-src 'none'" in page and 'unsafe-inline' not in page
    assert not list(run.glob('.report*'))


def test_texts_are_kept_once_and_whole(tmp_path):
    rows = [_trajectory(0), _trajectory(0) | {'step': 2}]
    (tmp_path / 'trajectories.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    read = report.read_run(tmp_path)
    assert len(read['texts']) == 4
    for row in read['trajectories']:
        restored = [{'source': source, 'text': read['texts'][i]} for source, i in row['segments']]
        assert restored == rows[0]['segments']


def test_torn_and_missing_files_are_told_not_fatal(tmp_path):
    good = json.dumps({'step': 1, 'phase': 'solver', 'entropy': 1.0})
    (tmp_path / 'metrics.jsonl').write_text(f'{good}\n{{"step": 2, "pha')
    read = report.read_run(tmp_path)
    assert [row['step'] for row in read['metrics']] == [1] and read['summary'] == {}
    assert any('last line of metrics.jsonl (line 2)' in note for note in read['notes'])
    assert any('no summary.json' in note for note in read['notes'])
    assert any('no trajectories.jsonl' in note for note in read['notes'])
    (tmp_path / 'metrics.jsonl').write_text(f'{good}\nrubbish\n[1]\n{good}\n')
    assert any(
        '2 damaged lines of metrics.jsonl were left out (line 2, 3)' in x for x in report.read_run(tmp_path)['notes']
    )


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match='metrics.jsonl') as error:
        report.write_report(tmp_path)
    assert '\n' not in str(error.value) and not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_page(run, monkeypatch):
    before = report.write_report(run).read_bytes()

    def full_disk(*_):
        raise OSError('no space left')

    monkeypatch.setattr(report.os, 'replace', full_disk)
    with pytest.raises(OSError, match='no space'):
        report.write_report(run)
    assert (run / 'report.html').read_bytes() == before and not list(run.glob('.report*'))


# ----------------------------------------------------------------------------- browser


class Browser:
    """A page in headless Chromium, driven over its debugging pipe (JSON messages, each ends with a zero)."""

    def __init__(self, out, into):
        self.out, self.into, self.buffer, self.count, self.session = out, into, b'', 0, {}
        target = self.call('Target.createTarget', url='about:blank')['targetId']
        self.session = {'sessionId': self.call('Target.attachToTarget', targetId=target, flatten=True)['sessionId']}

    def call(self, method, **params):
        self.count += 1
        message = {'id': self.count, 'method': method, 'params': params} | self.session
        os.write(self.out, json.dumps(message).encode() + NUL)
        while (answer := self.receive()).get('id') != self.count:
            continue  # events of the page
        assert 'error' not in answer, answer
        return answer['result']

    def receive(self):
        while NUL not in self.buffer:
            ready, _, _ = select.select([self.into], [], [], 60)  # only so that a stuck browser cannot hang the suite
            data = os.read(self.into, 65536) if ready else b''
            assert data, 'Chromium ended or gives no answer'
            self.buffer += data
        message, self.buffer = self.buffer.split(NUL, 1)
        return json.loads(message)

    def js(self, expression):
        """The value of a JavaScript expression, promises awaited."""
        answer = self.call('Runtime.evaluate', expression=expression, awaitPromise=True, returnByValue=True)
        assert 'exceptionDetails' not in answer, answer
        return answer['result'].get('value')

    def until(self, condition):
        """Waits until the condition holds in the page (at most some 20 seconds)."""
        wait = 'await new Promise((done) => setTimeout(done, 25));'
        loop = f'for (let i = 0; i < 800; i++) {{ if ({condition}) return true; {wait} }}'
        assert self.js(f'(async () => {{ {loop} return false; }})()'), condition

    def open(self, url):
        self.call('Page.navigate', url='about:blank')
        self.call('Page.navigate', url=url)
        self.until('location.protocol === "file:" && document.readyState === "complete"')

    def key(self, key):
        text = {'text': key} if len(key) == 1 else {}
        self.call('Input.dispatchKeyEvent', type='keyDown', key=key, **text)
        self.call('Input.dispatchKeyEvent', type='keyUp', key=key)


@pytest.fixture(scope='module')
def browser(tmp_path_factory):
    if not CHROMIUM:
        pytest.skip('chromium is not installed')
    profile = tmp_path_factory.mktemp('profile')
    their_in, our_out = os.pipe()
    our_in, their_out = os.pipe()
    # Chromium reads commands from descriptor 3 and answers on 4.
    command = f'exec "$@" 3<&{their_in} 4>&{their_out}'
    process = subprocess.Popen(
        ['bash', '-c', command, 'bash', CHROMIUM, *FLAGS, f'--user-data-dir={profile}'],
        pass_fds=(their_in, their_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(their_in)
    os.close(their_out)
    yield Browser(our_out, our_in)
    process.terminate()
    process.wait(20)
    os.close(our_out)
    os.close(our_in)


@pytest.fixture
def page(run, browser):
    return report.write_report(run).as_uri()


COUNT = 'document.getElementById("count").textContent'
DETAIL = 'document.getElementById("detail").innerText'


def test_headline_table_and_charts(page, browser):
    browser.open(page)
    assert '0.25' in browser.js('document.querySelector(".headline").innerText')
    assert '0.75' in browser.js('document.querySelector(".headline").innerText')
    assert browser.js('document.querySelectorAll("#outcome tbody tr").length') == 4  # three hop counts and the mean
    titles = browser.js('[...document.querySelectorAll(".chart h3")].map((x) => x.textContent)')
    assert titles == [
        'Held-out exact match',
        'Solves per question · proposer',
        'Solves per question · solver',
        'Entropy',
    ]
    assert browser.js('document.querySelectorAll(".chart svg").length') == 4
    browser.js('document.querySelector(".chart svg").focus()')
    browser.key('Home')
    assert browser.js('document.querySelector(".chart .at").textContent').startswith('step 0')


def test_filters_of_the_address(page, browser):
    browser.open(page)
    assert browser.js(COUNT) == '300 of 300 trajectories'
    browser.open(page + '#role=solver&low=0.5')
    assert browser.js(COUNT) == '30 of 300 trajectories'
    browser.open(page + '#drop=no_answer&phase=proposer&iteration=1&high=0.5')
    assert browser.js(COUNT) == '40 of 300 trajectories'
    browser.open(page + '#text=NUMBER%20123')  # only in that question; case does not matter
    assert browser.js(COUNT) == '1 of 300 trajectories'
    assert browser.js('document.querySelectorAll("#rows .row").length') == 1
    browser.open(page + '#text=page%20123:')  # only in that passage
    assert 'number 123' in browser.js(DETAIL)
    browser.open(page + '#drop=(kept)&role=proposer')
    assert browser.js(COUNT) == '0 of 300 trajectories' and 'Nothing passes' in browser.js(
        'document.getElementById("rows").innerText'
    )


def test_opened_trajectory_tells_who_wrote_what(page, browser):
    browser.open(page + '#open=125')
    text = browser.js(DETAIL)
    for part in ('Where is Gumu number 125?', 'Lomi 125', 'exact match 1', 'step 126'):
        assert part in text
    blocks = browser.js(
        '[...document.querySelectorAll(".block")]'
        '.map((block) => [block.classList[1], block.querySelector(".label").textContent])'
    )
    assert blocks == [
        ['prompt', 'prompt'],
        ['policy', 'thought'],
        ['policy', 'search'],
        ['env', 'passages'],
        ['policy', ''],
        ['policy', 'answer'],
        ['policy', ''],
    ]
    assert '<answer>trap</answer>' in browser.js('document.querySelector(".block.env .text").textContent')
    colours = browser.js(
        '["prompt", "policy", "env"].map((source) => document.querySelector(`.block.${source} .text`))'
        '.map((node) => getComputedStyle(node).backgroundColor)'
    )
    assert len(set(colours)) == 3


def test_text_of_pages_and_models_never_runs(run, page, browser):
    browser.open(page + '#open=1')
    assert browser.js('document.title') == f'{run.name} – run report'
    assert browser.js('document.querySelectorAll("img").length') == 0
    assert browser.js('document.scripts.length') == 2
    assert ATTACK in browser.js('document.querySelector(".block.env .text").textContent')
    # Were a hole in the escaping ever opened, the policy of the page still refuses foreign scripts.
    browser.js(
        '{ const script = document.createElement("script"); script.textContent = "document.title = 1";'
        ' document.body.append(script) }'
    )
    assert browser.js('document.title') != '1'


def test_keyboard_alone_is_enough(page, browser):
    browser.open(page)
    browser.js('document.getElementById("list").focus()')
    browser.key('ArrowDown')
    browser.key('ArrowDown')
    browser.until('location.hash.includes("open=2")')
    browser.key('End')
    assert 'number 299' in browser.js(DETAIL)
    assert browser.js('document.querySelector("[aria-selected=true]").id') == 'row-299'
    browser.key('k')
    assert 'number 298' in browser.js(DETAIL)
    browser.key('/')
    for letter in 'number 17?':
        browser.key(letter)
    browser.until(f'{COUNT} === "1 of 300 trajectories"')
    assert 'text=number+17' in browser.js('location.hash')


def test_the_list_draws_only_what_is_in_view(page, browser):
    browser.open(page)
    assert browser.js('document.querySelectorAll("#rows .row").length') < 80
    browser.js('document.getElementById("list").scrollTop = 1e9')
    browser.until('document.getElementById("row-299") && !document.getElementById("row-0")')


def test_a_run_that_was_killed_still_has_a_page(tmp_path, browser):
    _write_run(tmp_path, count=3)
    (tmp_path / 'summary.json').unlink()
    with (tmp_path / 'trajectories.jsonl').open('a') as file:
        file.write('{"step": 4, "phase": "sol')
    browser.open(report.write_report(tmp_path).as_uri())
    assert 'line 4) is torn' in browser.js('document.getElementById("notes").innerText')
    assert browser.js(COUNT) == '3 of 3 trajectories'
