"""The page, read and driven in a headless Chromium."""

import json
import pathlib

import page_queries
import sample_run
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


def test_the_page_says_over_what_its_intervals_are(tmp_path, browser, open_run):
    folder = sample_run.write_run(tmp_path / 'clustered', count=4)
    headline = 'document.querySelector(".headline").innerText'
    open_run(folder)
    assert 'over the choice of questions,' in browser.js(headline)
    summary = json.loads((folder / 'summary.json').read_text())
    (folder / 'summary.json').write_text(json.dumps(summary | {'documents': 20}))
    open_run(folder)
    text = browser.js(headline)
    assert 'about 20 documents' in text and 'over the choice of documents' in text


def test_a_run_that_has_begun_says_so_and_its_start_is_no_note(tmp_path, browser, open_run):
    folder = sample_run.write_run(tmp_path / 'begun', count=4)
    summary = json.loads((folder / 'summary.json').read_text())
    (folder / 'summary.json').write_text(json.dumps(summary | {'start': 'start: base'}))
    (folder / 'trajectories.jsonl').write_text('')
    open_run(folder)
    assert 'start: base' in browser.js('document.getElementById("facts").innerText')
    assert 'start' not in browser.js('document.getElementById("notes").innerText')
    topics = browser.js('document.getElementById("topics").innerText')
    assert 'No rollout has been logged yet.' in topics


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
