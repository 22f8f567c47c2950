"""Writes a made-up workdir, small but with everything the report reads; its texts try to inject HTML into the page."""

import json

import numpy as np

from zeroplay_jax.evaluation import statistics

ATTACK = '<script>document.title="owned"</script></script><!--<img src=x onerror="document.title=\'owned\'">'
PHASES = ('proposer', 'generate', 'solver', 'evaluation')
HOPS = (1, 2, 3, 4)

# 0/1 per question of each hop count
BEFORE = [1, 0, 0, 0] * 5
AFTER = [1, 1, 1, 0] * 5
BETTER = [1, 1, 1, 1, 0] * 4


def trajectory(i):
    """Returns record i of trajectories.jsonl; every third record is of an old log, without `turns`."""
    phase = PHASES[i % 4]
    role = 'solver' if phase in ('solver', 'evaluation') else 'proposer'
    correct = 1.0 if i % 5 == 0 else 0.0
    info = {
        'question': f'Which river crosses Gumu number {i}? {ATTACK}',
        'answers': ['Lomi'],
        'document': f'Gumu {i % 7}',
        'hops': 1 + i % 3,
    }
    if role == 'solver':
        info['answer_given'] = f'Lomi {i}'
    elif i % 8 == 0:
        info['rejected'] = 'no_answer'
    if phase == 'proposer':
        info['solved'] = i % 6
    record = {
        'step': 1 + i % 40,
        'iteration': 0,
        'phase': phase,
        'role': role,
        'is_proposal': role == 'proposer',
        'group': 0,
        'reward': correct,
        'parts': {'exact_match' if role == 'solver' else 'format': correct},
        'advantage': 0.5,
        'drop': 'no_finite_reward' if i == 10 else None,
        'finish': 'answer',
        'info': info,
        'segments': segments(i),
    }
    if i % 3:
        record['turns'] = turns(i)
    return record


def segments(i):
    document = f'Page {i}: Gumu lies in Lomi. {ATTACK} <answer>trap</answer>'
    prompt = f'Answer in <answer>…</answer>. {ATTACK} ' + 'Be brief. ' * 40
    return [
        {'source': 'prompt', 'text': prompt},
        {'source': 'policy', 'text': f'<think>look {i} up</think>\n<search>Gumu</search>'},
        {'source': 'env', 'text': f'<information>{document}</information>'},
        {'source': 'policy', 'text': f'so it is <answer>Lomi {i}</answer> {ATTACK}'},
    ]


def turns(i):
    """Returns one search that fails in every fifth record, and a turn without a call."""
    document = {'id': str(i), 'title': f'Gumu {i} {ATTACK}', 'text': 'a long text', 'score': 0.25}
    search = {
        'tool': 'search',
        'arguments': {'query': f'Gumu {i} {ATTACK}', 'top_k': 3},
        'error': None,
        'documents': [[document]],
        'text': 'a long text',
    }
    if i % 5 == 2:
        search |= {'error': 'timeout', 'documents': []}
    return [search, None]


def metrics(bonus):
    """Yields the rows of metrics.jsonl: 42 steps, of which the first and the last are evaluations."""
    phases = ['evaluation', *['proposer', 'generate', 'solver', 'solver'] * 10, 'evaluation']
    for i, phase in enumerate(phases):
        row = {'step': i, 'iteration': i // 20, 'phase': phase}
        if phase == 'evaluation':
            row |= {'em/hop1': 0.5, 'em/hop2': 0.25 + bonus, 'em/mean': 0.3 + bonus}
        if phase == 'generate':
            row |= {'valid_rate': 0.9, 'pool_size': i}
        if phase == 'proposer':
            row |= {'reward_mean': i / 50, 'reward/format': i / 100, 'loss': float('nan')}
            # Counters are only written if something was counted.
            row |= {'k_histogram/0': 0.5}
            if i % 8 == 1:
                row |= {'k_histogram/5': 0.5, 'rejected/no_answer': 0.25}
        if phase == 'solver':
            reward = i / 60 + bonus
            row |= {'reward_mean': reward, 'reward/exact_match': reward, 'loss': 0.1 * i}
            row |= {'ratio': 1.0, 'clip_share': 0.0, 'entropy': 0.5 / (i + 1)}
            row |= {'new_thing/first': i, 'new_thing/next': 2}
        yield row


def write_lines(path, rows):
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))


def write_run(folder, count=320, after=AFTER, rate=1e-3, bonus=0.0, questions='these'):
    """Writes a run with `count` trajectories into `folder`; returns the folder."""
    folder.mkdir(exist_ok=True)
    before_by_hop = {hop: np.array(BEFORE) for hop in HOPS}
    after_by_hop = {hop: np.array(after) for hop in HOPS}
    results = {
        'before': {hop: BEFORE for hop in HOPS},
        'after': {hop: after for hop in HOPS},
        'questions': questions,
    }
    summary = statistics.summarise(before_by_hop, after_by_hop) | {
        'seed': 7,
        'steps': 42,
        'policies': {'solver': {'steps': 16}, 'proposer': {'steps': 8}},
        'seconds': 61.0,
        'outside_questions': 0,
        'results': results,
    }
    config = {
        'recipe': 'drzero',
        'reward': {'solves': 5},
        'solver': {'learning_rate': rate, 'clip_low': 0.2},
    }
    (folder / 'summary.json').write_text(json.dumps(summary))
    (folder / 'run.json').write_text(json.dumps({'config': config}))
    write_lines(folder / 'metrics.jsonl', metrics(bonus))
    write_lines(folder / 'trajectories.jsonl', (trajectory(i) for i in range(count)))
    return folder
