"""Computes format scores of rollouts, and SSP's rule gate for proposals. Works on strings and counts, without JAX."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from zeroplay_jax.objectives.answers import normalize_answer


def drzero_format(
    turns: Sequence[str],
    *,
    calls: int,
    responses: int,
    hops: int,
    question: str | None,
    answer: str | None,
    source: str,
    retrieved: str = '',
) -> dict[str, float]:
    """Computes Dr. Zero's format score of a proposal, following its code (r_f of eq. 4 is half of `raw`).

    Args:
      turns: text of each assistant turn.
      calls: well-formed tool calls; the recipe `drzero` counts those that succeeded.
      responses: tool responses received, error texts included.
      hops: the requested hop count.
      question, answer: the extracted texts; None or blank: missing.
      source: the document that the proposal starts from.
      retrieved: text of all tool responses.

    Returns:
      Parts, each in [0, 1]:
      think: share of turns that begin with a closed `<think>` block.
      tool: min((1 + calls)/hops, 1) if calls equal responses and there are any; otherwise 1 for one hop and 0 for more.
      answer: 1 up to five words, ½ up to ten, else 0; 0 unless the answer is yes or no or occurs in the source or,
        where calls equal responses, in the retrieved text. All in normal form.
      raw: (1 + think + tool + answer)/4, or 0 when the question or the answer is missing or the question contains the
        answer.
    """
    question = (question or '').strip()
    answer = (answer or '').strip()
    think, tool = _drzero_think_and_tool(turns, calls, responses, hops)
    visible_text = source
    if calls == responses > 0:
        visible_text = f'{source}\n\n{retrieved}'

    normal_answer = normalize_answer(answer)
    # Length is scored because a solver's answer hardly ever matches a long one exactly.
    num_words = len(normal_answer.split())
    is_grounded = normal_answer in ('yes', 'no') or normal_answer in normalize_answer(visible_text)
    if num_words == 0 or not is_grounded:
        brevity = 0.0
    elif num_words <= 5:
        brevity = 1.0
    elif num_words <= 10:
        brevity = 0.5
    else:
        brevity = 0.0

    # A leaked answer makes the question trivial, so its format counts for nothing. An answer with an empty normal form
    # is a substring of every question and scores 0 as well.
    leaks_answer = normal_answer in normalize_answer(question)
    raw = 0.0
    if question and answer and not leaks_answer:
        raw = (1.0 + think + tool + brevity) / 4
    return {'think': think, 'tool': tool, 'answer': brevity, 'raw': raw}


def drzero_separate_format(
    turns: Sequence[str],
    *,
    calls: int,
    responses: int,
    hops: int,
    question: str | None,
    answer: str | None,
) -> dict[str, float]:
    """Computes Dr. Zero's format score of a proposal, following its paper (appendix A): four parts, one by one.

    How much of a part is reached by some turns or calls only is not in the paper and is taken from the code.

    Args:
      turns, calls, responses, hops, question, answer: as in `drzero_format`.

    Returns:
      Parts, each in [0, 1]: 'think' and 'tool' as in `drzero_format`; 'question' and 'answer', whether there is one;
      'raw', the mean of the four.
    """
    think, tool = _drzero_think_and_tool(turns, calls, responses, hops)
    has_question = float(bool((question or '').strip()))
    has_answer = float(bool((answer or '').strip()))
    raw = (think + tool + has_question + has_answer) / 4
    return {
        'think': think,
        'tool': tool,
        'question': has_question,
        'answer': has_answer,
        'raw': raw,
    }


def _drzero_think_and_tool(
    turns: Sequence[str], calls: int, responses: int, hops: int
) -> tuple[float, float]:
    """Returns the parts 'think' and 'tool' of `drzero_format`."""
    num_thoughts = sum(_begins_with_thought(turn) for turn in turns)
    think = num_thoughts / max(1, len(turns))
    # The counts differ after a call without a response, or one that was answered by an error text. As in the released
    # code, such a rollout counts as one without searches.
    if calls == responses > 0:
        # A question of n hops takes n − 1 searches: the source document is the first hop.
        return think, min((1 + calls) / hops, 1.0)
    return think, float(hops == 1)


def scope_challenger_format(
    turns: Sequence[str],
    *,
    searches: int,
    malformed: int,
    expected: int,
    task: str | None,
    code: bool = False,
) -> dict[str, float]:
    """Computes SCOPE's format score of a challenger's rollout (r_fmt of eq. 4, appendix F.1).

    Args:
      turns: text of each assistant turn.
      searches: turns with a well-formed search.
      malformed: turns with a search that cannot be parsed.
      expected: requested number of search turns.
      task: content of the `<task>` in the last turn; None or blank: missing. (The paper also names a `<question>`
        inside it, which its own prompt does not ask for.)
      code: score as in the released code instead of the paper.

    Returns:
      Parts, each in [0, 1]:
      think: share of turns with a closed `<think>` block; in the code the block must begin the turn.
      tool: min(searches/expected, 1); in the code a malformed search cancels a well-formed one, and the part is 1 if
        none is expected.
      task: whether there is one.
      raw: the mean of the parts. At 0 the task is not given to the solver and earns nothing.
    """
    # The paper counts well-formed searches only; its code also penalises malformed ones.
    credited_searches = searches
    if code:
        credited_searches = max(searches - malformed, 0)
    tool = 1.0
    if expected:
        tool = min(credited_searches / expected, 1.0)
    has_task = float(bool((task or '').strip()))
    return _scope_format(turns, code, {'tool': tool, 'task': has_task})


def scope_solver_format(
    turns: Sequence[str], *, searches: int, answer: str | None, code: bool = False
) -> dict[str, float]:
    """Computes SCOPE's format score of a solver's rollout (r_fmt of eq. 6, appendix F.2).

    Args:
      turns: text of each assistant turn.
      searches: well-formed calls in all turns but the last.
      answer: the extracted answer; None or blank: missing.
      code: score as in the released code instead of the paper.

    Returns:
      Parts, each in [0, 1]:
      think: share of turns with a closed `<think>` block; in the code the block must begin the turn.
      tool: min(searches/(turns − 1), 1); 0 for a single turn, a case that the paper leaves open.
      answer: whether there is one.
      raw: the mean of the parts.
    """
    # The last turn gives the answer, so n turns have n − 1 opportunities to search.
    tool = 0.0
    if len(turns) > 1:
        tool = min(searches / (len(turns) - 1), 1.0)
    has_answer = float(bool((answer or '').strip()))
    return _scope_format(turns, code, {'tool': tool, 'answer': has_answer})


def _scope_format(turns: Sequence[str], code: bool, parts: dict[str, float]) -> dict[str, float]:
    """Returns the parts with 'think' added, and their mean as 'raw'."""
    # The code requires the turn to begin with its thought, the paper only to contain one.
    has_thought = _contains_thought
    if code:
        has_thought = _begins_with_thought
    think = sum(map(has_thought, turns)) / max(1, len(turns))
    # `think` comes first, so that logs list the parts in the paper's order.
    parts = {'think': think, **parts}
    return parts | {'raw': sum(parts.values()) / 3}


def _begins_with_thought(text: str) -> bool:
    return text.lstrip().startswith('<think>') and '</think>' in text


def _contains_thought(text: str) -> bool:
    _, _, after_opening_tag = text.partition('<think>')
    return '</think>' in after_opening_tag


_TAG = re.compile(r'<(/?)(\w+)>\s*')


def ssp_format(turns: Sequence[str]) -> bool:
    """Returns whether a response keeps to the format (SSP, appendix A.2): its turns have no text outside tags.

    A turn may go without a thought, as in a solution that the paper prints (table 10), but not end with one.
    """
    return all(map(_is_tagged, turns))


def _is_tagged(turn: str) -> bool:
    """Returns whether a turn is a sequence of closed elements, of which the last one is no thought."""
    turn = turn.lstrip()
    # One pass, because a pattern would try every way to pair the tags of a turn that repeats them. An element may hold
    # tags of its own name: it ends with any of the later closing ones.
    opened = set()
    end, name = 0, ''
    for tag in _TAG.finditer(turn):
        closing, name = tag.groups()
        if not closing and tag.start() == end:
            opened.add(name)
        elif closing and name in opened:
            end = tag.end()
    return end == len(turn) and name not in ('', 'think')


def ssp_gate(
    question: str | None,
    answers: Sequence[str],
    queries: Sequence[str],
    *,
    chars: tuple[float | int, float | int] = (10, math.inf),
    words: int = 1,
    searches: int = 1,
    distinct: bool = False,
    whole_words: bool = True,
) -> str | None:
    """Returns why SSP's rule gate rejects a proposal before any model is queried (section 3.3); None if it passes.

    The paper rejects a proposal that has no question, is "excessively short" (without a number; 10 characters are the
    code's), never searched, or contains the answer; those are the defaults. The released code is stricter:
    chars=(10, 1000), words=10, searches=2, distinct=True, whole_words=False.

    Args:
      question: the extracted question; None or blank: missing.
      answers: the answers that the question was made from, at least one.
      queries: the proposer's search queries, in order.
      chars: shortest and longest question.
      words: fewest words of a question.
      searches: fewest queries.
      distinct: whether a repeated query is a fault.
      whole_words: whether an answer is leaked only by whole words in normal form. False: by any substring, ignoring
        case, which rejects most questions whose answer is as short as "no" or "1".

    Returns:
      'no_question', 'short_question', 'long_question', 'leaks_answer', 'few_searches', 'repeated_query' or None: the
      first that holds. An answer with an empty normal form ("the") counts as leaked.
    """
    # The order of the checks is the order of the reasons: the first fault is the one that is counted.
    shortest, longest = chars
    question = (question or '').strip()
    if not question:
        return 'no_question'
    if len(question) < shortest or len(question.split()) < words:
        return 'short_question'
    if len(question) > longest:
        return 'long_question'
    if any(_leaks(question, answer, whole_words) for answer in answers):
        return 'leaks_answer'
    if len(queries) < searches:
        return 'few_searches'
    # Repeated queries pad the number of searches without new passages.
    distinct_queries = {query.strip() for query in queries}
    if distinct and len(distinct_queries) < len(queries):
        return 'repeated_query'
    return None


def _leaks(question: str, answer: str, whole_words: bool) -> bool:
    """Returns whether the question contains the answer; see `ssp_gate` for `whole_words`."""
    if not whole_words:
        return answer.lower() in question.lower()
    normal_answer = normalize_answer(answer)
    if not normal_answer:
        return True
    # Words are separated by single spaces in normal form: with spaces around both, a substring is a run of words.
    return f' {normal_answer} ' in f' {normalize_answer(question)} '
