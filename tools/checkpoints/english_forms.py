"""Parts that the demonstrations for English texts share: the amount of errors, queries, thoughts and answers."""

from __future__ import annotations

import dataclasses

from numpy.random import Generator

from tools.checkpoints.demo import Demo
from tools.checkpoints.english_texts import Disguise, Texts
from tools.checkpoints.library import Document
from zeroplay_jax.extras.inputs import cloze
from zeroplay_jax.extras.inputs.cloze import Cloze
from zeroplay_jax.mini.names import pick, shuffled

# Words of a query that is too short to find its sentence reliably.
SHORT_QUERY_WORDS = 3
# Share of the episodes whose names and numbers are replaced; the others keep the tokens of real texts.
_DISGUISED_SHARE = 0.5


@dataclasses.dataclass(frozen=True)
class EnglishSetting:
    """Size of the exercise `copy`, and probabilities of deliberate errors; no errors for the clean checkpoint.

    Attributes:
      copied_words: fewest and most words that `copy` copies.
      short_query: probability that the solver searches with the first words of the question only.
      wrong_span: probability that the solver's answer is cut to its first word, or one word too long.
      malformed: probability that the proposer omits the question or the answer.
    """

    copied_words: tuple[int, int] = (8, 40)
    short_query: float = 0.0
    wrong_span: float = 0.0
    malformed: float = 0.0


def disguise_of(texts: Texts, rng: Generator) -> Disguise:
    """Returns the disguise of one episode; it changes nothing in half of the episodes."""
    return Disguise(rng, texts.names, _DISGUISED_SHARE)


def query_of(case: Cloze) -> str:
    """Returns the search query for a question: the words around the blank."""
    return (case.left.rstrip() + case.right).strip()


def marked(case: Cloze, with_right: bool) -> str:
    """Returns the sentence with its left-out span in square brackets, up to the span or with `with_right` to its end.

    The spaces inside the brackets give the span the same tokens as in running text.
    """
    text = f'{case.left.rstrip()} [ {case.answer} ]'
    return text + case.right if with_right else text


def add_answer(demo: Demo, case: Cloze) -> None:
    """Adds the final turn: as its thought the sentence up to the answer, then the answer."""
    demo.add_final_turn(marked(case, with_right=False), answer=case.answer)


def plain(document: Document) -> str:
    """Returns the text of a passage with single spaces between words, as `cloze.sentences` has them."""
    return ' '.join(document['text'].split())


def other_answer(documents: list[Document], case: Cloze, rng: Generator) -> Cloze:
    """Returns the cloze with an answer of the same kind out of passages that do not contain its sentence.

    If they have none of this kind, the answer is the title of the first passage.
    """
    for document in shuffled(rng, documents):
        for sentence in shuffled(rng, cloze.sentences(document['text'])):
            cases = [other for other in cloze.clozes(sentence) if other.kind == case.kind]
            if cases:
                return case._replace(answer=pick(rng, cases).answer)
    return case._replace(answer=documents[0]['title'])


def other_span(case: Cloze) -> Cloze:
    """Returns the cloze with a wrong answer: the first word; of a single word, this and a neighbouring word."""
    words = case.answer.split()
    if len(words) > 1:
        return case._replace(answer=words[0])
    for word in case.right.split():
        # An answer with punctuation after it would still count as correct.
        if word[0].isalnum():
            return case._replace(answer=f'{case.answer} {word}')
    return case._replace(answer=f'{case.left.split()[-1]} {case.answer}')


def add_proposal(
    demo: Demo, case: Cloze, rng: Generator, setting: EnglishSetting, question: str = ''
) -> None:
    """Adds the final turn of a proposer: as its thought the sentence with the answer in brackets; question; answer.

    As a deliberate error, with the probability `setting.malformed`, one of the two is missing.

    Args:
      demo: the episode.
      case: the sentence.
      rng: decides on the error.
      setting: gives its probability.
      question: the question, if it is not the sentence with a blank.
    """
    tags = {'question': question or case.question, 'answer': case.answer}
    if rng.random() < setting.malformed:
        # The parser of self-play rejects a proposal without both tags.
        missing_tag = 'answer' if rng.random() < 0.5 else 'question'
        del tags[missing_tag]
    demo.add_final_turn(marked(case, with_right=True), **tags)
