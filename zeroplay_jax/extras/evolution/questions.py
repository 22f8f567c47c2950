"""What self-play asks over training: the questions of tasks.jsonl in parts, by iteration or by step, and their figures.

SSP's figures 4, 6c and 6d and π-Play's section 5.2 show such figures: topics (latent Dirichlet allocation), and how
hard a part's questions are for a fixed solver.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from zeroplay_jax.data import files
from zeroplay_jax.evaluation import statistics, tables
from zeroplay_jax.extras.drawing import new_axes, save
from zeroplay_jax.objectives.answers import normalize_answer
from zeroplay_jax.types import Json

if TYPE_CHECKING:
    # It loads JAX.
    from zeroplay_jax.evaluation.results import Answered

# Cosine of two questions' character n-grams from which they count as one.
NEAR = 0.9
# Smallest score of an answer that counts as correct.
_CORRECT = 0.5
_TOPIC_WORDS = 3
_RATING = ('rating', 'rating low', 'rating high')
# What a record of a made question has, and of a rollout has not.
_MADE_FIELDS = {'question', 'answers', 'version', 'role', 'task'}
# A task has several proposals, of which one is enough.
MADE = 'tasks with a question'
_SHARES = (MADE, 'near-duplicates', 'solve rate then', 'solve rate', 'low', 'high')


@dataclasses.dataclass(frozen=True)
class Part:
    """The questions of an iteration, or of a range of steps.

    Attributes:
      name: 'iteration1', 'steps1to40', or 'step1'.
      valid: share of its tasks that made a question.
      questions: the records of tasks.jsonl with a question; those that the pool refused, such as copies, included.
    """

    name: str
    valid: float
    questions: Sequence[Json]

    @property
    def texts(self) -> list[str]:
        """The texts of the questions."""
        return [record['question'] for record in self.questions]

    def figures(self) -> dict[str, float]:
        """Returns name → figure: number, share of tasks that made one, and means; what no record has is left out."""
        values = {
            'words': [len(text.split()) for text in self.texts],
            'hops': [record['hops'] for record in self.questions if record.get('hops')],
            'solve rate then': [
                record['solve_rate'] for record in self.questions if 'solve_rate' in record
            ],
        }
        means = {name: float(np.mean(of_name)) for name, of_name in values.items() if of_name}
        return {'questions': len(self.questions), MADE: self.valid} | means


def parts_of(records: Sequence[Json], count: int = 0) -> list[Part]:
    """Returns the parts of a run that made questions, in order; [] if no task made one.

    Args:
      records: the objects of tasks.jsonl.
      count: number of ranges of steps; 0: by iteration, five ranges if there is only one.
    """
    made = [record for record in records if _is_made(record)]
    if not made:
        return []
    phases = {record['phase'] for record in made}
    roles = {None, *(record['role'] for record in made)}
    asked = [
        record
        for record in records
        # Neither a skipped update nor a group of the filter.
        if 'task' in record
        and 'rewards' not in record
        and record['phase'] in phases
        and record.get('role') in roles
    ]
    iterations = {record['iteration'] for record in made}
    field = 'step' if count or len(iterations) == 1 else 'iteration'
    values = sorted({record[field] for record in asked})
    number = len(values) if field == 'iteration' else min(count or 5, len(values))
    parts: list[Part] = []
    for within in np.array_split(values, number):
        first, last = within[0], within[-1]
        name = f'iteration{first + 1}'
        if field == 'step':
            name = f'step{first}' if first == last else f'steps{first}to{last}'
        of_part = [record for record in asked if first <= record[field] <= last]
        questions = [record for record in of_part if _is_made(record)]
        if questions:
            valid = len(_tasks(questions)) / len(_tasks(of_part))
            parts.append(Part(name, valid, questions))
    return parts


def _tasks(records: Sequence[Json]) -> set[tuple[int, ...]]:
    """Returns the identities of the tasks of records."""
    return {tuple(record['task']) for record in records}


def _is_made(record: Json) -> bool:
    """Returns whether a record of tasks.jsonl is of a question that was made, also of one that the pool refused."""
    # Records of rollouts name them; those of tasks that were dropped whole have no version.
    is_question = record.keys() >= _MADE_FIELDS and 'rollout' not in record
    return is_question and bool(record['question'])


def near_duplicates(texts: Sequence[str]) -> float:
    """Returns the share of texts that nearly repeat another one: cosine of weighted character n-grams ≥ `NEAR`."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.neighbors import NearestNeighbors

    if len(texts) < 2:
        return 0.0
    # Weighted, because many questions share a form and differ by one name.
    counter = TfidfVectorizer(analyzer='char_wb', ngram_range=(4, 5))
    vectors = counter.fit_transform([normalize_answer(text) or text for text in texts])
    search = NearestNeighbors(n_neighbors=1, metric='cosine').fit(vectors)
    distances, _ = search.kneighbors()
    return float(np.mean(distances[:, 0] <= 1 - NEAR))


