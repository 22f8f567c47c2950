"""Demonstrations that the checkpoint for English texts is trained on: written-out episodes of every role.

The task of all roles is to find and to copy: a proposer copies a sentence with a span left out, a solver searches for
the sentence and copies the span. Thoughts are copies as well, with the span in square brackets, so that every token
of a question or an answer can be copied from a text that the policy sees.
"""

from __future__ import annotations

from functools import partial

from numpy.random import Generator

from tools.checkpoints import english_two_hops
from tools.checkpoints.demo import Demo, Role, spend
from tools.checkpoints.english_forms import (
    add_answer,
    add_proposal,
    contains,
    disguise_of,
    query_of,
)
from tools.checkpoints.english_texts import Texts, cloze_lists, draw_cloze, invented_name
from tools.checkpoints.library import Document
from zeroplay_jax.extras.inputs import cloze
from zeroplay_jax.extras.inputs.cloze import BLANK, Cloze
from zeroplay_jax.mini.names import pick, shuffled
from zeroplay_jax.rollout import prompts
from zeroplay_jax.rollout.foreign_text import passages_text


def _question_form(question: str) -> str:
    """Returns a user turn with a question, in ChatML; exercises put several of them into one episode."""
    return f'<|im_start|>user\nQuestion: {question}<|im_end|>\n<|im_start|>assistant\n'


def copy(texts: Texts, rng: Generator, low: int = 8, high: int = 40) -> Demo:
    """Writes `low` to `high` words, then the same words again.

    Half of the texts are random words, which cannot be guessed: this forms copying attention heads early.
    """
    count = int(rng.integers(low, high + 1))
    if rng.random() < 0.5:
        words = [_random_word(texts, rng) for _ in range(count)]
    else:
        text_words = pick(rng, texts.documents)['text'].split()
        start = rng.integers(0, max(1, len(text_words) - count))
        words = text_words[start : start + count]
    text = ' '.join(words)
    demo = Demo()
    demo.add_prompt_text(f' {text}\n')
    demo.add_policy_text(f' {text}\n')
    return demo


def _random_word(texts: Texts, rng: Generator) -> str:
    """Returns an invented name (one in ten), a number of up to four digits (one in ten), or a word of the texts."""
    kind = rng.random()
    if kind < 0.1:
        return invented_name(rng)
    if kind < 0.2:
        digits = int(rng.integers(1, 5))
        return str(rng.integers(0, 10**digits))
    return pick(rng, texts.words)


def query(texts: Texts, rng: Generator) -> Demo:
    """Question → search; the episode ends there."""
    _, case = texts.draw(rng)
    case = disguise_of(texts, rng).cloze(case)
    demo = Demo('solver', {'question': case.question})
    demo.add_policy_text(f'<search> {query_of(case)}</search>')
    return demo


def fill_one(texts: Texts, rng: Generator) -> Demo:
    """Writes a passage, then up to four questions about its sentences, each with its answer."""
    source = pick(rng, texts.sources)
    disguise = disguise_of(texts, rng)
    demo = Demo()
    demo.add_documents([disguise.document(source.document)])
    for cases in shuffled(rng, source.cloze_lists)[:4]:
        _add_question(demo, disguise.cloze(draw_cloze(rng, cases)))
    return demo


def fill(texts: Texts, rng: Generator) -> Demo:
    """Writes the passages of a search, then up to five questions about their sentences, each with its answer."""
    _, case = texts.draw(rng)
    documents = texts.search(query_of(case))
    disguise = disguise_of(texts, rng)
    cases = []
    for document in documents:
        cases += [draw_cloze(rng, cases) for cases in cloze_lists(document['text'])]
    demo = Demo()
    demo.add_documents(disguise.documents(documents))
    for sentence_case in shuffled(rng, cases)[:5]:
        _add_question(demo, disguise.cloze(sentence_case))
    return demo


def _add_question(demo: Demo, case: Cloze) -> None:
    """Adds a question as prompt text, and its answer as the policy's text."""
    demo.add_prompt_text(_question_form(case.question))
    add_answer(demo, case)


def solver(texts: Texts, rng: Generator, with_path: bool = False) -> Demo:
    """Question → search → answer.

    With `with_path` the role is `solver_with_path`, which sees how the question was made.
    """
    while True:
        document, case = texts.draw(rng)
        search_query = query_of(case)
        spend(rng)
        documents = texts.search(search_query)
        # Drawn again if the passages found do not contain the sentence, because such a demonstration would teach to
        # guess.
        if contains(documents, case.sentence):
            break
    disguise = disguise_of(texts, rng)
    spend(rng)
    # The order in which a disguise meets words decides what it draws.
    demo = Demo('solver', {'question': disguise(case.left) + BLANK + disguise(case.right)})
    if with_path:
        path = f'{disguise(document["title"])} > {disguise(case.answer)}'
        demo = Demo('solver_with_path', {**demo.fields, 'path': path})
    demo.add_policy_text(f'<search> {disguise(search_query)}</search>')
    demo.add_documents(disguise.documents(documents))
    add_answer(demo, disguise.cloze(case))
    return demo


