"""The page, read and driven in a headless Chromium."""

import json
import os
import select
import shutil
import subprocess

import pytest
import sample_run

from zeroplay_jax.evaluation import report

CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser')
FLAGS = (
    '--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync '
    '--disable-component-update --remote-debugging-pipe --window-size=1300,1000'
).split()
NUL = b'\0'


class Browser:
    """A page in headless Chromium, driven over its debugging pipe (JSON messages, each ends with a zero)."""

    def __init__(self, out, into):
        self.out, self.into, self.buffer, self.count, self.session = out, into, b'', 0, {}
        target = self.call('Target.createTarget', url='about:blank')['targetId']
        self.session = {
            'sessionId': self.call('Target.attachToTarget', targetId=target, flatten=True)[
                'sessionId'
            ]
        }

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
            ready, _, _ = select.select(
                [self.into], [], [], 60
            )  # only so that a stuck browser cannot hang the suite
            data = os.read(self.into, 65536) if ready else b''
            assert data, 'Chromium ended or gives no answer'
            self.buffer += data
        message, self.buffer = self.buffer.split(NUL, 1)
        return json.loads(message)

    def js(self, expression):
        """The value of a JavaScript expression, promises awaited."""
        answer = self.call(
            'Runtime.evaluate', expression=expression, awaitPromise=True, returnByValue=True
        )
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


@pytest.fixture
def both(run, other, browser, tmp_path):
    return report.write_report(run, other, out=tmp_path / 'both.html').as_uri()


COUNT = 'document.getElementById("count").textContent'
DETAIL = 'document.getElementById("detail").innerText'
TITLES = '[...document.querySelectorAll("{} .chart h3")].map((x) => x.textContent)'
LEGENDS = '[...document.querySelectorAll("{} .legend")].map((x) => [...x.children].map((one) => one.textContent))'


def test_nothing_is_loaded_and_nothing_fails(page, both, browser):
    for url in (page, both):
        browser.open(url)
        assert browser.js('performance.getEntriesByType("resource").length') == 0
        assert browser.js(
            'Boolean(document.querySelector("#config-body").children.length)'
        )  # drawn last


def test_headline_and_table(page, browser):
    browser.open(page)
    assert '0.25' in browser.js('document.querySelector(".headline").innerText')
    assert '0.75' in browser.js('document.querySelector(".headline").innerText')
    assert (
        browser.js('document.querySelectorAll("#outcome tbody tr").length') == 5
    )  # four hop counts and the mean


@pytest.mark.parametrize('width', [1400, 1000, 420])
def test_no_card_runs_over(page, both, browser, width):
    browser.call(
        'Emulation.setDeviceMetricsOverride',
        width=width,
        height=900,
        deviceScaleFactor=1,
        mobile=False,
    )
    for url in (page, both):
        browser.open(url)
        assert browser.js('document.documentElement.scrollWidth') <= width
        cards = browser.js(
            '[...document.querySelectorAll(".card")].map((x) => [x.scrollWidth, x.clientWidth])'
        )
        assert len(cards) > 10
        if width == 1400:  # narrower tables scroll inside their card
            assert all(inside <= outside for inside, outside in cards)
    browser.call('Emulation.clearDeviceMetricsOverride')


def test_charts_are_few_and_the_others_folded(page, browser):
    browser.open(page)
    titles = browser.js(TITLES.format('#charts'))
    assert titles == [
        'Held-out exact match',
        'Reward · proposer',
        'Reward · solver',
        'Solves per question',
        'Valid proposals',
    ]
    assert browser.js('document.querySelectorAll("#groups details:not([open])").length') == 3
    heads = browser.js(
        '[...document.querySelectorAll("#groups summary")].map((x) => x.firstChild.textContent)'
    )
    assert heads == ['Proposals and the question pool', 'Learning', 'Other']
    assert browser.js('document.querySelectorAll("#groups .chart svg").length') == 0
    browser.js('document.querySelectorAll("#groups details").forEach((x) => { x.open = true })')
    browser.until('document.querySelectorAll("#groups .chart svg").length === 5')
    assert browser.js(TITLES.format('#groups')) == [
        'Rejected proposals',
        'Questions in the pool',
        'Loss',
        'Entropy',
        'New thing',
    ]