def topics(parts: Sequence[Part], count: int) -> dict[str, list[float]]:
    """Returns the words of each topic → its share of each part's questions (latent Dirichlet allocation, SSP fig. 6d).

    A word names the topic that has the largest part of it. There are no more topics than questions and words; {} if the
    questions have no words but the commonest.
    """
    from sklearn.decomposition import LatentDirichletAllocation
    from sklearn.feature_extraction.text import CountVectorizer

    texts = [text for part in parts for text in part.texts]
    counter = CountVectorizer(stop_words='english')
    try:
        counts = counter.fit_transform(texts)
    except ValueError:
        return {}
    model = LatentDirichletAllocation(min(count, *counts.shape), random_state=0)
    of_texts = model.fit_transform(counts)
    ends = np.cumsum([len(part.texts) for part in parts])[:-1]
    shares = np.stack([part.mean(axis=0) for part in np.split(of_texts, ends)])
    words = counter.get_feature_names_out()
    topic_of_word = model.components_.argmax(axis=0)
    named: dict[str, list[float]] = {}
    for number, weights in enumerate(model.components_):
        members = np.flatnonzero(topic_of_word == number)
        largest = members[np.argsort(-weights[members])][:_TOPIC_WORDS]
        named[' '.join([str(number + 1), *words[largest]])] = shares[:, number].tolist()
    return named


def write_sets(parts: Sequence[Part], folder: Path) -> list[Path]:
    """Writes the questions with answers of each part as a file of JSON lines, or its open tasks; returns the paths."""
    folder.mkdir(exist_ok=True)
    paths: list[Path] = []
    for part in parts:
        # Without a label (drzero.labels=majority) there is nothing to compare an answer with.
        lines = list(filter(None, map(_line, part.questions)))
        if lines:
            paths.append(folder / f'{part.name}.jsonl')
            files.write_lines(paths[-1], lines)
    return paths


def _line(record: Json) -> Json:
    """Returns what `zeroplay evaluate` reads of a record; {} without answers and rubrics."""
    if record.get('rubrics'):
        return {'task': record['question'], 'rubrics': record['rubrics']}
    names = ('question', 'answers', 'hops') if record['answers'] else ()
    return {name: record[name] for name in names if name in record}


def solved(answered: Sequence[Answered]) -> dict[str, float]:
    """Returns the 'solve rate' of results with its 95 % interval, and the mean 'searches' of what was solved."""
    # What a server did not answer does not count, as in the means of an evaluation.
    scores = [result.score for result in answered if result.score is not None]
    searches = [result.searches for result in answered if (result.score or 0) >= _CORRECT]
    figures = dict(zip(('solve rate', 'low', 'high'), statistics.mean_interval(scores)))
    return figures | ({'searches': float(np.mean(searches))} if searches else {})


def rated(answered: Sequence[Answered]) -> dict[str, float]:
    """Returns the mean 'rating' with its 95 % interval, the share of each rating, and the number 'unrated'."""
    scores = np.array([result.score for result in answered if result.score is not None])
    figures = {name: 1 + 4 * end for name, end in zip(_RATING, statistics.mean_interval(scores))}
    shares = {f'rated {n}': float(np.mean(1 + 4 * scores == n)) for n in range(1, 6)}
    return figures | shares | {'unrated': len(answered) - len(scores)}


def table(figures: Mapping[str, Json]) -> str:
    """Returns the figures as text: a line per part, a column per figure."""
    names = list(dict.fromkeys(name for of_part in figures.values() for name in of_part))
    rows = [['', *names]]
    for part, of_part in figures.items():
        cells = [str(round(of_part[name], 3)) if name in of_part else '–' for name in names]
        rows.append([part, *cells])
    return tables.write(rows)


def write_pictures(
    figures: Mapping[str, Json], shares: Mapping[str, Sequence[float]], folder: Path
) -> list[Path]:
    """Draws the shares among the figures, the rating, and the topics over the parts; returns the paths of the files."""
    paths: list[Path] = []
    for file, y, limits, names in (
        ('asked', 'share', (0, 1), _SHARES),
        ('rating', 'rating, 1 to 5', (1, 5), _RATING),
    ):
        drawing, axes = new_axes('What self-play asks', 'part', y)
        for name in names:
            values = [of_part.get(name, math.nan) for of_part in figures.values()]
            label = f'solve rate: {name} end of 95 %' if name in ('low', 'high') else name
            style = ':' if name.endswith(('low', 'high')) else 'o-'
            if not np.isnan(values).all():
                axes.plot(list(figures), values, style, label=label)
        axes.set_ylim(*limits)
        if axes.lines:
            paths += save(drawing, axes, folder / f'{file}.svg')
    if shares:
        drawing, axes = new_axes('Topics', 'part', 'share of the questions')
        axes.stackplot(list(figures), list(shares.values()), labels=list(shares))
        paths += save(drawing, axes, folder / 'topics.svg')
    return paths
