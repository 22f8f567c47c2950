"""The page, read and driven in a headless Chromium."""

import json
import pathlib

import page_queries
import pytest
import sample_run
from page_queries import BLOCKS, COUNT, DETAIL, LEGENDS, OPEN_GROUPS
from refused_calls import check_table


def test_nothing_is_loaded_and_nothing_fails(page, both, browser):
    for url in (page, both):
        browser.open(url)
        assert browser.js('performance.getEntriesByType("resource").length') == 0
        # A file that is missing is no such entry.
        assert browser.js('document.querySelectorAll("[src], link, iframe, object").length') == 0
        # The config is drawn last.
        assert browser.js('document.querySelector("#config-body").children.length') > 0


def test_the_page_shows_what_the_table_says(page, both, browser, tmp_path):
    """Headline, charts, legends, constants, filters, captions, and two runs side by side."""

    opened = []

    def js(url, expression):
        # The expressions only read.
        if opened[-1:] != [url]:
            browser.open(url)
            opened.append(url)
        return json.dumps(browser.js(expression), ensure_ascii=False)

    names = vars(page_queries) | {'js': js, 'page': page, 'both': both}
    check_table(pathlib.Path(__file__).parent / 'page.txt', names, tmp_path)


def test_a_run_that_has_just_begun_has_no_empty_boxes(tmp_path, browser, open_run):
    folder = sample_run.write_run(tmp_path / 'begun')
    for name in ('summary.json', 'trajectories.jsonl'):
        (folder / name).unlink()
    open_run(folder)
    assert browser.js('document.querySelector(".reader").offsetHeight') < 100
    assert browser.js('document.querySelector("#filters").offsetHeight') == 0
    shown = browser.js('document.querySelector("#outcome").innerText')
    assert 'not been written yet' in shown and '○' not in shown


def test_what_was_demonstrated_is_marked(tmp_path, browser, open_run):
    folder = sample_run.write_run(tmp_path / 'beyond', count=4)
    marked = '[...document.querySelectorAll("tr.demonstrated")].map((x) => x.cells[0].innerText)'
    open_run(folder)
    assert browser.js(marked) == []
    summary = json.loads((folder / 'summary.json').read_text())
    (folder / 'summary.json').write_text(json.dumps(summary | {'demonstrated_hops': 2}))
    open_run(folder)
    assert browser.js(marked) == ['1\ndemonstrated', '2\ndemonstrated']
    learnt = browser.js('document.querySelector(".headline").innerText')
    assert 'Shown to the policy before this run: up to 2 hops.' in learnt
    # The first hop count beyond them leads, not the mean with them.
    assert 'held-out questions of 3 hops, the fewest that the policy was not shown before' in learnt


def test_turns_show_their_rewards_and_advantages(tmp_path, browser, open_run):
    folder = sample_run.write_run(tmp_path / 'turns', count=4)
    record = sample_run.trajectory(2) | {'turn_rewards': [0.25, None], 'advantage': [-0.5, 0.0]}
    sample_run.write_lines(folder / 'trajectories.jsonl', [record])
    open_run(folder)
    blocks = '[...document.querySelectorAll(".transcript .block")].map((x) => x.innerText)'
    turns = [text.split('\n') for text in browser.js(blocks) if text.lower().startswith('turn ')]
    assert [words[-1] for words in turns] == ['reward 0.25, advantage -0.5', 'advantage 0']
    assert 'one per turn' in browser.js(DETAIL)


def test_unusual_calls_are_shown(tmp_path, browser, open_run):
    calls = [
        {'tool': 'calculator', 'arguments': None, 'error': 'not_parsed', 'text': 'failed'},
        {'tool': 'open', 'arguments': {'ids': [1, 2]}, 'error': None, 'documents': []},
    ]
    segments = [{'source': 'policy', 'text': 'first'}, {'source': 'policy', 'text': 'second'}]
    row = sample_run.trajectory(1) | {'turns': calls, 'segments': segments, 'info': None}
    sample_run.write_lines(tmp_path / 'trajectories.jsonl', [row])
    open_run(tmp_path)
    texts = browser.js(
        '[...document.querySelectorAll(".block.call .text")].map((x) => x.innerText)'
    )
    assert texts == ['calculator()error: not_parsed', 'open(ids: [1,2])']
    assert [source for source, _ in browser.js(BLOCKS)] == ['policy', 'call', 'policy', 'call']


