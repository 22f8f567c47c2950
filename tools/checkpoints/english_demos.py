"""Demonstrations that the checkpoint for English texts is trained on: written-out episodes of every role.

The task of all roles is to find and to copy: a proposer copies a sentence with a span left out, a solver searches for
the sentence and copies the span. Thoughts are copies as well, with the span in square brackets, so that every token
of a question or an answer can be copied from a text that the policy sees.
"""

from __future__ import annotations

from numpy.random import Generator

from tools.checkpoints import english_two_hops
from tools.checkpoints.demo import Demo, Role
from tools.checkpoints.english_forms import (
    SHORT_QUERY_WORDS,
    EnglishSetting,
    add_answer,
    add_proposal,
    disguise_of,
    other_answer,
    other_span,
    plain,
    query_of,
)
from tools.checkpoints.english_texts import Texts, draw_cloze, invented_name
from zeroplay_jax.extras.inputs import cloze
from zeroplay_jax.extras.inputs.cloze import BLANK, Cloze
from zeroplay_jax.mini.names import pick, shuffled
from zeroplay_jax.rollout import prompts
from zeroplay_jax.rollout.foreign_text import passages_text


def _question_form(question: str) -> str:
    """Returns a user turn with a question, in ChatML; exercises put several of them into one episode."""
    return f'<|im_start|>user\nQuestion: {question}<|im_end|>\n<|im_start|>assistant\n'


def copy(texts: Texts, rng: Generator, setting: EnglishSetting) -> Demo:
    """Writes words, then the same words again.

    Half of the texts are random words, which cannot be guessed: this forms copying attention heads early.
    """
    low, high = setting.copied_words
    count = int(rng.integers(low, high + 1))
    if rng.random() < 0.5:
        words = [_random_word(texts, rng) for _ in range(count)]
    else:
        document = pick(rng, texts.documents)
        text_words = document['text'].split()
        last_start = len(text_words) - count
        start = rng.integers(0, max(1, last_start))
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


def query(texts: Texts, rng: Generator, setting: EnglishSetting) -> Demo:
    """Question → search; the episode ends there."""
    _, case = texts.draw(rng)
    case = disguise_of(texts, rng).cloze(case)
    demo = Demo('solver', {'question': case.question})
    demo.add_policy_text(f'<search> {query_of(case)}</search>')
    return demo


def fill_one(texts: Texts, rng: Generator, setting: EnglishSetting) -> Demo:
    """Writes a passage, then up to four questions about its sentences, each with its answer."""
    source = pick(rng, texts.sources)
    disguise = disguise_of(texts, rng)
    demo = Demo()
    demo.add_documents([disguise.document(source.document)])
    cloze_lists = shuffled(rng, source.cloze_lists)
    for cases in cloze_lists[:4]:
        case = draw_cloze(rng, cases)
        _add_question(demo, disguise.cloze(case))
    return demo


def fill(texts: Texts, rng: Generator, setting: EnglishSetting) -> Demo:
    """Writes the passages of a search, then up to five questions about their sentences, each with its answer."""
    _, case = texts.draw(rng)
    documents = texts.search(query_of(case))
    disguise = disguise_of(texts, rng)
    cases = []
    for document in documents:
        for sentence in cloze.sentences(document['text']):
            sentence_cases = cloze.clozes(sentence)
            if sentence_cases:
                sentence_case = draw_cloze(rng, sentence_cases)
                cases.append(sentence_case)
    demo = Demo()
    demo.add_documents(disguise.documents(documents))
    cases = shuffled(rng, cases)
    for sentence_case in cases[:5]:
        _add_question(demo, disguise.cloze(sentence_case))
    return demo


def _add_question(demo: Demo, case: Cloze) -> None:
    """Adds a question as prompt text, and its answer as the policy's text."""
    demo.add_prompt_text(_question_form(case.question))
    add_answer(demo, case)


def solver(texts: Texts, rng: Generator, setting: EnglishSetting) -> Demo:
    """Question → search → answer."""
    return _solution(texts, rng, setting, with_path=False)


def solver_with_path(texts: Texts, rng: Generator, setting: EnglishSetting) -> Demo:
    """Question and how it was made → search → answer; always correct."""
    # Written without errors, because self-play distils this role into the plain solver: it has to be the better one.
    return _solution(texts, rng, EnglishSetting(), with_path=True)


def _solution(texts: Texts, rng: Generator, setting: EnglishSetting, with_path: bool) -> Demo:
    """Returns an episode of `solver`, or with `with_path` of `solver_with_path`: question → search → answer.

    Deliberate errors, with the probabilities of `setting`: the query consists of the first words of the question; and
    then, if no passage found contains the sentence, the answer is copied from another sentence. Or the span of the
    answer is wrong (`_other_span`).
    """
    while True:
        document, case = texts.draw(rng)
        search_query = query_of(case)
        is_short = rng.random() < setting.short_query
        if is_short:
            query_words = search_query.split()
            search_query = ' '.join(query_words[:SHORT_QUERY_WORDS])
        documents = texts.search(search_query)
        is_readable = any(case.sentence in plain(result) for result in documents)
        # Drawn again if the passages found do not contain the sentence, because such a demonstration would teach to
        # guess. After a deliberately short query this is the intended error.
        if is_readable or is_short:
            break
    disguise = disguise_of(texts, rng)
    answered = case
    if not is_readable:
        answered = other_answer(documents, case, rng)
    elif rng.random() < setting.wrong_span:
        answered = other_span(case)
    left = disguise(case.left)
    right = disguise(case.right)
    fields = {'question': left + BLANK + right}
    role = 'solver'
    if with_path:
        role = 'solver_with_path'
        title = disguise(document['title'])
        answer = disguise(case.answer)
        fields['path'] = f'{title} > {answer}'
    demo = Demo(role, fields)
    demo.add_policy_text(f'<search> {disguise(search_query)}</search>')
    demo.add_documents(disguise.documents(documents))
    add_answer(demo, disguise.cloze(answered))
    return demo


