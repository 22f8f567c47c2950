"""Demonstrations that the checkpoint for English texts is trained on: written-out episodes of every role.

The task of all roles is to find and to copy: a proposer copies a sentence with a span left out, a solver searches for
the sentence and copies the span. Thoughts are copies as well, with the span in square brackets, so that every token
of a question or an answer can be copied from a text that the policy sees.
"""

from __future__ import annotations

import dataclasses

from numpy.random import Generator

from zeroplay_jax.mini import cloze
from zeroplay_jax.mini.cloze import BLANK, Cloze
from zeroplay_jax.mini.demo import Demo, Role, think
from zeroplay_jax.mini.draws import pick, shuffled
from zeroplay_jax.mini.english_texts import Disguise, Texts, draw_cloze, invented_name
from zeroplay_jax.mini.library import Document
from zeroplay_jax.rollout import prompts
from zeroplay_jax.rollout.passages import passages_text

# Words of a query that is too short to find its sentence reliably.
_SHORT_QUERY_WORDS = 3
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


def _disguise(texts: Texts, rng: Generator) -> Disguise:
    """Returns the disguise of one episode; it changes nothing in half of the episodes."""
    return Disguise(rng, texts.names, _DISGUISED_SHARE)


# ---- texts of the roles ------------------------------------------------------------------------------------


def _query(case: Cloze) -> str:
    """Returns the search query for a question: the words around the blank."""
    return (case.left.rstrip() + case.right).strip()


def _marked(case: Cloze, with_right: bool) -> str:
    """Returns the sentence with its left-out span in square brackets, up to the span or with `with_right` to its end.

    The spaces inside the brackets give the span the same tokens as in running text.
    """
    marked = f'{case.left.rstrip()} [ {case.answer} ]'
    return marked + case.right if with_right else marked


def _add_answer(demo: Demo, case: Cloze) -> None:
    """Adds the final turn: as its thought the sentence up to the answer, then the answer."""
    demo.add_final_turn(_marked(case, with_right=False), answer=case.answer)


def _question_form(question: str) -> str:
    """Returns a user turn with a question, in ChatML; exercises put several of them into one episode."""
    return f'<|im_start|>user\nQuestion: {question}<|im_end|>\n<|im_start|>assistant\n'


# ---- exercises ---------------------------------------------------------------------------------------------


def copy(texts: Texts, rng: Generator, setting: EnglishSetting) -> Demo:
    """Writes words, then the same words again.

    Half of the texts are random words, which cannot be guessed: this forms copying attention heads early.
    """
    low, high = setting.copied_words
    count = int(rng.integers(low, high + 1))
    if rng.random() < 0.5:
        words = [_random_word(texts, rng) for _ in range(count)]
    else:
        text_words = pick(rng, texts.documents)['text'].split()
        start = int(rng.integers(0, max(1, len(text_words) - count)))
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
        return str(rng.integers(0, 10 ** int(rng.integers(1, 5))))
    return pick(rng, texts.words)


def query(texts: Texts, rng: Generator, setting: EnglishSetting) -> Demo:
    """Question → search; the episode ends there."""
    _, case = texts.draw(rng)
    case = _disguise(texts, rng).cloze(case)
    demo = Demo('solver', {'question': case.question})
    demo.add_policy_text(f'<search> {_query(case)}</search>')
    return demo


def fill_one(texts: Texts, rng: Generator, setting: EnglishSetting) -> Demo:
    """Writes a passage, then up to four questions about its sentences, each with its answer."""
    source = pick(rng, texts.sources)
    disguise = _disguise(texts, rng)
    demo = Demo()
    demo.add_documents([disguise.document(source.document)])
    for cases in shuffled(rng, source.cloze_lists)[:4]:
        _add_question(demo, disguise.cloze(draw_cloze(rng, cases)))
    return demo


def fill(texts: Texts, rng: Generator, setting: EnglishSetting) -> Demo:
    """Writes the passages of a search, then up to five questions about their sentences, each with its answer."""
    _, case = texts.draw(rng)
    documents = texts.search(_query(case))
    disguise = _disguise(texts, rng)
    cases = []
    for document in documents:
        for sentence in cloze.sentences(document['text']):
            sentence_cases = cloze.clozes(sentence)
            if sentence_cases:
                cases.append(draw_cloze(rng, sentence_cases))
    demo = Demo()
    demo.add_documents([disguise.document(document) for document in documents])
    for sentence_case in shuffled(rng, cases)[:5]:
        _add_question(demo, disguise.cloze(sentence_case))
    return demo


def _add_question(demo: Demo, case: Cloze) -> None:
    """Adds a question as prompt text, and its answer as the policy's text."""
    demo.add_prompt_text(_question_form(case.question))
    _add_answer(demo, case)


# ---- solvers -----------------------------------------------------------------------------------------------


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
        search_query = _query(case)
        is_short = rng.random() < setting.short_query
        if is_short:
            search_query = ' '.join(search_query.split()[:_SHORT_QUERY_WORDS])
        documents = texts.search(search_query)
        is_readable = any(case.sentence in _plain(result) for result in documents)
        # Drawn again if the passages found do not contain the sentence, because such a demonstration would teach to
        # guess. After a deliberately short query this is the intended error.
        if is_readable or is_short:
            break
    disguise = _disguise(texts, rng)
    answered = case
    if not is_readable:
        answered = _other_answer(documents, case, rng)
    elif rng.random() < setting.wrong_span:
        answered = _other_span(case)
    fields = {'question': disguise(case.left) + BLANK + disguise(case.right)}
    role = 'solver'
    if with_path:
        role = 'solver_with_path'
        fields['path'] = f'{disguise(document["title"])} > {disguise(case.answer)}'
    demo = Demo(role, fields)
    demo.add_policy_text(f'<search> {disguise(search_query)}</search>')
    demo.add_documents([disguise.document(result) for result in documents])
    _add_answer(demo, disguise.cloze(answered))
    return demo


