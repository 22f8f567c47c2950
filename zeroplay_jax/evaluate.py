"""Evaluates a policy folder, greedily and with search: on the worlds' held-out questions, or on sets of questions.

    python -m zeroplay_jax.evaluate --config=configs/quickstart.py
    python -m zeroplay_jax.evaluate --config=configs/quickstart.py --config.policy.path=zeroplay_jax/mini/clean
    python -m zeroplay_jax.evaluate --config=configs/dspo.py --sets=nq,my_questions.jsonl --metric=em --out=result.json
    python -m zeroplay_jax.evaluate --config=configs/scope.py --sets=my_tasks.jsonl --metric=rubrics

Without --sets: exact match by hop count with 95 % intervals. With --sets (files of JSON lines, or public names that are
fetched when online): mean score, searches and repeated queries per set; --out keeps every answer, and
`python -m zeroplay_jax.compare` sets two such files against each other. Open-ended tasks (lines with "task" and
"rubrics") are graded by the judge of the config, rubric by rubric. The last line is always one JSON object.
"""

import collections
import dataclasses
import json
import pathlib

from absl import flags
from ml_collections import config_flags

from zeroplay_jax import config as configuration
from zeroplay_jax import start
from zeroplay_jax.retrieval import progress
from zeroplay_jax.runtime.atomic import write_text
from zeroplay_jax.selfplay import files
from zeroplay_jax.types import UserError

_CONFIG = config_flags.DEFINE_config_file(
    'config', None, 'What to evaluate: a Python file.', lock_config=True
)
_SETS = flags.DEFINE_list('sets', [], 'Question sets: files of JSON lines or public names.')
_METRIC = flags.DEFINE_enum(
    'metric', 'em', ['em', 'subem', 'f1', 'judge', 'rubrics'], 'How answers are scored.'
)
_SAMPLES = flags.DEFINE_integer(
    'samples', 1, '1: greedy; more: the best of so many (pass@k).', lower_bound=1
)
_LIMIT = flags.DEFINE_integer('limit', 0, 'Questions drawn from each set; 0: all.', lower_bound=0)
_ANSWERER = flags.DEFINE_string(
    'answerer', '', 'Policy folder that answers after the searches of the other.'
)
_OUT = flags.DEFINE_string('out', '', 'File for every answer, as JSON.')


def main(argv: list[str]) -> None:
    """Checks the command, then evaluates."""
    if _SETS.value and _CONFIG.value is not None:
        _CONFIG.value.eval.file = _CONFIG.value.eval.tasks = ''  # nothing but the sets is asked
    configuration.check_command(argv, _CONFIG.value, '.', measured=not _SETS.value)
    if _OUT.value and not pathlib.Path(_OUT.value).absolute().parent.is_dir():
        raise UserError(f'--out={_OUT.value}: its folder is not there; make it first')
    _check_metric(_CONFIG.value)
    for name in _SETS.value:
        files.check_set(name, allow_public=_METRIC.value != 'rubrics')
    with progress.clock('loading', _CONFIG.value.progress):
        start.load_libraries()
        from zeroplay_jax import setup  # loads JAX and TensorFlow: only once the config is sound

    parts = setup.build(_CONFIG.value, extra_lane='answerer' if _ANSWERER.value else '')
    parts.publish(parts.table.scheduler.lanes)
    parts = dataclasses.replace(parts, params={})  # the players have their own
    if _SETS.value:
        _on_sets(setup, parts)
    else:
        _on_worlds(parts)


def _check_metric(config) -> None:
    """Refuses what an evaluation cannot honour."""
    if config.distributed.mode != 'off':
        raise UserError('config.distributed.mode: an evaluation runs in one process; set it to off')
    if (
        _METRIC.value in ('judge', 'rubrics')
        and config.judge.kind == 'rule'
        and config.retrieval.kind != 'world'
    ):
        raise UserError(
            f'--metric={_METRIC.value}: the rule (config.judge.kind) knows the miniature worlds only; '
            'set it to policy or endpoint'
        )


def _on_worlds(parts) -> None:
    from zeroplay_jax.evaluation import statistics
    from zeroplay_jax.evaluation.evaluate import evaluate

    items = parts.corpus.questions + parts.corpus.tasks
    with progress.bar(len(items), 'questions') as bar:
        correct, rows = evaluate(parts.exam, items, 0, done=bar.update)
    parts.corpus.check()
    parts.table.judge.check(parts.table.judge_stats)
    figures = {f'hop{h}': statistics.mean_interval(c) for h, c in correct.items()}
    figures['mean'] = statistics.mean_interval(statistics.headline(correct))
    if graded := [row.reward for row in rows if 'rubrics' in row.parts]:
        figures['rubrics'] = statistics.mean_score(graded)
    for name, (mean, low, high) in figures.items():
        print(f'{name:7} {mean:.3f} [{low:.3f}, {high:.3f}]')
    print(json.dumps({name: [round(x, 4) for x in values] for name, values in figures.items()}))


def _on_sets(setup, parts) -> None:
    from zeroplay_jax.evaluation import qa

    config = _CONFIG.value
    names = [pathlib.Path(name).stem for name in _SETS.value]
    if len(set(names)) < len(names):
        raise UserError(f'--sets={",".join(_SETS.value)}: two sets have one name; rename a file')
    graded = _METRIC.value == 'rubrics'
    sets = {
        stem: qa.load(name, _LIMIT.value, config.seed, graded)
        for stem, name in zip(names, _SETS.value)
    }
    if _ANSWERER.value:
        parts.publish(['answerer'], setup.load_like(parts, _ANSWERER.value))
    options = dict(
        metric=_METRIC.value, samples=_SAMPLES.value, answerer='answerer' if _ANSWERER.value else ''
    )
    answered = {}
    print(f'{"set":20} {"n":>6} {_METRIC.value:>7} {"searches":>9} {"repeated":>9}')
    for number, (name, questions) in enumerate(sets.items()):
        judged = collections.Counter(parts.table.judge_stats)
        with progress.bar(len(questions), 'questions', name) as bar:
            answered[name] = qa.answer_all(
                parts.exam, questions, number, **options, done=bar.update
            )
        parts.corpus.check()
        if parts.table.judge:
            parts.table.judge.check(parts.table.judge_stats - judged)
        mean = qa.summary(answered[name])
        row = f'{mean["score"]:7.3f} {mean["searches"]:9.2f} {mean["redundancy"]:9.2f}'
        print(f'{name[-20:]:20} {len(questions):6} {row}', flush=True)
    settings = dict(
        policy=str(parts.folder),
        answerer=_ANSWERER.value,
        retrieval=parts.corpus.about,
        top_k=config.tools.top_k,
        prompts=config.prompts,
        metric=_METRIC.value,
        samples=_SAMPLES.value,
        limit=_LIMIT.value,
        judge=f'{config.judge.kind} {config.judge.model}'
        if _METRIC.value in ('judge', 'rubrics')
        else '',
        tools=config.tools.family,
        tokens=[
            config.rollout.max_turns,
            config.rollout.turn_tokens,
            config.rollout.observation_tokens,
        ],
    )
    found = qa.results(settings, {name: (sets[name], answered[name]) for name in sets})
    if _OUT.value:
        write_text(pathlib.Path(_OUT.value), json.dumps(found, ensure_ascii=False, indent=1) + '\n')
    print(
        json.dumps(
            {
                name: {k: round(v, 4) for k, v in s['mean'].items()}
                for name, s in found['sets'].items()
            }
        )
    )


if __name__ == '__main__':
    start.command('zeroplay_jax.evaluate', main)