def answer_from_documents(texts: Texts, rng: Generator, setting: EnglishSetting) -> Demo:
    """Question, its passage and up to two random ones → answer without a search."""
    document, case = texts.draw(rng)
    documents = [document]
    distractors = rng.integers(0, 3)
    for _ in range(distractors):
        documents.append(pick(rng, texts.documents))
    disguise = disguise_of(texts, rng)
    documents = shuffled(rng, documents)
    disguised = disguise.documents(documents)
    case = disguise.cloze(case)
    fields = {
        'documents': passages_text([disguised], 'search_r1'),
        'question': case.question,
    }
    demo = Demo('answer_from_documents', fields)
    add_answer(demo, case)
    return demo


def task_solver(texts: Texts, rng: Generator, setting: EnglishSetting) -> Demo:
    """Open task → search → the first sentences of the passage that the task asks for."""
    while True:
        source = pick(rng, texts.titled)
        title = source.document['title']
        documents = texts.search(title)
        described = [result for result in documents if result['title'] == title]
        # Drawn again if no passage found has the title: it may take a longer query to find it.
        if described:
            break
    disguise = disguise_of(texts, rng)
    sentences = cloze.sentences(described[0]['text'])
    answer = ' '.join(sentences[:2]) or title
    disguised_title = disguise(title)
    demo = Demo('task_solver', {'task': f'Describe {disguised_title}.'})
    demo.add_policy_text(f'<search> {disguised_title}</search>')
    demo.add_documents(disguise.documents(documents))
    demo.add_final_turn(disguised_title, answer=disguise(answer))
    return demo


def proposer(texts: Texts, rng: Generator, setting: EnglishSetting) -> Demo:
    """A document → a question about one of its sentences, and the answer."""
    document, case = texts.draw(rng)
    disguise = disguise_of(texts, rng)
    disguised = disguise.document(document)
    fields = {'hops': 1, 'document': prompts.document_text(disguised)}
    demo = Demo('proposer', fields)
    add_proposal(demo, disguise.cloze(case), rng, setting)
    return demo


def proposer_from_answer(texts: Texts, rng: Generator, setting: EnglishSetting) -> Demo:
    """An answer → search for it → a question about a sentence that contains it."""
    # The search does not always return a passage that names the answer; such attempts are discarded.
    while True:
        _, case = texts.draw(rng)
        documents = texts.search(case.answer)
        cases = []
        for document in documents:
            for sentence in cloze.sentences(document['text']):
                for other in cloze.clozes(sentence):
                    if other.answer == case.answer:
                        cases.append(other)
        if cases:
            break
    disguise = disguise_of(texts, rng)
    answer = disguise(case.answer)
    demo = Demo('proposer_from_answer', {'hops': 1, 'answer': answer})
    demo.add_policy_text(f'<search> {answer}</search>')
    demo.add_documents(disguise.documents(documents))
    case = disguise.cloze(pick(rng, cases))
    add_proposal(demo, case, rng, setting)
    return demo


def challenger(texts: Texts, rng: Generator, setting: EnglishSetting) -> Demo:
    """A document → the task to describe its subject."""
    source = pick(rng, texts.titled)
    disguise = disguise_of(texts, rng)
    disguised = disguise.document(source.document)
    title = disguised['title']
    fields = {'hops': 1, 'document': prompts.document_text(disguised)}
    demo = Demo('challenger', fields)
    demo.add_final_turn(title, task=f'Describe {title}.')
    return demo


# The solver and the proposer are the roles of all self-play systems and get more than half of the mixture.
ROLES = {
    'copy': Role(0.0, copy),
    'query': Role(0.0, query),
    'fill_one': Role(0.0, fill_one),
    'fill': Role(0.15, fill),
    'solver': Role(0.33, solver),
    'solver_with_path': Role(0.06, solver_with_path),
    'proposer': Role(0.24, proposer),
    'proposer_from_answer': Role(0.07, proposer_from_answer),
    'answer_from_documents': Role(0.07, answer_from_documents),
    'challenger': Role(0.03, challenger),
    'task_solver': Role(0.05, task_solver),
    # In the stages that name them only.
    'solver_two_hops': Role(0.0, english_two_hops.solver),
    'solver_with_path_two_hops': Role(0.0, english_two_hops.solver_with_path),
    'proposer_two_hops': Role(0.0, english_two_hops.proposer),
    'proposer_with_link': Role(0.0, english_two_hops.proposer_with_link),
}
