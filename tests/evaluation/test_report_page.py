"""The page, read and driven in a headless Chromium."""

import json
import pathlib

import page_queries
import sample_run
from page_queries import DETAIL
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