def test_what_never_changes_is_told_in_words(page, browser):
    browser.open(page)
    words = browser.js(
        '[...document.querySelectorAll("#groups .flat li")].map((x) => x.textContent)'
    )
    assert words == ['Clipped tokens 0', 'Importance ratio 1', 'New thing: next 2']
    assert 'ratio is clipped' in browser.js('document.querySelector("#groups .flat li").title')


def test_equal_lines_are_one_line_with_both_names(page, browser):
    browser.open(page)
    legends = browser.js(LEGENDS.format('#charts'))
    assert [text.rsplit(' ', 1)[0] for text in legends[1]] == ['mean reward', 'form']
    assert [text.rsplit(' ', 1)[0] for text in legends[2]] == ['mean reward = exact match']
    assert (
        browser.js(
            'document.querySelectorAll("#charts .chart")[2].querySelectorAll(".curve").length'
        )
        == 3
    )


def test_counters_that_were_not_written_are_zero(page, browser):
    browser.open(page)
    # ten proposer steps, of which every second has no 'solved 5 times'
    chart = 'document.querySelectorAll("#charts .chart")[3]'
    assert browser.js(f'{chart}.querySelectorAll(".bar").length') == 15
    assert browser.js(f'{chart}.querySelector(".legend").textContent') == 'solved 0× 0.5solved 5× 0'


def test_arrow_keys_walk_through_a_chart(page, browser):
    browser.open(page)
    browser.js('document.querySelector(".chart svg").focus()')
    browser.key('Home')
    assert browser.js('document.querySelector(".chart .at").textContent').startswith('step 0')
    browser.key('ArrowRight')
    assert browser.js('document.querySelector(".chart .at").textContent').startswith('step 41')


def test_questions_have_difficulty_searches_and_topics(page, browser):
    browser.open(page)
    titles = browser.js(TITLES.format('#question-charts'))
    assert titles[0] == 'Solves by hops' and 'Searches by hops · solver' in titles
    table = browser.js('document.querySelector(".topics").innerText')
    for part in ('Different documents', 'river', '100 %'):
        assert part in table
    assert 'which' not in table.lower()


def test_filters_of_the_address(page, browser):
    browser.open(page + '#role=solver&low=0.5')
    assert browser.js(COUNT) == '32 of 320 trajectories'
    for address, count in (
        ('', 320),
        ('phase=proposer&from=1&to=20&high=0.5', 32),
        ('drop=no_answer', 40),
        ('drop=(some)&role=solver', 1),
        ('text=NUMBER%20123', 1),  # only in that question; case does not matter
        ('text=page%20123:', 1),  # only in that passage
        ('drop=(none)&low=2', 0),
    ):
        browser.js(f'location.hash = {address!r}')
        browser.until(f'{COUNT} === "{count} of 320 trajectories"')
    assert 'Nothing passes' in browser.js('document.getElementById("rows").innerText')


def test_opened_trajectory_tells_who_wrote_what(page, browser):
    browser.open(page + '#open=130')
    text = browser.js(DETAIL)
    for part in ('Which river crosses Gumu number 130?', 'Lomi 130', 'exact match 1', 'step 11'):
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
    assert '<answer>trap</answer>' in browser.js(
        'document.querySelector(".block.env .text").textContent'
    )
    colours = browser.js(
        '["prompt", "policy", "env"].map((source) => document.querySelector(`.block.${source} .text`))'
        '.map((node) => getComputedStyle(node).backgroundColor)'
    )
    assert len(set(colours)) == 3


@pytest.mark.parametrize(
    ('index', 'caption'),
    [
        (2, 'written by the policy, trained on'),
        (1, 'written by the policy, not trained on in this step'),
        (3, 'written by the policy, not trained on in this step'),
        (10, 'written by the policy, not trained on: no finite reward'),
    ],
)
def test_the_caption_says_what_is_learned_from(page, browser, index, caption):
    browser.open(f'{page}#open={index}')
    assert browser.js('document.querySelector("#detail .legend .policy").textContent') == caption