def test_a_question_stands_beside_itself_before_and_after(tmp_path, browser, open_run):
    folder = sample_run.write_run(tmp_path / 'pairs', count=4)
    rows = []
    for step, rewards in ((0, (0.0, 1.0, 1.0)), (41, (1.0, 0.0, 1.0))):
        for i, reward in enumerate(rewards):
            row = sample_run.trajectory(1) | {'phase': 'evaluation', 'step': step, 'role': 'solver'}
            row['info'] = row['info'] | {
                'question': f'question {i}?',
                'answer_given': f'from {step}',
            }
            # Numbers of groups of an evaluation are hop counts.
            rows.append(row | {'reward': reward, 'group': 3})
    sample_run.write_lines(folder / 'trajectories.jsonl', rows)
    open_run(folder)
    counts = '3 of 80 held-out questions are in the log: 1 better, 1 worse'
    assert browser.js('$("pair-count").textContent') == f'Rollouts of {counts}'
    groups = '[...document.querySelectorAll("#pair optgroup")].map((x) => x.label)'
    assert browser.js(groups) == ['Better (1)', 'Worse (1)', 'Equal, right (1)']
    verdicts = '[...document.querySelectorAll(".verdict")].map((x) => x.innerText)'
    assert browser.js(verdicts) == ['from 0 wrong', 'from 41 right']
    browser.js('$("pair-next").click()')
    assert browser.js(verdicts) == ['from 0 right', 'from 41 wrong']
    browser.js('document.querySelectorAll(".pair button")[1].click()')
    assert 'question 1?' in browser.js(DETAIL) and 'open=4' in browser.js('location.hash')
    siblings = '[...document.querySelectorAll(".siblings button")].map((x) => x.textContent)'
    assert browser.js(siblings) == ['step 0: 1', 'step 41: 0']


def test_passages_are_folded_until_a_key_or_a_search_opens_them(page, browser):
    browser.open(page + '#open=1')
    assert browser.js('document.querySelector("#detail .passages").open') is False
    browser.key('x')
    assert browser.js('document.querySelector("#detail .passages").open') is True
    browser.open(page + '#text=page%20122:')
    assert browser.js('document.querySelector("#detail .passages").open') is True


@pytest.mark.parametrize('width', [1400, 1000, 420])
def test_nothing_overflows(page, both, browser, width):
    browser.resize(width)
    for url in (page, both):
        browser.open(url)
        assert browser.js('document.documentElement.scrollWidth') <= width
        widths = browser.js(
            '[...document.querySelectorAll(".card")].map((x) => [x.scrollWidth, x.clientWidth])'
        )
        assert len(widths) > 10
        if width == 1400:  # narrower tables scroll inside their card
            assert all(content <= card for content, card in widths)
    browser.call('Emulation.clearDeviceMetricsOverride')


def test_values_that_are_not_finite_are_gaps_and_absent_ones_are_not(tmp_path, browser, open_run):
    rows = [{'step': i, 'iteration': 0, 'phase': 'solver', 'entropy': 1.0 + i} for i in range(6)]
    rows[2]['entropy'] = float('nan')
    del rows[4]['entropy']
    rows[4]['ratio'] = 1.0
    sample_run.write_lines(tmp_path / 'metrics.jsonl', rows)
    open_run(tmp_path)
    browser.js(OPEN_GROUPS)
    browser.until('plots.length > 0')
    entropy = 'plots.find((plot) => plot.data[0].length === 5)'
    assert browser.js(f'{entropy}.data') == [[0, 1, 2, 3, 5], [1, 2, None, 4, 6]]
    # Of the missing value the legend shows the one before.
    browser.js('document.querySelector(".plot").focus()')
    browser.key('Home')
    browser.key('ArrowRight')
    browser.key('ArrowRight')
    browser.until('document.querySelector(".chart .at").textContent.startsWith("step 2,")')
    assert browser.js(LEGENDS.format('#groups'))[0] == [['solver', '2']]


