"""The reader of trajectories in the page, driven in a headless Chromium."""

import pytest
import sample_run
from page_queries import COUNT, DETAIL, LEGENDS, OPEN_GROUPS, TITLES


def test_filters_of_the_address(page, browser):
    browser.open(page + '#role=solver&low=0.5')
    assert browser.js(COUNT) == '32 of 320 trajectories'
    for address, count in (
        ('', 320),
        ('phase=proposer&from=1&to=20&high=0.5', 32),
        ('drop=no_answer', 40),
        ('drop=(some)&role=solver', 1),
        ('text=NUMBER%20123', 1),  # only in that question; case is ignored
        ('text=page%20122:', 1),  # only in that document
        ('drop=(none)&low=2', 0),
    ):
        browser.js(f'location.hash = {address!r}')
        browser.until(f'{COUNT} === "{count} of 320 trajectories"')
    assert 'No trajectory passes' in browser.js('document.getElementById("rows").innerText')


BLOCKS = """[...document.querySelectorAll(".block")]
  .map((block) => [block.classList[1], block.querySelector(".label").textContent])"""


def test_the_open_trajectory_shows_the_source_of_each_text(page, browser):
    browser.open(page + '#open=130')
    text = browser.js(DETAIL)
    for part in ('Which river crosses Gumu number 130?', 'Lomi 130', 'exact match 1', 'step 11'):
        assert part in text
    assert browser.js(BLOCKS) == [
        ['prompt', 'prompt'],
        ['policy', 'thinking'],
        ['policy', 'search'],
        ['call', 'call'],
        ['env', 'tool result'],
        ['policy', ''],
        ['policy', 'answer'],
        ['policy', ''],
    ]
    result = browser.js('document.querySelector(".block.env .text").textContent')
    assert '<answer>trap</answer>' in result
    colours = browser.js(
        '["prompt", "policy", "env"].map((source) => document.querySelector(`.block.${source} .text`))'
        '.map((node) => getComputedStyle(node).backgroundColor)'
    )
    assert len(set(colours)) == 3


def test_tool_calls_are_shown_with_arguments_and_errors(page, browser):
    call = 'document.querySelector(".block.call")?.innerText'
    browser.open(page + '#open=130')
    text = browser.js(call)
    assert 'search(query: "Gumu 130 <script>' in text and 'top_k: 3)' in text
    assert 'documents: Gumu 130 <script>' in text and '(0.25)' in text
    assert 'error' not in text.replace('onerror', '')
    browser.open(page + '#open=137')
    text = browser.js(call)
    assert 'search(query: "Gumu 137 ' in text and 'error: timeout' in text
    # A record of an old log has no turns.
    browser.open(page + '#open=129')
    assert browser.js(call) is None and 'Gumu number 129' in browser.js(DETAIL)
    assert ['env', 'tool result'] in browser.js(BLOCKS)


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


@pytest.mark.parametrize(
    ('index', 'caption'),
    [
        (2, 'sampled from the policy, trained on'),
        (1, 'sampled from the policy, no update in this step'),
        (3, 'sampled from the policy, no update in this step'),
        (10, 'sampled from the policy, not trained on: no finite reward'),
    ],
)
def test_the_caption_tells_whether_a_rollout_is_trained_on(page, browser, index, caption):
    browser.open(f'{page}#open={index}')
    assert browser.js('document.querySelector("#detail .legend .policy").textContent') == caption


def test_a_step_may_train_two_roles(tmp_path, browser, open_run):
    where = {'phase': 'selfplay', 'iteration': 0}
    losses = [where | {'step': i, 'proposer/loss': i, 'solver/loss': 2 * i} for i in range(3)]
    rollouts = [sample_run.trajectory(i) | where | {'step': 1} for i in (1, 2)]
    sample_run.write_lines(tmp_path / 'metrics.jsonl', losses)
    sample_run.write_lines(tmp_path / 'trajectories.jsonl', rollouts)
    open_run(tmp_path)
    assert browser.js(TITLES.format('#groups')) == ['Loss']
    browser.js(OPEN_GROUPS)
    browser.until('plots.length > 0')
    labels = [label for label, _ in browser.js(LEGENDS.format('#groups'))[0]]
    assert labels == ['proposer', 'solver']
    phases = browser.js(
        '[...document.querySelectorAll(".row .phase")]'
        '.map((x) => [x.textContent, getComputedStyle(x).color])'
    )
    (first, first_colour), (second, second_colour) = phases
    assert [first, second] == ['proposer', 'solver'] and first_colour != second_colour
    assert 'sampled from the policy, trained on' in browser.js(DETAIL)