def answer_from_documents(texts: Texts, rng: Generator) -> Demo:
    """Question, its passage and up to two random ones → answer without a search."""
    document, case = texts.draw(rng)
    documents = [document]
    documents += [pick(rng, texts.documents) for _ in range(rng.integers(0, 3))]
    disguise = disguise_of(texts, rng)
    disguised = disguise.documents(shuffled(rng, documents))
    case = disguise.cloze(case)
    fields = {'documents': passages_text([disguised], 'search_r1'), 'question': case.question}
    demo = Demo('answer_from_documents', fields)
    add_answer(demo, case)
    return demo


def task_solver(texts: Texts, rng: Generator) -> Demo:
    """Open task → search → the first sentences of the passage that the task asks for."""
    described: list[Document] = []
    # Drawn again if no passage found has the title: it may take a longer query to find it.
    while not described:
        title = pick(rng, texts.titled).document['title']
        documents = texts.search(title)
        described = [result for result in documents if result['title'] == title]
    disguise = disguise_of(texts, rng)
    disguised_title = disguise(title)
    demo = Demo('task_solver', {'task': f'Describe {disguised_title}.'})
    demo.add_policy_text(f'<search> {disguised_title}</search>')
    demo.add_documents(disguise.documents(documents))
    sentences = cloze.sentences(described[0]['text'])
    answer = ' '.join(sentences[:2]) or title
    demo.add_final_turn(disguised_title, answer=disguise(answer))
    return demo


def proposer(texts: Texts, rng: Generator) -> Demo:
    """A document → a question about one of its sentences, and the answer."""
    document, case = texts.draw(rng)
    disguise = disguise_of(texts, rng)
    text = prompts.document_text(disguise.document(document))
    demo = Demo('proposer', {'hops': 1, 'document': text})
    add_proposal(demo, disguise.cloze(case), rng)
    return demo


def proposer_from_answer(texts: Texts, rng: Generator) -> Demo:
    """An answer → search for it → a question about a sentence that contains it."""
    cases: list[Cloze] = []
    # The search does not always return a passage that names the answer; such attempts are discarded.
    while not cases:
        _, case = texts.draw(rng)
        documents = texts.search(case.answer)
        for document in documents:
            for others in cloze_lists(document['text']):
                cases += [other for other in others if other.answer == case.answer]
    disguise = disguise_of(texts, rng)
    answer = disguise(case.answer)
    demo = Demo('proposer_from_answer', {'hops': 1, 'answer': answer})
    demo.add_policy_text(f'<search> {answer}</search>')
    demo.add_documents(disguise.documents(documents))
    add_proposal(demo, disguise.cloze(pick(rng, cases)), rng)
    return demo


def challenger(texts: Texts, rng: Generator) -> Demo:
    """A document → the task to describe its subject."""
    source = pick(rng, texts.titled)
    disguised = disguise_of(texts, rng).document(source.document)
    title = disguised['title']
    fields = {'hops': 1, 'document': prompts.document_text(disguised)}
    demo = Demo('challenger', fields)
    demo.add_final_turn(title, task=f'Describe {title}.')
    return demo


# The solver and the proposer are the roles of all self-play systems and get more than half of the mixture.
ROLES = {
    'copy': Role(0.0, copy),
    'copy_few_words': Role(0.0, partial(copy, low=4, high=14)),
    'query': Role(0.0, query),
    'fill_one': Role(0.0, fill_one),
    'fill': Role(0.15, fill),
    'solver': Role(0.33, solver),
    'solver_with_path': Role(0.06, partial(solver, with_path=True)),
    'proposer': Role(0.24, proposer),
    'proposer_from_answer': Role(0.07, proposer_from_answer),
    'answer_from_documents': Role(0.07, answer_from_documents),
    'challenger': Role(0.03, challenger),
    'task_solver': Role(0.05, task_solver),
    # In the stages that name them only.
    'solver_two_hops': Role(0.0, english_two_hops.solver),
    'solver_with_path_two_hops': Role(0.0, partial(english_two_hops.solver, with_path=True)),
    'proposer_two_hops': Role(0.0, english_two_hops.proposer),
}
