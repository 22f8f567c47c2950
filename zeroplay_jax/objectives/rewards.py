"""Rewards: strings and counts in, numbers out. No JAX, no tokens, no state."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r'\b(a|an|the)\b')
_PUNCTUATION = str.maketrans('', '', string.punctuation)


def normalize_answer(text: str) -> str:
    """The normal form in which answers are compared (SQuAD; Search-R1, Dr. Zero).

    Lower case; ASCII punctuation deleted, not spaced, so that a hyphen fuses its words; whole words a, an,
    the dropped; white space squeezed. Other punctuation and diacritics stay.
    """
    return ' '.join(_ARTICLES.sub(' ', text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str | None, golds: Sequence[str] | str) -> bool:
    """Whether a prediction equals one of the accepted answers in normal form.

    None (no answer could be extracted) and blank predictions never match. A text that is all articles and
    punctuation ("A", "?") has an empty normal form and is compared as it stands, or every such answer would
    equal every other; this is stricter than the published scorers, which differ nowhere else.

    Args:
      prediction: the extracted answer.
      golds: accepted answers; a single string is one answer.
    """
    wanted = _comparable(prediction or '')
    golds = [golds] if isinstance(golds, str) else golds
    return bool(wanted) and any(wanted == _comparable(gold) for gold in golds)


def sub_exact_match(prediction: str | None, golds: Sequence[str] | str) -> bool:
    """Whether an accepted answer stands in the prediction, in normal form (subEM; DSPO's reward).

    A substring, not a word: "2" stands in "1942", and the longer a prediction, the better its chances; log its
    length. Answers with an empty normal form count only as in `exact_match`.

    Args:
      prediction: the extracted answer; None and blank never match.
      golds: accepted answers; a single string is one answer.
    """
    found = normalize_answer(prediction or '')
    golds = [golds] if isinstance(golds, str) else golds
    wanted = filter(None, map(normalize_answer, golds))
    return any(gold in found for gold in wanted) or exact_match(prediction, golds)


def f1(prediction: str | None, golds: Sequence[str] | str) -> float:
    """Best F1 of the words of the prediction against those of an accepted answer, in normal form (SQuAD).

    Words count as often as they occur. None and blank predictions score 0.

    Args:
      prediction: the extracted answer.
      golds: accepted answers; a single string is one answer.

    Returns:
      A number in [0, 1].
    """
    words = Counter(_comparable(prediction or '').split())
    best = 0.0
    for gold in [golds] if isinstance(golds, str) else golds:
        wanted = Counter(_comparable(gold).split())
        common = (words & wanted).total()
        best = max(best, 2 * common / max(1, words.total() + wanted.total()))
    return best


def _comparable(text: str) -> str:
    return normalize_answer(text) or text.strip().lower()


def extract_last(text: str, tag: str) -> str | None:
    """Content of the last *closed* `<tag>…</tag>`, stripped; None if there is none.

    An opening tag pairs with the next closing tag, as in the non-greedy search of the published scorers; a
    tag left open at the end is ignored.
    """
    closed = text.split(f'</{tag}>')[:-1]
    for part in reversed(closed):
        _, opened, content = part.partition(f'<{tag}>')
        if opened:
            return content.strip()
    return None


def difficulty(solved: float, n: int, kind: str = 'linear', target: float = 0.5) -> float:
    """What a question is worth to its proposer when k of n solver rollouts answered it; graded ones add up to k.

    'linear': (n − k)/(n − 1) for 0 < k < n, else 0; best at k = 1 (Dr. Zero eq. 4, π-Play eq. 4).
    'one_minus': 1 − k/n, 1 also where nobody solved it; so the question must have been verified (SSP eq. 7).
    'parabolic': 4·p·(1 − p) with p = k/n, best at one half (Dr. Zero's ablation, table 7).
    'triangle': `triangle` of p, best at `target` (SCOPE eq. 5).

    Raises:
      ValueError: no rollout, k outside 0 … n, or an unknown kind.
    """
    if n < 1 or not 0 <= solved <= n:
        raise ValueError(
            f'difficulty: {solved} of {n} solved; needs n ≥ 1 rollouts and 0 ≤ solved ≤ n'
        )
    if kind == 'linear':
        return (n - solved) / max(n - 1, 1) if 0 < solved < n else 0.0
    if kind == 'one_minus':
        return 1 - solved / n
    if kind == 'parabolic':
        return 4.0 * solved * (n - solved) / n**2
    if kind != 'triangle':
        raise ValueError(
            f"difficulty: kind is {kind!r}; choose 'linear', 'one_minus', 'parabolic' or 'triangle'"
        )
    return triangle(solved / n, target)


def triangle(score: float, target: float = 0.5) -> float:
    """Worth of a task of this mean score: max(0, 1 − |ḡ − τ|/min(τ, 1 − τ)) (SCOPE eq. 5).

    Best at the target τ; at τ = ½ zero at both ends. (For other targets the released code falls to 0 at both ends
    too, on the longer side more slowly.)

    Raises:
      ValueError: a target outside 0 … 1, the ends excluded.
    """
    if not 0 < target < 1:
        raise ValueError(f'triangle: target {target} must lie between 0 and 1')
    return max(0.0, 1 - abs(score - target) / min(target, 1 - target))


def length_factor(
    tokens: int, soft: int = 1024, hard: int = 2048, floor: float = 0.05, cutoff: int | None = None
) -> float:
    """By what an answer's score is multiplied for its length: 1 up to `soft`, a cosine down to `floor` (SCOPE eq. 7).

    Args:
      tokens: length of the answer.
      soft, hard: where the decline begins and ends, in tokens.
      floor: what is left from `hard` on.
      cutoff: beyond this many tokens nothing is left (the released code: 2·hard; None: the paper).

    Raises:
      ValueError: limits that are not 0 ≤ soft < hard, or a floor outside 0 … 1.
    """
    if not (0 <= soft < hard and 0 <= floor <= 1):
        raise ValueError(
            f'length_factor: needs 0 ≤ soft < hard and floor in 0 … 1, got {soft}, {hard}, {floor}'
        )
    if cutoff is not None and tokens > cutoff:
        return 0.0
    share = min(max(tokens - soft, 0) / (hard - soft), 1.0)
    return floor + (1 - floor) / 2 * (1 + math.cos(math.pi * share))


def search_bonus(calls: int, enough: int = 3) -> float:
    """Share of the searches that are paid for: min(calls/enough, 1) (SCOPE appendix F.2).

    Raises:
      ValueError: a negative count or `enough` below 1.
    """
    if calls < 0 or enough < 1:
        raise ValueError(f'search_bonus: needs calls ≥ 0 and enough ≥ 1, got {calls}, {enough}')
    return min(calls / enough, 1.0)


def overlong_penalty(tokens: int, limit: int, buffer: int, factor: float = 1.0) -> float:
    """What a response loses that comes near its limit: min((limit − buffer − tokens)/buffer·factor, 0) (DAPO).

    0 up to limit − buffer, −factor at the limit, and on below that beyond it.

    Args:
      tokens: trained tokens of the response.
      limit: longest response.   buffer: over how many tokens before it the penalty grows.

    Raises:
      ValueError: a buffer that is not 0 < buffer ≤ limit.
    """
    if not 0 < buffer <= limit:
        raise ValueError(f'overlong_penalty: needs 0 < buffer ≤ limit, got {buffer}, {limit}')
    return min((limit - buffer - tokens) / buffer * factor, 0.0)


def rubric_score(
    grades: Sequence[bool | None], weights: Sequence[float] | None = None, coverage: float = 0.5
) -> float | None:
    """Σ w·b / Σ w over the items of a rubric (SCOPE eq. 1; the paper's weights are all 1).

    Args:
      grades: per item whether it is met; None where the judge gave no readable grade, which counts as not met.
      weights: per item, not negative.
      coverage: least share of items with a grade (the released code's ½).

    Returns:
      A number in [0, 1], or None where fewer items were graded: the answer has no score.

    Raises:
      ValueError: no items, weights of another number, negative or all 0.
    """
    weights = [1.0] * len(grades) if weights is None else weights
    if not grades or len(weights) != len(grades) or min(weights) < 0 or not sum(weights) > 0:
        raise ValueError(
            f'rubric_score: {len(grades)} grades need as many weights ≥ 0, not all 0; got {weights}'
        )
    if sum(grade is not None for grade in grades) < coverage * len(grades):
        return None
    return sum(w * bool(grade) for w, grade in zip(weights, grades)) / sum(weights)


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
    """Dr. Zero's format score of a proposal, as its code computes it (r_f of eq. 4 is half of `raw`).

    Args:
      turns: text of each assistant turn.
      calls: well-formed tool calls.   responses: tool responses received, error texts included.
      hops: the hop count that was asked for.
      question, answer: what was extracted; None or blank: nothing.
      source: the document the proposal starts from.   retrieved: text of all tool responses.

    Returns parts, each in [0, 1]:
      think: share of turns that begin with a closed `<think>` block.
      tool: min((1 + calls)/hops, 1) if calls and responses agree and there are any; else 1 for one hop and 0
        for more.
      answer: 1 up to five words, ½ up to ten, else 0, given that it is yes or no or occurs in the source or,
        where calls and responses agree, in the retrieved text. All in normal form.
      raw: (1 + think + tool + answer)/4, or 0 when question or answer is missing or the question contains
        the answer.

    Raises:
      ValueError: hops below 1 or a negative count.
    """
    if hops < 1 or calls < 0 or responses < 0:
        raise ValueError(
            f'drzero_format: needs hops ≥ 1 and counts ≥ 0, got {hops}, {calls}, {responses}'
        )
    question, answer = (question or '').strip(), (answer or '').strip()
    think = sum(_begins_with_thought(text) for text in turns) / max(1, len(turns))

    searched = calls == responses > 0
    if searched:
        tool = min((1 + calls) / hops, 1.0)
    else:
        tool = 1.0 if hops == 1 else 0.0

    short = normalize_answer(answer)
    seen = normalize_answer(f'{source}\n\n{retrieved}' if searched else source)
    words = len(short.split())
    grounded = words > 0 and (short in ('yes', 'no') or short in seen)
    brevity = (1.0 if words <= 5 else 0.5 if words <= 10 else 0.0) if grounded else 0.0

    # An answer with an empty normal form lies in every question and so scores 0, like one given away.
    sound = bool(question and answer) and short not in normalize_answer(question)
    raw = (1.0 + think + tool + brevity) / 4 if sound else 0.0
    return {'think': think, 'tool': tool, 'answer': brevity, 'raw': raw}


def _begins_with_thought(text: str) -> bool:
    return text.lstrip().startswith('<think>') and '</think>' in text


def scope_challenger_format(
    turns: Sequence[str],
    *,
    searches: int,
    malformed: int,
    expected: int,
    task: str | None,
    code: bool = False,
) -> dict[str, float]:
    """SCOPE's format score of a challenger's rollout (r_fmt of eq. 4, appendix F.1).

    Args:
      turns: text of each assistant turn.
      searches: turns with a well-formed search.   malformed: turns with one that cannot be read.
      expected: how many search turns were asked for.
      task: content of the `<task>` in the last turn; None or blank: there is none. (The paper also names a
        `<question>` inside it, which its own prompt does not ask for.)
      code: as the released code scores it, not as the paper says.

    Returns parts, each in [0, 1]:
      think: share of turns with a closed `<think>` block; in the code one must open the turn.
      tool: min(searches/expected, 1); in the code a malformed search takes a good one away, and 1 if none is asked.
      task: whether there is one.
      raw: their mean. At 0 a task is not tried on the solver and earns nothing.

    Raises:
      ValueError: a negative count, or no search expected in the paper's variant.
    """
    if min(searches, malformed, expected) < 0 or not (expected or code):
        raise ValueError(
            f'scope_challenger_format: needs counts ≥ 0 and, but for the code, expected ≥ 1; got {searches}, '
            f'{malformed}, {expected}'
        )
    earned = max(searches - malformed, 0) if code else searches
    tool = min(earned / expected, 1.0) if expected else 1.0
    return _scope_format(turns, code, tool=tool, task=float(bool((task or '').strip())))


def scope_solver_format(
    turns: Sequence[str], *, searches: int, answer: str | None, code: bool = False
) -> dict[str, float]:
    """SCOPE's format score of a solver's rollout (r_fmt of eq. 6, appendix F.2).

    Args:
      turns: text of each assistant turn.
      searches: well-formed calls in all turns but the last.
      answer: what was extracted; None or blank: nothing.
      code: as the released code scores it, not as the paper says.

    Returns parts, each in [0, 1]:
      think: share of turns with a closed `<think>` block; in the code one must open the turn.
      tool: min(searches/(turns − 1), 1); 0 for a single turn, which the paper leaves open.
      answer: whether there is one.
      raw: their mean.

    Raises:
      ValueError: a negative count.
    """
    if searches < 0:
        raise ValueError(f'scope_solver_format: searches {searches} must not be negative')
    tool = min(searches / (len(turns) - 1), 1.0) if len(turns) > 1 else 0.0
    return _scope_format(turns, code, tool=tool, answer=float(bool((answer or '').strip())))


def _scope_format(turns, code, **parts) -> dict[str, float]:
    thinks = _begins_with_thought if code else _has_thought
    parts = {'think': sum(map(thinks, turns)) / max(1, len(turns)), **parts}
    return parts | {'raw': sum(parts.values()) / 3}


def _has_thought(text: str) -> bool:
    return '</think>' in text.partition('<think>')[2]


def ssp_gate(
    question: str | None,
    answers: Sequence[str],
    queries: Sequence[str],
    *,
    chars: tuple[float, float] = (10, math.inf),
    words: int = 1,
    searches: int = 1,
    distinct: bool = False,
    whole_words: bool = True,
) -> str | None:
    """SSP's rule gate, before anything is asked of a model (section 3.3): why a proposal is turned away, or None.

    The paper turns away what has no question, is "excessively short" (no number given: 10 characters here, as in
    the code), never searched, or contains the answer; those are the defaults. The released code asks for more:
    chars=(10, 1000), words=10, searches=2, distinct=True, whole_words=False.

    Args:
      question: what was extracted; None or blank: nothing.
      answers: the answers it was made from, at least one; none of them may stand in the question.
      queries: what the proposer searched for, in order.
      chars: shortest and longest question.   words: fewest words.   searches: fewest queries.
      distinct: whether a repeated query is a fault.
      whole_words: an answer is looked for as whole words in normal form; False: as any run of characters, case
        aside, which turns away most questions whose answer is as short as "no" or "1".

    Returns:
      'no_question', 'short_question', 'long_question', 'leaks_answer', 'few_searches', 'repeated_query' or None, the
      first that holds. An answer with an empty normal form ("the") counts as given away.

    Raises:
      ValueError: no answers.
    """
    if not answers:
        raise ValueError('ssp_gate: answers are empty; a proposal is made from at least one')
    question = (question or '').strip()
    if not question:
        return 'no_question'
    if len(question) < chars[0] or len(question.split()) < words:
        return 'short_question'
    if len(question) > chars[1]:
        return 'long_question'
    if any(_gives_away(question, answer, whole_words) for answer in answers):
        return 'leaks_answer'
    if len(queries) < searches:
        return 'few_searches'
    if distinct and len({query.strip() for query in queries}) < len(queries):
        return 'repeated_query'
    return None


def _gives_away(question: str, answer: str, whole_words: bool) -> bool:
    if not whole_words:
        return answer.lower() in question.lower()
    answer = normalize_answer(answer)
    return not answer or f' {answer} ' in f' {normalize_answer(question)} '
