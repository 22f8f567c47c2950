"""A graded evaluation from end to end: the built-in policy, the rule, and a judge at a server."""

import json

import pytest
from judge_server import JudgeServer
from python_process import ROOT

from zeroplay_jax.configs import scope
from zeroplay_jax.configuration.fields import frozen
from zeroplay_jax.extras.grading import graded
from zeroplay_jax.mini.world import World, evaluation_tasks
from zeroplay_jax.types import UserError


def write_tasks(path, count=3):
    items = evaluation_tasks([World(i, 'evaluation', 0.25) for i in range(2)], count, (1, 2))
    lines = []
    for item in items:
        texts = [rubric['text'] for rubric in item['rubrics']]
        lines.append(json.dumps({'task': item['question'], 'rubrics': texts}))
    path.write_text('\n'.join(lines))
    return sum(len(item['rubrics']) for item in items)


def evaluate(config, plan):
    return graded.evaluate(frozen(config), plan)


def make_config(url):
    config = scope.get_config('mini')
    config.world.update(train=(0, 4), evaluation=(0, 2))
    config.eval.update(file='', tasks='', questions=2)
    config.policy.path = str(ROOT / 'zeroplay_jax' / 'mini' / 'base')
    config.sampler.slots = 8
    config.judge.update(kind='endpoint', url=url, model='some')
    return config


def test_an_evaluation_that_is_continued_asks_only_what_is_missing(tmp_path, capsys):
    path, folder = tmp_path / 'tasks.jsonl', tmp_path / 'run'
    rubrics = write_tasks(path)
    plan = graded.Plan(str(path), folder, limit=3)
    with JudgeServer() as server:
        config = make_config(server.url)
        estimate = evaluate(config, graded.Plan(str(path), folder, only_estimate=True))
        assert estimate['judgements'] == rubrics and not folder.exists()
        assert not server.prompts
        part = evaluate(config, plan)
        assert '"rollouts": ' in capsys.readouterr().out
        asked = len(server.prompts)
        assert 0 < asked < rubrics and part['tasks'] == 3
    with JudgeServer() as server:
        # The server has another address now, and the judge is allowed fewer requests at once.
        config = make_config(server.url)
        config.judge.at_once = 2
        evaluate(config, graded.Plan(str(path), folder))
        assert len(server.prompts) == rubrics - asked
    config.judge.kind = 'rule'
    result = evaluate(config, graded.Plan(str(path), folder))
    scores = {entry['task']: entry for entry in result['task_scores']}
    assert list(scores) == '1 2 3 4 5 6'.split() and part['scored_tasks'] == 3
    assert result == json.loads((folder / 'results.json').read_text())
    (agreement,) = result['agreement'].values()
    assert agreement['items'] > 0 and result['rubrics_met'][0] > 0
    assert 'Cohen' in (folder / 'results.md').read_text()
    path.write_text(path.read_text().replace('Describe', 'Please describe', 1))
    with pytest.raises(UserError, match='another content of --sets: the file of tasks has other'):
        evaluate(config, plan)


def test_what_an_evaluation_cannot_do_is_said_before_anything_is_loaded(tmp_path):
    config = make_config('')
    config.judge.kind = 'rule'
    foreign = tmp_path / 'foreign.jsonl'
    foreign.write_text('{"task": "Compare two treaties.", "rubrics": ["Names both."]}')
    with pytest.raises(UserError, match=r'foreign.jsonl, line 1: rubric 1 states .*kind=endpoint'):
        evaluate(config, graded.Plan(str(foreign), tmp_path / 'other', only_estimate=True))
