"""Results of `zeroplay evaluate --out`: a score per question, so that two policies can be compared on pairs.

`Results` is what evaluations write, `zeroplay compare` and the extras read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64

from zeroplay_jax.evaluation import statistics
from zeroplay_jax.evaluation.tables import AVERAGE, Figure
from zeroplay_jax.retrieval import downloads, json_text
from zeroplay_jax.runtime.disk import write_text
from zeroplay_jax.types import Json, Question, UserError

_ADVICE = 'name a file of zeroplay evaluate --out'
# Settings of a result that `Results.differences` looks at → what sets them. 'answering' is not one of them: rows of a
# paper's table are a base model's ways of answering and a trained policy's searches.
SETTINGS = {
    'retrieval': 'index (--config.retrieval.path, or url of a server)',
    'top_k': '--config.tools.top_k',
    'prompts': '--config.prompts',
    'metric': '--metric',
    'samples': '--samples',
    'temperature': '--temperature',
    'truncation': '--config.<role>.top_p and top_k',
    'limit': '--limit',
    'judge': '--config.judge',
    'tools': '--config.tools',
    'tokens': '--config.rollout.max_turns, turn_tokens, observation_tokens and response_tokens',
    'context': '--config.sampler.context',
    'template': '--date',
}
# Those of the agent, not of the measurement. Papers have such rows: a policy without a search (DSPO, table 1), prompts
# of other systems (SSP, appendix D); and users compare indexes.
OF_AGENT = {'retrieval', 'prompts', 'tools', 'tokens', 'context'}


@dataclasses.dataclass(frozen=True)
class Answered:
    """Result of one question.

    Attributes:
      score: best score of its samples; in a graded evaluation their mean. None without any verdict, or if a
        server did not answer.
      searches: number of search queries of the first sample.
      redundancy: repetition among these queries, see `answering.redundancy`.
      given: the answer with the best score; None if that sample has no answer.
      samples: score of every sample; () if there is one alone.
      vote: score of the answer that most samples give (`majority`); None for open tasks and a sample alone.
    """

    score: float | None
    searches: int
    redundancy: float
    given: str | None
    samples: tuple[float, ...] = ()
    vote: float | None = None


@dataclasses.dataclass(frozen=True)
class SetResults:
    """Results of the questions of one set.

    Attributes:
      questions: fingerprint of the questions and their answers or rubrics, by which equal sets are known.
      asked: per question its text, with the accepted answers or the rubrics, and its document if it has one.
      answered: its result.
    """

    questions: str
    asked: Sequence[Json]
    answered: Sequence[Answered]

    @classmethod
    def of(cls, questions: Sequence[Question], answered: Sequence[Answered]) -> SetResults:
        """Returns the results of questions in their order."""
        asked: list[Json] = []
        for question in questions:
            name = 'rubrics' if question.is_open_task else 'answers'
            asked.append({'question': question.text, name: list(getattr(question, name))})
        text = json.dumps([list(one.values()) for one in asked], ensure_ascii=False)
        described = []
        for one, question in zip(asked, questions, strict=True):
            document = question.origin.get('document')
            described.append({**one, 'document': str(document)} if document else one)
        return cls(hashlib.sha256(text.encode()).hexdigest()[:16], described, answered)

    @classmethod
    def of_json(cls, record: Json) -> SetResults:
        """Returns the results of an object of `to_json`."""
        names = [field.name for field in dataclasses.fields(Answered)]
        answered = []
        for one in record['answered']:
            answered.append(Answered(**{name: one[name] for name in names if name in one}))
        return cls(record['questions'], record['answered'], answered)

    def to_json(self) -> Json:
        """Returns 'questions', 'mean' (`means`), and 'answered': per question what was asked and its result."""
        records = []
        for asked, result in zip(self.asked, self.answered, strict=True):
            record = {**asked, **dataclasses.asdict(result)}
            if not result.samples:
                del record['samples'], record['vote']
            records.append(record)
        return {'questions': self.questions, 'mean': self.means(), 'answered': records}

    def means(self) -> dict[str, float]:
        """Returns the means over questions of score (over those that have one), searches and redundancy.

        Of several samples also that of all their scores ('samples'), its standard deviation over samples ('deviation'),
        and that of the majority's ('vote').
        """
        values = {}
        for name in ('score', 'searches', 'redundancy', 'vote'):
            of_questions = [getattr(result, name) for result in self.answered]
            known = [value for value in of_questions if value is not None]
            if known:
                values[name] = float(np.mean(known))
        if any(result.samples for result in self.answered):
            of_samples = self.of_samples()
            values['samples'] = float(of_samples.mean())
            values['deviation'] = float(of_samples.std(ddof=1))
        return values

    def of_samples(self) -> Float64[np.ndarray, ' samples']:
        """Returns the mean of each sample over the questions that have samples."""
        return np.mean([result.samples for result in self.answered if result.samples], axis=0)

    def scores(self, kind: str) -> Float64[np.ndarray, ' questions']:
        """Returns the scores of the questions by one of `Results.kinds`; NaN without a verdict."""
        if kind == 'mean':
            # A question to which a server gave no reply has no samples, as it has no score.
            means = [np.mean(result.samples or np.nan) for result in self.answered]
            return np.array(means)
        name = 'vote' if kind == 'vote' else 'score'
        return np.array([getattr(result, name) for result in self.answered], float)

    def documents(self) -> np.ndarray:
        """Returns the names of the documents of the questions, [questions]; '' without one."""
        return np.array([one.get('document', '') for one in self.asked])


@dataclasses.dataclass(frozen=True)
class Results:
    """Results of an evaluation.

    Attributes:
      settings: what was measured (`answering.result_settings`).
      sets: by the name of the set.
    """

    settings: Json
    sets: Mapping[str, SetResults]

    @classmethod
    def read(cls, path: str | pathlib.Path) -> Results:
        """Returns the results in a file of `write`; UserError for another file."""
        # The user knows the address of a file in a bucket, not the path of its copy.
        address = downloads.address_of(str(path))
        try:
            record = json_text.read_object(pathlib.Path(path))
            sets = {name: SetResults.of_json(one) for name, one in record['sets'].items()}
            return cls(record['settings'], sets)
        except OSError as error:
            raise UserError(f'{address}: cannot be read ({error.strerror}); {_ADVICE}') from None
        # Any JSON file parses.
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f'{address}: not a result ({error}); {_ADVICE}') from None

    def to_json(self) -> Json:
        """Returns {'settings', 'sets': {name: `SetResults.to_json`}}."""
        return {
            'settings': dict(self.settings),
            'sets': {name: one.to_json() for name, one in self.sets.items()},
        }

    def write(self, path: pathlib.Path) -> None:
        """Writes a file that `read` reads."""
        write_text(path, json.dumps(self.to_json(), ensure_ascii=False, indent=1) + '\n')

    def kinds(self) -> list[str]:
        """Returns by which rules a question is scored: 'score', or 'mean', 'best' and 'vote' of several samples.

        There is no vote on open tasks, whose answers are all different.
        """
        answered = [result for one in self.sets.values() for result in one.answered]
        if not any(result.samples for result in answered):
            return ['score']
        has_votes = any(result.vote is not None for result in answered)
        return ['mean', 'best', *(['vote'] if has_votes else [])]

    def has_documents(self) -> bool:
        """Returns whether every question has a document, over which the intervals then are."""
        return all(one.documents().all() for one in self.sets.values())

    def figures(self, kind: str = 'score') -> dict[str, Figure]:
        """Returns {set or AVERAGE: score by one of `kinds`}, with its interval over questions, or over their documents.

        A mean over samples has its deviation over samples as well: sample i of all questions is one evaluation.
        """
        known, documents = {}, {}
        for name, one in self.sets.items():
            scores = one.scores(kind)
            is_scored = ~np.isnan(scores)
            known[name] = scores[is_scored]
            documents[name] = one.documents()[is_scored]
        of_documents: Mapping[str, Any] = averaged(documents)
        cells = {}
        for name, of_set in averaged(known).items():
            deviation = None
            if kind == 'mean':
                chosen = [self.sets[name]] if name in self.sets else self.sets.values()
                of_samples = np.mean([one.of_samples() for one in chosen], axis=0)
                deviation = float(of_samples.std(ddof=1))
            cells[name] = Figure.of(statistics.mean_interval(of_set, of_documents[name]), deviation)
        return cells

    def differences(self, other: Results) -> str:
        """Returns in which settings `OF_AGENT` two results differ, and which flags set them; '' if in none.

        Raises:
          UserError: they differ in another setting or in the questions of a shared set, or share no set.
        """
        differences = {}
        for name in SETTINGS:
            # A setting that is left out is None.
            mine, theirs = self.settings.get(name), other.settings.get(name)
            if mine != theirs:
                differences[name] = f'{name}: {mine!r} and {theirs!r}'
        text = '; '.join(differences.values())
        flags = ' and '.join(SETTINGS[name] for name in differences)
        if differences.keys() - OF_AGENT:
            raise UserError(
                f'these results cannot be compared, they differ in {text}; evaluate both with the same {flags}'
            )
        for name in shared_sets([self, other]):
            if self.sets[name].questions != other.sets[name].questions:
                raise UserError(
                    f'the questions of {name} differ between the two results; evaluate both on the same'
                )
        return text and f'{text} ({flags})'


def averaged(scores_of_sets: Mapping[str, np.ndarray]) -> dict[str, statistics.Samples]:
    """Returns set → its scores and, of several sets, AVERAGE → the scores of all, each set with the same weight.

    Every paper's main table has this column; pi-Play's total is the average times the number of sets.
    """
    of_sets: dict[str, statistics.Samples] = dict(scores_of_sets)
    if len(of_sets) > 1:
        of_sets[AVERAGE] = dict(enumerate(scores_of_sets.values()))
    return of_sets


def compare(one: Results, other: Results, kind: str = 'score') -> dict[str, statistics.Interval]:
    """Returns {set or AVERAGE: (mean difference other − one, low, high)} with 95 % intervals (`paired_difference`).

    Args:
      one: the results that `other` is compared with.
      kind: one of `Results.kinds` of both.

    Raises:
      UserError: the results differ in settings or questions, or have no set in common; names the difference.
    """
    one.differences(other)
    before, after, documents = {}, {}, {}
    for name in shared_sets([one, other]):
        # Paired by question: questions differ in difficulty far more than policies do, and this variance cancels.
        first, second = one.sets[name].scores(kind), other.sets[name].scores(kind)
        # A question that one side has no score of has no difference.
        is_scored = ~np.isnan(first + second)
        if not is_scored.any():
            raise UserError(
                f'no question of {name} has a score in both results; repeat the evaluation whose judge gave no verdicts'
            )
        before[name], after[name] = first[is_scored], second[is_scored]
        documents[name] = one.sets[name].documents()[is_scored]
    befores, afters = averaged(before), averaged(after)
    names: Mapping[str, Any] = averaged(documents)
    return {
        name: statistics.paired_difference(scores, afters[name], names[name])
        for name, scores in befores.items()
    }


def heading(name: str, kind: str) -> str:
    """Returns the heading of a row of a table: what was scored, and by which of `Results.kinds`."""
    return name if kind == 'score' else f'{name}, {kind}'


def shared_sets(results: Sequence[Results]) -> list[str]:
    """Returns the names of the sets that all results have; raises UserError if there is none."""
    names = set.intersection(*(set(result.sets) for result in results))
    if not names:
        raise UserError('the results have no set in common; evaluate all on the same sets')
    return [name for name in results[0].sets if name in names]
