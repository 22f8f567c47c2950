"""A made-up workdir, small but with everything that the report reads; its texts attack the page."""

import json

from zeroplay_jax.evaluation import statistics

ATTACK = '<script>document.title="owned"</script></script><!--<img src=x onerror="document.title=\'owned\'">'


def trajectory(i):
    phase = ('proposer', 'generate', 'solver', 'evaluation')[i % 4]
    role = 'solver' if i % 4 > 1 else 'proposer'
    page = f'Page {i}: Gumu lies in Lomi. {ATTACK} <answer>trap</answer>'
    return {
        'step': 1 + i % 40,
        'iteration': 0,
        'phase': phase,
        'role': role,
        'group': 0,
        'reward': 1.0 if i % 5 == 0 else 0.0,
        'parts': {'exact_match' if role == 'solver' else 'format': 1.0 if i % 5 == 0 else 0.0},
        'advantage': 0.5,
        'drop': 'no_finite_reward' if i == 10 else None,
        'finish': 'answer',
        'info': {
            'question': f'Which river crosses Gumu number {i}? {ATTACK}',
            'answers': ['Lomi'],
            'document': f'Gumu {i % 7}',
            'hops': 1 + i % 3,
        }
        | (
            {'answer_given': f'Lomi {i}'}
            if role == 'solver'
            else {'rejected': 'no_answer'}
            if i % 8 == 0
            else {}
        )
        | ({'solved': i % 6} if phase == 'proposer' else {}),
        'segments': [
            {
                'source': 'prompt',
                'text': f'Answer in <answer>…</answer>. {ATTACK} ' + 'Be brief. ' * 40,
            },
            {'source': 'policy', 'text': f'<think>look {i} up</think>\n<search>Gumu</search>'},
            {'source': 'env', 'text': f'<information>{page}</information>'},
            {'source': 'policy', 'text': f'so it is <answer>Lomi {i}</answer> {ATTACK}'},
        ],
    }


def metrics(bonus):
    phases = ['evaluation', *['proposer', 'generate', 'solver', 'solver'] * 10, 'evaluation']
    for i, phase in enumerate(phases):
        row = {'step': i, 'iteration': i // 20, 'phase': phase}
        if phase == 'evaluation':
            row |= {'em/hop1': 0.5, 'em/hop2': 0.25 + bonus, 'em/mean': 0.3 + bonus}
        if phase == 'generate':
            row |= {'valid_rate': 0.9, 'pool_size': i}
        if phase == 'proposer':  # solve counts and rejections are only written when there are some
            row |= {
                'reward_mean': i / 50,
                'reward/format': i / 100,
                'loss': float('nan'),
                'k_histogram/0': 0.5,
            }
            row |= {'k_histogram/5': 0.5, 'rejected/no_answer': 0.25} if i % 8 == 1 else {}
        if phase == 'solver':
            row |= {
                'reward_mean': i / 60 + bonus,
                'reward/exact_match': i / 60 + bonus,
                'loss': 0.1 * i,
            }
            row |= {
                'ratio': 1.0,
                'clip_share': 0.0,
                'entropy': 0.5 / (i + 1),
                'new_thing/first': i,
                'new_thing/next': 2,
            }
        yield row


def write_lines(path, rows):
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))


BEFORE, AFTER, BETTER = (
    [1, 0, 0, 0] * 5,
    [1, 1, 1, 0] * 5,
    [1, 1, 1, 1, 0] * 4,
)  # of a hop count's questions


def write_run(folder, count=320, after=AFTER, rate=1e-3, bonus=0.0, questions='these'):
    folder.mkdir(exist_ok=True)
    sides = {
        side: {hop: flags for hop in (1, 2, 3, 4)}
        for side, flags in (('before', BEFORE), ('after', after))
    }
    summary = statistics.summarise(**sides) | {
        'seed': 7,
        'steps': 42,
        'seconds': 61.0,
        'outside_questions': 0,
        'results': sides | {'questions': questions},
    }
    config = {
        'recipe': 'drzero',
        'reward': {'solves': 5},
        'solver': {'learning_rate': rate, 'clip_low': 0.2},
    }
    (folder / 'summary.json').write_text(json.dumps(summary))
    (folder / 'config.json').write_text(json.dumps(config))
    write_lines(folder / 'metrics.jsonl', metrics(bonus))
    write_lines(folder / 'trajectories.jsonl', (trajectory(i) for i in range(count)))
    return folder