def test_a_step_may_train_two_roles(tmp_path, browser):
    where = {'phase': 'selfplay', 'iteration': 0}
    losses = [where | {'step': i, 'proposer/loss': i, 'solver/loss': 2 * i} for i in range(3)]
    rollouts = [sample_run.trajectory(i) | where | {'step': 1} for i in (1, 2)]
    sample_run.write_lines(tmp_path / 'metrics.jsonl', losses)
    sample_run.write_lines(tmp_path / 'trajectories.jsonl', rollouts)
    browser.open(report.write_report(tmp_path).as_uri())
    assert browser.js(TITLES.format('#groups')) == ['Loss']
    assert [text.strip() for text in browser.js(LEGENDS.format('#groups'))[0]] == [
        'proposer',
        'solver',
    ]
    plays = '[...document.querySelectorAll(".row .phase")].map((x) => [x.textContent, getComputedStyle(x).color])'
    (one, orange), (two, blue) = browser.js(plays)
    assert [one, two] == ['proposer', 'solver'] and orange != blue
    assert 'written by the policy, trained on' in browser.js(DETAIL)


# Contrast (WCAG) of every text in the page with what lies under it: [ratio, class and text], the worst first.
CONTRAST = """(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
  const painted = (colours) => {
    for (const colour of colours) {
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
    }
    const linear = (x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    const [red, green, blue] = [...canvas.getImageData(0, 0, 1, 1).data].map((x) => linear(x / 255));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05;
  };
  const found = [];
  for (const node of document.querySelectorAll('body *')) {
    const text = [...node.childNodes].filter((x) => x.nodeType === 3).map((x) => x.data.trim()).join('');
    if (!text || !node.checkVisibility() || node.closest('script, option')) continue;
    const layers = [];
    for (let under = node; under; under = under.parentElement)
      layers.unshift(getComputedStyle(under).backgroundColor);
    const own = getComputedStyle(node);
    const [below, above] = [painted(layers), painted([node.closest('svg') ? own.fill : own.color])];
    const ratio = (Math.max(below, above)) / Math.min(below, above);
    found.push([ratio, `${node.getAttribute('class')}: ${text.slice(0, 40)}`]);
  }
  return found.sort(([a], [b]) => a - b);
})()"""
SCHEME = 'getComputedStyle(document.querySelector(".card")).backgroundColor'


@pytest.mark.parametrize('theme', ['light', 'dark'])
def test_all_text_can_be_read_in_both_themes(page, both, browser, theme):
    browser.call(
        'Emulation.setEmulatedMedia', features=[{'name': 'prefers-color-scheme', 'value': theme}]
    )
    cards = {'light': 'rgb(255, 255, 255)', 'dark': 'rgb(26, 29, 34)'}
    other = {'light': 'dark', 'dark': 'light'}[theme]
    for url, curve in ((page, 'mean reward'), (both, 'two')):
        browser.open(url)
        browser.js('document.querySelectorAll("details").forEach((x) => { x.open = true })')
        for shown in (theme, other):  # as the machine has it, and as the button says
            assert browser.js(SCHEME) == cards[shown]
            for index, phase in enumerate(('proposer', 'generate', 'solver', 'evaluation')):
                browser.js(f'location.hash = "open={index}"')
                browser.until(
                    f'document.querySelector("[aria-selected=true] .phase")?.textContent === "{phase}"'
                )
                found = browser.js(CONTRAST)
                texts = [text for _, text in found]
                for part in (
                    'phase: ' + phase,
                    'axis: 0',
                    'inner: look',
                    f'null: {curve}',
                    'muted: ',
                ):
                    assert any(text.startswith(part) for text in texts), part
                assert found[0][0] >= 4.5, (shown, [text for ratio, text in found if ratio < 4.5])
            browser.js('document.getElementById("theme").click()')
    browser.call('Emulation.setEmulatedMedia', features=[])


def test_text_of_pages_and_models_never_runs(run, page, browser):
    browser.open(page + '#open=1')
    assert browser.js('document.title') == f'{run.name} – run report'
    assert browser.js('document.querySelectorAll("img").length') == 0
    assert browser.js('document.scripts.length') == 2
    assert sample_run.ATTACK in browser.js('document.querySelector(".block.env .text").textContent')
    # Were a hole in the escaping ever opened, the policy of the page still refuses foreign scripts.
    browser.js(
        '{ const script = document.createElement("script"); script.textContent = "document.title = 1";'
        ' document.body.append(script) }'
    )
    assert browser.js('document.title') != '1'


