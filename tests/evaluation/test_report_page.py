"""The page, read and driven in a headless Chromium."""

import json
import pathlib

import page_queries
import sample_run
from refused_calls import check_table

from zeroplay_jax.evaluation import report_builder


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

    def page_of(**changes):
        """The report of a run with these changes of its summary, whose trajectories are not there yet."""
        folder = sample_run.write_run(tmp_path / '-'.join(['run', *changes]), count=4)
        (folder / 'trajectories.jsonl').write_text('')
        path = folder / 'summary.json'
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return report_builder.write_report(folder).as_uri()

    names = vars(page_queries) | {'js': js, 'page': page, 'both': both, 'page_of': page_of}
    check_table(pathlib.Path(__file__).parent / 'page.txt', names, tmp_path)


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
