"""Question sets: files, or public names, which are downloaded.

A set is a file of JSON lines with "question" and answers, or one of the public names, downloaded
from the collection that Search-R1 and its successors evaluate on (FlashRAG; Jin et al. 2024,
arXiv:2405.13576). An open-ended set has "task" and "rubrics", a list of texts, on every line; a
judge decides which of them an answer meets.
"""

from __future__ import annotations

import pathlib

from zeroplay_jax.data import files
from zeroplay_jax.retrieval import downloads
from zeroplay_jax.types import Question

COLLECTION = 'hf://RUC-NLPIR/FlashRAG_datasets'


def load(name: str, limit: int = 0, seed: int = 0, rubrics: bool = False) -> list[Question]:
    """Returns the questions of a file or a public set, which is downloaded; with `rubrics` the open tasks of a file.

    Args:
      name: path of a file, or a key of `files.PUBLIC` or `files.WRITTEN`.
      limit: number of questions drawn from the set; 0: all.
      seed: seed of the draw.
      rubrics: whether the file holds open tasks.

    Raises:
      UserError: neither a file nor a public name; an unusable line; no connection.
    """
    read = files.open_tasks if rubrics else files.questions
    questions = read(path_of(name))
    return files.sample(questions, limit or len(questions), seed)


def path_of(name: str) -> str:
    """Returns the path of a set's file: `name` itself, or the downloaded file of a public name.

    Raises:
      UserError: neither a file nor a public name; no connection.
    """
    if pathlib.Path(name).is_file():
        return name
    files.check_set(name)
    if name in files.WRITTEN:
        return files.WRITTEN[name]
    if not downloads.is_name(name):
        name = f'{COLLECTION}/{name}/{files.PUBLIC[name]}.jsonl'
    return downloads.fetch_file(name)
