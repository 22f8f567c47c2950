"""Computes the rewards of a run again from the texts of its rollouts: answers, form, and difficulty of questions.

Taken from the log are how many of the trial rollouts, which nothing trains, solved a question; what a judge gave; which
questions passed a recipe's gates; and SCOPE's factor for length, which counts tokens.
"""

import math
import re
import string
import unicodedata

# An answer with more articles and punctuation is the same.
_LEFT_OUT = re.compile(r'\b(a|an|the)\b')
_SEARCH_LEFT = re.compile(r'<search>[^<]*\S[^<]*</search>$')
_ELEMENT = re.compile(r'\s*<(\w+)>.*?</\1>\s*', re.DOTALL)


def largest_error(rows, config):
    """Returns the largest difference of the rewards of a step from those in its log.

    NaN where they are not known here: of other recipes, difficulties and measures of answers.

    Args:
      rows: all lines of the step in rows.jsonl.
      config: that of the run.
    """
    largest = 0.0
    for row in rows:
        kind = config['recipe'], row['role']
        difficulty = config['reward']['difficulty']
        is_known = config['reward']['answer'] in ('em', 'subem') and kind in _REWARDS
        if not is_known or difficulty != _DIFFICULTY.get(kind, difficulty):
            return math.nan
        if not row['drop']:
            reward = _REWARDS[kind](row, config, rows)
            largest = max(largest, abs(reward - row['reward']))
    return largest


def _turns(row):
    """Returns the texts of the turns of a rollout."""
    return [each['text'] for each in row['segments'] if each['source'] == 'policy']


def _element(row, tag):
    """Returns the text in the last <tag> of a rollout's last turn; None without."""
    texts = re.findall(f'<{tag}>(.*?)</{tag}>', _turns(row)[-1], re.DOTALL)
    return texts[-1].strip() if texts else None


def _ending(row, tag):
    """Returns the text in the <tag> with which a rollout ended; None without."""
    return _element(row, tag) if row['finish'] == 'answer' else None


def _plain(text):
    text = unicodedata.normalize('NFC', text or '').lower()
    bare = ''.join(character for character in text if character not in string.punctuation)
    # Articles alone are compared as they are written.
    return ' '.join(_LEFT_OUT.sub(' ', bare).split()) or text.strip()


def _answer_score(row, metric):
    answer = _plain(_ending(row, 'answer'))
    accepted = [_plain(each) for each in row['info']['answers']]
    if metric == 'subem':
        return float(bool(answer) and any(each in answer for each in accepted))
    return float(bool(answer) and answer in accepted)


def _solver(row, config, rows):
    score = _answer_score(row, config['reward']['answer'])
    if config['recipe'] == 'ssp' and config['ssp']['strict_format']:
        elements = [_ELEMENT.findall(turn) for turn in _turns(row)]
        left_over = ''.join(_ELEMENT.sub('', turn) for turn in _turns(row))
        score *= not left_over and all(tags and tags[-1] != 'think' for tags in elements)
    return score


def _hidden_answer(row, config, rows):
    """SSP: the share of the solver's rollouts on the question that are wrong."""
    if not row['info']['valid']:
        return config['ssp']['invalid_reward']
    attempts = [each for each in rows if each['role'] == 'solver' and not each['drop']]
    scores = [
        _solver(each, config, rows) for each in attempts if each['parent'] == row['rollout'][:2]
    ]
    return 1 - sum(scores) / len(scores)


def _searches(row):
    """Returns the successful searches of a rollout, and its replies of tools."""
    calls = [call for call in row['turns'] if call]
    replies = [call for call in calls if call['documents'] or call['error'] is not None]
    return [call for call in calls if call['tool'] == 'search' and call['error'] is None], replies


def _question(row, config, rows):
    """Dr. Zero, π-Play: difficulty of the question, and half of the form, which has four parts."""
    searches, replies = _searches(row)
    hops, turns = row['info']['hops'], _turns(row)
    thoughts = sum(turn.lstrip().startswith('<think>') and '</think>' in turn for turn in turns)
    searched = float(hops == 1)
    if len(searches) == len(replies) > 0:
        searched = min((1 + len(searches)) / hops, 1.0)
    parts = [
        thoughts / len(turns),
        searched,
        bool(_element(row, 'question')),
        bool(_ending(row, 'answer')),
    ]
    form = config['reward']['format_weight'] * sum(parts) / 4
    solved, attempts = row['info'].get('solved'), config['reward']['solves']
    is_informative = solved is not None and 0 < solved < attempts
    return form + is_informative * (attempts - (solved or 0)) / (attempts - 1)


def _form(row, parts):
    """SCOPE: the mean of these parts and of the share of turns with a thought."""
    turns = _turns(row)
    thoughts = sum('</think>' in turn.partition('<think>')[2] for turn in turns)
    return (thoughts / len(turns) + sum(parts)) / 3


def _challenge(row, config, rows):
    """SCOPE eqs. 4 and 5."""
    expected = max(row['info']['hops'] - config['scope']['searches_below_hops'], 1)
    searches = [call for call in row['turns'] if call and call['tool'] == 'search']
    parts = [min(len(searches) / expected, 1), bool(_ending(row, 'task'))]
    reward = config['reward']['format_weight'] * _form(row, parts)
    if row['info']['valid']:
        target = config['reward']['target']
        distance = abs(row['info']['score'] - target)
        reward += max(0, 1 - distance / min(target, 1 - target))
    return reward


def _open_answer(row, config, rows):
    """SCOPE eq. 6."""
    searches = [bool(call) and call['tool'] == 'search' for call in row['turns']]
    tool = min(sum(searches[:-1]) / (len(searches) - 1), 1) if len(searches) > 1 else 0.0
    form = _form(row, [tool, bool(_ending(row, 'answer'))])
    judged = row['parts']['length_factor'] * (row['info'].get('score') or 0.0)
    # One that the last turn had no room to run.
    is_left = row['finish'] == 'turns' and bool(_SEARCH_LEFT.search(_turns(row)[-1]))
    search = config['scope']['search_weight'] * min((sum(searches) + is_left) / 3, 1)
    return judged + config['reward']['format_weight'] * form + search


# Proposers → the difficulty that is computed here.
_DIFFICULTY = {
    ('drzero', 'proposer'): 'linear',
    ('piplay', 'proposer'): 'linear',
    ('ssp', 'proposer'): 'one_minus',
    ('scope', 'proposer'): 'triangle',
}
# Recipe and role → reward of a line.
_REWARDS = {
    ('drzero', 'proposer'): _question,
    ('drzero', 'solver'): _solver,
    ('piplay', 'proposer'): _question,
    ('piplay', 'solver'): _solver,
    ('ssp', 'proposer'): _hidden_answer,
    ('ssp', 'solver'): _solver,
    ('dspo', 'solver'): _solver,
    ('scope', 'proposer'): _challenge,
    ('scope', 'solver'): _open_answer,
}