def test_arrow_keys_move_the_cursor(page, browser):
    browser.open(page)
    title = 'document.querySelector(".chart .at").textContent'
    assert browser.js(title) == 'step 41, iteration 3'  # the last step, without a cursor
    browser.js('document.querySelectorAll(".plot")[1].focus()')
    title = title.replace('querySelector(".chart .at")', 'querySelectorAll(".chart .at")[1]')
    browser.key('Home')
    browser.until(f'{title} === "step 1, iteration 1"')
    assert browser.js(LEGENDS.format('#charts'))[1] == [['mean reward', '0.02'], ['format', '0.01']]
    browser.key('ArrowRight')
    browser.until(f'{title} === "step 5, iteration 1"')
    assert browser.js(LEGENDS.format('#charts'))[1] == [['mean reward', '0.1'], ['format', '0.05']]
    browser.js('document.activeElement.blur()')
    browser.until(f'{title} === "step 37, iteration 2"')


def test_the_pointer_shows_values_and_the_legend_hides_series(page, browser):
    browser.open(page)
    over = 'document.querySelectorAll(".u-over")[1].getBoundingClientRect()'
    x, y = browser.js(f'(({{ x, y }}) => [x + 12, y + 20])({over})')
    browser.call('Input.dispatchMouseEvent', type='mouseMoved', x=x, y=y)
    browser.until(
        'document.querySelectorAll(".chart .at")[1].textContent === "step 1, iteration 1"'
    )
    browser.js('document.querySelectorAll("#charts .u-legend")[1].rows[1].cells[0].click()')
    assert browser.js('plots[1].series.map((series) => series.show)') == [True, False, True]


def test_roles_are_lines_of_one_chart(tmp_path, browser, open_run):
    rows = []
    for i in range(3):
        rows.append({'step': 2 * i, 'iteration': 0, 'phase': 'selfplay', 'loss': 0.1})
        rows[-1] |= {f'{role}/turns': i + extra for role, extra in (('asks', 1), ('answers', 2))}
        rows.append({'step': 2 * i + 1, 'iteration': 0, 'phase': 'solver', 'answers/turns': 5 + i})
        rows[-1] |= {f'answers/score/hop{hops}': i / 10 / hops for hops in (1, 2)}
    sample_run.write_lines(tmp_path / 'metrics.jsonl', rows)
    open_run(tmp_path)
    browser.js(OPEN_GROUPS)
    browser.until('plots.length === 2')
    turns = [['asks (selfplay)', '3'], ['answers (selfplay)', '4'], ['answers (solver)', '7']]
    assert sorted(browser.js(LEGENDS.format('#groups'))[0]) == sorted(turns)
    assert browser.js(LEGENDS.format('#question-charts')) == [[['1-hop', '0.2'], ['2-hop', '0.1']]]