def _plain(document: Document) -> str:
    """Returns the text of a passage with single spaces between words, as `cloze.sentences` has them."""
    return ' '.join(document['text'].split())


def _other_answer(documents: list[Document], case: Cloze, rng: Generator) -> Cloze:
    """Returns the cloze with an answer of the same kind out of passages that do not contain its sentence.

    If they have none of this kind, the answer is the title of the first passage.
    """
    for document in shuffled(rng, documents):
        for sentence in shuffled(rng, cloze.sentences(document['text'])):
            cases = [other for other in cloze.clozes(sentence) if other.kind == case.kind]
            if cases:
                return case._replace(answer=pick(rng, cases).answer)
    return case._replace(answer=documents[0]['title'])


def _other_span(case: Cloze) -> Cloze:
    """Returns the cloze with a wrong answer: the first word; of a single word, this and a neighbouring word."""
    words = case.answer.split()
    if len(words) > 1:
        return case._replace(answer=words[0])
    for word in case.right.split():
        # An answer with punctuation after it would still count as correct.
        if word[0].isalnum():
            return case._replace(answer=f'{case.answer} {word}')
    return case._replace(answer=f'{case.left.split()[-1]} {case.answer}')


def answer_from_documents(texts: Texts, rng: Generator, setting: EnglishSetting) -> Demo:
    """Question, its passage and up to two random ones → answer without a search."""
    document, case = texts.draw(rng)
    documents = [document]
    for _ in range(int(rng.integers(0, 3))):
        documents.append(pick(rng, texts.documents))
    disguise = _disguise(texts, rng)
    disguised = [disguise.document(each) for each in shuffled(rng, documents)]
    case = disguise.cloze(case)
    fields = {
        'documents': passages_text([disguised], 'search_r1'),
        'question': case.question,
    }
    demo = Demo('answer_from_documents', fields)
    _add_answer(demo, case)
    return demo


def task_solver(texts: Texts, rng: Generator, setting: EnglishSetting) -> Demo:
    """Open task → search → the first sentences of the passage that the task asks for."""
    while True:
        title = pick(rng, texts.titled).document['title']
        documents = texts.search(title)
        described = [result for result in documents if result['title'] == title]
        # Drawn again if no passage found has the title: it may take a longer query to find it.
        if described:
            break
    disguise = _disguise(texts, rng)
    sentences = cloze.sentences(described[0]['text'])[:2]
    answer = ' '.join(sentences) or title
    demo = Demo('task_solver', {'task': f'Describe {disguise(title)}.'})
    demo.add_policy_text(f'<search> {disguise(title)}</search>')
    demo.add_documents([disguise.document(result) for result in documents])
    demo.add_final_turn(disguise(title), answer=disguise(answer))
    return demo


# ---- proposers ---------------------------------------------------------------------------------------------


def proposer(texts: Texts, rng: Generator, setting: EnglishSetting) -> Demo:
    """A document → a question about one of its sentences, and the answer."""
    document, case = texts.draw(rng)
    disguise = _disguise(texts, rng)
    fields = {'hops': 1, 'document': prompts.document_text(disguise.document(document))}
    demo = Demo('proposer', fields)
    _add_proposal(demo, disguise.cloze(case), rng, setting)
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
                cases += [other for other in cloze.clozes(sentence) if other.answer == case.answer]
        if cases:
            break
    disguise = _disguise(texts, rng)
    answer = disguise(case.answer)
    demo = Demo('proposer_from_answer', {'hops': 1, 'answer': answer})
    demo.add_policy_text(f'<search> {answer}</search>')
    demo.add_documents([disguise.document(result) for result in documents])
    _add_proposal(demo, disguise.cloze(pick(rng, cases)), rng, setting)
    return demo


def _add_proposal(demo: Demo, case: Cloze, rng: Generator, setting: EnglishSetting) -> None:
    """Adds the final turn of a proposer: as its thought the sentence with the answer in brackets; question; answer.

    As a deliberate error, with the probability `setting.malformed`, one of the two is missing.
    """
    tags = {'question': case.question, 'answer': case.answer}
    if rng.random() < setting.malformed:
        # The parser of self-play rejects a proposal without both tags.
        missing_tag = 'answer' if rng.random() < 0.5 else 'question'
        del tags[missing_tag]
    demo.add_final_turn(_marked(case, with_right=True), **tags)


def challenger(texts: Texts, rng: Generator, setting: EnglishSetting) -> Demo:
    """A document → the task to describe its subject."""
    document = pick(rng, texts.titled).document
    disguised = _disguise(texts, rng).document(document)
    title = disguised['title']
    fields = {'hops': 1, 'document': prompts.document_text(disguised)}
    demo = Demo('challenger', fields)
    demo.add_policy_text(f'{think(title)}<task> Describe {title}.</task><|im_end|>')
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
}
