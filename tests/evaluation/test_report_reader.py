"""The reader of trajectories in the page, driven in a headless Chromium."""

import sample_run
from page_queries import BLOCKS, DETAIL, LEGENDS, OPEN_GROUPS, TITLES


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
