"""Parts that the demonstrations for English texts share: queries, thoughts and answers."""

from __future__ import annotations

from collections.abc import Iterable

from numpy.random import Generator

from tools.checkpoints.demo import Demo, spend
from tools.checkpoints.english_texts import Disguise, Texts
from tools.checkpoints.library import Document
from zeroplay_jax.extras.inputs.cloze import Cloze

# Share of the episodes whose names and numbers are replaced; the others keep the tokens of real texts.
_DISGUISED_SHARE = 0.5


def disguise_of(texts: Texts, rng: Generator) -> Disguise:
    """Returns the disguise of one episode; it changes nothing in half of the episodes."""
    return Disguise(rng, texts.names, _DISGUISED_SHARE)


def query_of(case: Cloze) -> str:
    """Returns the search query for a question: the words around the blank."""
    return (case.left.rstrip() + case.right).strip()


def contains(documents: Iterable[Document], sentence: str) -> bool:
    """Returns whether one of the passages contains a sentence, which has single spaces between its words."""
    return any(sentence in ' '.join(document['text'].split()) for document in documents)


def marked(case: Cloze, with_right: bool) -> str:
    """Returns the sentence with its left-out span in square brackets, up to the span or with `with_right` to its end.

    The spaces inside the brackets give the span the same tokens as in running text.
    """
    text = f'{case.left.rstrip()} [ {case.answer} ]'
    return text + case.right if with_right else text


def add_answer(demo: Demo, case: Cloze) -> None:
    """Adds the final turn: as its thought the sentence up to the answer, then the answer."""
    demo.add_final_turn(marked(case, with_right=False), answer=case.answer)


def add_proposal(demo: Demo, case: Cloze, rng: Generator, question: str = '') -> None:
    """Adds the final turn of a proposer: as its thought the sentence with the answer in brackets; question; answer.

    `question` is the sentence with a blank by default.
    """
    spend(rng)
    thought = marked(case, with_right=True)
    demo.add_final_turn(thought, question=question or case.question, answer=case.answer)
