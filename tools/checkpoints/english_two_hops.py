"""Demonstrations with questions of two hops over English texts (`data/chains.py`): the solver's and the proposer's.

As in those of one hop, every token of a question, a search or an answer can be copied from a text that the policy sees.
"""

from __future__ import annotations

from numpy.random import Generator

from tools.checkpoints.demo import Demo, think
from tools.checkpoints.english_forms import (
    SHORT_QUERY_WORDS,
    EnglishSetting,
    add_answer,
    add_proposal,
    disguise_of,
    marked,
    other_answer,
    other_span,
    plain,
    query_of,
)
from tools.checkpoints.english_texts import Disguise, Link, Texts
from tools.checkpoints.library import Document
from zeroplay_jax.extras.inputs.chains import Chain
from zeroplay_jax.rollout import prompts

# Share of the episodes with a chain that the passages have. The others join two random passages, so that the policy
# sees thousands of bridges instead of dozens.
_REAL_SHARE = 0.3


def _disguise_of_link(texts: Texts, rng: Generator, link: Link) -> Disguise:
    """Returns the disguise of an episode, in which both passages mention the bridge."""
    disguise = disguise_of(texts, rng)
    if link.replaced_name:
        disguise.merge(link.replaced_name, link.chain.first.answer)
    return disguise


def _disguised(disguise: Disguise, chain: Chain) -> Chain:
    """Returns a disguised chain."""
    # Not the question as a whole: the disguise would replace the digit of its mark.
    return Chain(disguise.cloze(chain.first), disguise.cloze(chain.second))


def _contains(documents: list[Document], sentence: str) -> bool:
    """Returns whether one of the passages contains a sentence."""
    return any(sentence in plain(document) for document in documents)


def solver(texts: Texts, rng: Generator, setting: EnglishSetting) -> Demo:
    """Question → search for its sentence → search for its clause, with the name read → answer."""
    return _solution(texts, rng, setting, with_path=False)


def solver_with_path(texts: Texts, rng: Generator, setting: EnglishSetting) -> Demo:
    """Question and how it was made → two searches → answer; always correct."""
    return _solution(texts, rng, EnglishSetting(), with_path=True)


def _solution(texts: Texts, rng: Generator, setting: EnglishSetting, with_path: bool) -> Demo:
    """Returns an episode of `solver`, or with `with_path` of `solver_with_path`.

    Deliberate errors, with the probabilities of `setting`: the first query consists of the first words of the question;
    and then, if no passage found contains the sentence, the solver answers at once, from another sentence. Or the span
    of the answer is wrong.
    """
    while True:
        link = texts.draw_link(rng, _REAL_SHARE)
        first, second = link.chain
        first_query = query_of(first)
        is_short = rng.random() < setting.short_query
        if is_short:
            first_query = ' '.join(first_query.split()[:SHORT_QUERY_WORDS])
        first_documents = texts.search(first_query)
        sentence = first.sentence
        if link.replaced_name:
            sentence = first._replace(answer=link.replaced_name).sentence
        has_bridge = _contains(first_documents, sentence)
        second_documents = texts.search(query_of(second))
        # Drawn again if a passage is not found, because such a demonstration would teach to guess. After a deliberately
        # short query this is the intended error.
        if (has_bridge or is_short) and _contains(second_documents, second.sentence):
            break
    disguise = _disguise_of_link(texts, rng, link)
    chain = _disguised(disguise, link.chain)
    role = 'solver'
    fields = {'question': chain.question}
    if with_path:
        role = 'solver_with_path'
        path = [disguise(link.first['title']), chain.first.answer, chain.second.answer]
        fields['path'] = ' > '.join(path)
    demo = Demo(role, fields)
    demo.add_policy_text(f'<search> {disguise(first_query)}</search>')
    demo.add_documents([disguise.document(document) for document in first_documents])
    if not has_bridge:
        add_answer(demo, disguise.cloze(other_answer(first_documents, second, rng)))
        return demo
    bridge_thought = think(marked(chain.first, with_right=False))
    demo.add_policy_text(f'{bridge_thought}<search> {query_of(chain.second)}</search>')
    demo.add_documents([disguise.document(document) for document in second_documents])
    answered = second
    if rng.random() < setting.wrong_span:
        answered = other_span(second)
    add_answer(demo, disguise.cloze(answered))
    return demo


def proposer(texts: Texts, rng: Generator, setting: EnglishSetting) -> Demo:
    """A document → a search for a name in it → a question about this name, and the answer."""
    return _proposal(texts, rng, setting, with_link=False)


def proposer_with_link(texts: Texts, rng: Generator, setting: EnglishSetting) -> Demo:
    """A document that says which name leads on → a search for it → a question about this name, and the answer."""
    return _proposal(texts, rng, setting, with_link=True)


def _proposal(texts: Texts, rng: Generator, setting: EnglishSetting, with_link: bool) -> Demo:
    """Returns an episode of `proposer`, or with `with_link` of `proposer_with_link`."""
    while True:
        link = texts.draw_link(rng, _REAL_SHARE)
        documents = texts.search(link.chain.first.answer)
        # Drawn again if the search for the name does not return the clause.
        if not _contains(documents, link.chain.second.sentence):
            continue
        disguise = _disguise_of_link(texts, rng, link)
        chain = _disguised(disguise, link.chain)
        document = disguise.document(link.first)
        if not with_link:
            break
        document['link'] = chain.first.answer
        # Drawn again if an earlier sentence has the name, because the link would be there.
        if marked(chain.first, with_right=True) in ' '.join(
            prompts.document_text(document).split()
        ):
            break
    demo = Demo('proposer', {'hops': 2, 'document': prompts.document_text(document)})
    bridge_thought = think(marked(chain.first, with_right=True))
    demo.add_policy_text(f'{bridge_thought}<search> {chain.first.answer}</search>')
    demo.add_documents([disguise.document(retrieved) for retrieved in documents])
    add_proposal(demo, chain.second, rng, setting, question=chain.question)
    return demo