def test_keyboard_alone_is_enough(page, browser):
    browser.open(page)
    assert browser.js('scrollY') == 0
    browser.key('t')
    assert browser.js('document.activeElement.id') == 'list' and browser.js('scrollY') > 0
    browser.key('ArrowDown')
    browser.key('ArrowDown')
    browser.until('location.hash.includes("open=2")')
    browser.key('End')
    assert 'number 319' in browser.js(DETAIL)
    assert browser.js('document.querySelector("[aria-selected=true]").id') == 'row-319'
    browser.key('k')
    assert 'number 318' in browser.js(DETAIL)
    browser.key('/')
    for letter in 'number 17?':
        browser.key(letter)
    browser.until(f'{COUNT} === "1 of 320 trajectories"')
    assert 'text=number+17' in browser.js('location.hash')


def test_two_runs_are_compared(both, browser):
    browser.open(both)
    assert browser.js('document.title') == 'one, two – run report'
    rows = browser.js(
        '[...document.querySelectorAll("#outcome tbody tr")].map((row) => row.innerText)'
    )
    assert len(rows) == 10  # the mean and four hop counts, each of two runs
    assert '0.750' in rows[0] and 'first' in rows[0]
    assert '0.800' in rows[1] and '+0.050\n[' in rows[1]
    titles = browser.js(TITLES.format('#charts'))
    assert 'Reward · mean reward · solver' in titles and 'Solves per question · two' in titles
    legends = dict(zip(titles, browser.js(LEGENDS.format('#charts'))))
    assert [text.split(' ')[0] for text in legends['Reward · mean reward · solver']] == [
        'one',
        'two',
    ]
    config = browser.js('document.querySelector("#config-body > .config").innerText')
    assert 'solver.learning_rate' in config and '0.002' in config and 'clip_low' not in config
    assert browser.js('document.querySelectorAll(".topics").length') == 2
    assert browser.js(COUNT) == '360 of 360 trajectories'
    browser.open(both + '#run=two&role=solver')
    assert browser.js(COUNT) == '20 of 360 trajectories'
    assert browser.js(DETAIL).startswith('two')


# Milliseconds from a filter to the list laid out anew; the pause after the last key (90 ms) is not in it.
FILTER = """(() => {{
  filters.elements.{}.value = '{}';
  const start = performance.now();
  filter();
  list.getBoundingClientRect();
  return performance.now() - start;
}})()"""


def test_twenty_thousand_trajectories(tmp_path, browser):
    sample_run.write_run(tmp_path / 'long', count=20_000)
    browser.open(report.write_report(tmp_path / 'long').as_uri())
    assert browser.js(COUNT) == '20,000 of 20,000 trajectories'
    assert (
        browser.js('document.querySelectorAll("#rows .row").length') < 80
    )  # only what is in view is drawn
    browser.js('document.getElementById("list").scrollTop = 1e9')
    browser.until('document.getElementById("row-19999") && !document.getElementById("row-0")')
    # The first search is the slowest: it makes all texts lower case.
    for field, value, passed in (('text', 'page 19998:', '1'), ('role', 'solver', '10,000')):
        assert (
            browser.js(FILTER.format(field, value)) < 500
        )  # measured on two busy cores: 37 and 14
        assert browser.js(COUNT) == f'{passed} of 20,000 trajectories'
        browser.js('filters.reset()')
        browser.until(f'{COUNT} === "20,000 of 20,000 trajectories"')
    browser.key('/')
    for letter in 'page 19998:':
        browser.key(letter)
    browser.until(f'{COUNT} === "1 of 20,000 trajectories"')


def test_a_run_that_was_killed_still_has_a_page(tmp_path, browser):
    sample_run.write_run(tmp_path, count=3)
    (tmp_path / 'summary.json').unlink()
    with (tmp_path / 'trajectories.jsonl').open('a') as file:
        file.write('{"step": 4, "phase": "sol')
    browser.open(report.write_report(tmp_path).as_uri())
    assert 'line 4) is torn' in browser.js('document.getElementById("notes").innerText')
    assert browser.js(COUNT) == '3 of 3 trajectories'