# Contrast ratios (WCAG) of all texts with their backgrounds: [ratio, class and text], the smallest first.
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
  const ratios = [];
  for (const node of document.querySelectorAll('body *')) {
    const text = [...node.childNodes].filter((x) => x.nodeType === 3).map((x) => x.data.trim()).join('');
    if (!text || !node.checkVisibility() || node.closest('script, option')) continue;
    const layers = [];
    for (let under = node; under; under = under.parentElement)
      layers.unshift(getComputedStyle(under).backgroundColor);
    const style = getComputedStyle(node);
    const [below, above] = [painted(layers), painted([node.closest('svg') ? style.fill : style.color])];
    const ratio = (Math.max(below, above)) / Math.min(below, above);
    ratios.push([ratio, `${node.getAttribute('class')}: ${text.slice(0, 40)}`]);
  }
  return ratios.sort(([a], [b]) => a - b);
})()"""
SCHEME = 'getComputedStyle(document.querySelector(".card")).backgroundColor'


@pytest.mark.parametrize('theme', ['light', 'dark'])
def test_all_text_is_readable_in_both_themes(page, both, browser, theme):
    browser.call(
        'Emulation.setEmulatedMedia', features=[{'name': 'prefers-color-scheme', 'value': theme}]
    )
    card_colours = {'light': 'rgb(255, 255, 255)', 'dark': 'rgb(26, 29, 34)'}
    other_theme = {'light': 'dark', 'dark': 'light'}[theme]
    for url, label in ((page, 'mean reward'), (both, 'two')):
        browser.open(url)
        browser.js(OPEN_GROUPS)
        for current in (theme, other_theme):  # the system's theme, then the button's
            assert browser.js(SCHEME) == card_colours[current]
            for index, phase in enumerate(('proposer', 'generate', 'solver', 'evaluation')):
                browser.js(f'location.hash = "open={index}"')
                browser.until(
                    f'document.querySelector("[aria-selected=true] .phase")?.textContent === "{phase}"'
                )
                ratios = browser.js(CONTRAST)
                texts = [text for _, text in ratios]
                for start in (f'phase: {phase}', 'inner: look', f'u-label: {label}', 'muted: '):
                    assert any(text.startswith(start) for text in texts), start
                unreadable = [text for ratio, text in ratios if ratio < 4.5]
                assert not unreadable, current
                # Record 2 has a tool call that failed.
                assert (index == 2) == any(text.startswith('error: ') for text in texts)
            browser.js('document.getElementById("theme").click()')
    browser.call('Emulation.setEmulatedMedia', features=[])


def test_text_of_documents_and_models_is_never_run(run, page, browser):
    browser.open(page + '#open=1')
    title = browser.js('document.title')
    assert (
        title.startswith('drzero · 20')
        and f' – {run.name} – ' in title
        and title.endswith(' – run report')
    )
    assert browser.js('document.querySelectorAll("img").length') == 0
    assert browser.js('document.scripts.length') == 2
    assert sample_run.ATTACK in browser.js('document.querySelector(".block.env .text").textContent')
    # Even if text were inserted as a script, the content security policy would refuse it.
    browser.js(
        '{ const script = document.createElement("script"); script.textContent = "document.title = 1";'
        ' document.body.append(script) }'
    )
    assert browser.js('document.title') != '1'


def test_the_keyboard_is_sufficient(page, browser):
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


# Milliseconds from a change of a filter to the new layout, without the delay after the last key.
FILTER = """(() => {{
  filters.elements.{}.value = '{}';
  const start = performance.now();
  filter();
  list.getBoundingClientRect();
  return performance.now() - start;
}})()"""


def test_twenty_thousand_trajectories(tmp_path, browser, open_run):
    sample_run.write_run(tmp_path / 'long', count=20_000)
    open_run(tmp_path / 'long')
    assert browser.js(COUNT) == '20,000 of 20,000 trajectories'
    # Only visible rows are in the document.
    assert browser.js('document.querySelectorAll("#rows .row").length') < 80
    browser.js('document.getElementById("list").scrollTop = 1e9')
    browser.until('document.getElementById("row-19999") && !document.getElementById("row-0")')
    # The first search is the slowest: it converts all texts to lower case.
    for field, value, passed in (('text', 'page 19998:', '1'), ('role', 'solver', '10,000')):
        assert browser.js(FILTER.format(field, value)) < 500
        assert browser.js(COUNT) == f'{passed} of 20,000 trajectories'
        browser.js('filters.reset()')
        browser.until(f'{COUNT} === "20,000 of 20,000 trajectories"')
    browser.key('/')
    for letter in 'page 19998:':
        browser.key(letter)
    browser.until(f'{COUNT} === "1 of 20,000 trajectories"')
