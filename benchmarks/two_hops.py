"""Measures the questions of two hops of a quickstart: `.venv/bin/python -m benchmarks.two_hops runs/own`.

Prints one JSON object. For the held-out questions: how often a search finds the passages that they need, with the name
that `#1` stands for and without it. For the logged proposals of two hops: in how many the second half is from another
document that was found, and in how many of these the first half is from the proposer's own document.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from benchmarks.command import one_line_errors, parser, read_lines
from zeroplay_jax.extras.inputs.chains import BRIDGE
from zeroplay_jax.extras.inputs.cloze import BLANK
from zeroplay_jax.retrieval import folder
from zeroplay_jax.types import Json, UserError

TOP_K = 3


def halves(question: str) -> tuple[str, str] | None:
    """Returns the sentence and the clause of a question of two hops; None if it has another form."""
    if question.count(BRIDGE) != 2:
        return None
    first, _, rest = question.partition(BRIDGE)
    middle, _, end = rest.partition(BRIDGE)
    return f'{first}{BRIDGE}{middle}'.strip(), BRIDGE + end


def without_marks(text: str) -> str:
    """Returns a text without bridge and blank."""
    return ' '.join(text.replace(BRIDGE, ' ').replace(BLANK, ' ').split())


def searches(workdir: pathlib.Path) -> dict[str, float]:
    """Returns, for several queries, the share of the held-out questions for which they find the passage."""
    questions = [each for each in read_lines(workdir / 'questions.jsonl') if each['hops'] == 2]
    index = folder.open_index(workdir / 'index')
    if not questions:
        return {'questions': 0}
    row_of = {line['id']: row for row, line in enumerate(read_lines(workdir / 'corpus.jsonl'))}
    counts: dict[str, int] = {}
    for question in questions:
        parts = halves(question['question'])
        assert parts is not None
        sentence, clause = parts
        first, second = question['first_document_id'], question['document_id']
        named_clause = clause.replace(BRIDGE, question['bridge'])
        cases = {
            'sentence finds first passage': (sentence, first),
            'clause with name finds second passage': (named_clause, second),
            'clause without name finds second passage': (clause, second),
            'whole question finds second passage': (question['question'], second),
        }
        for name, (text, passage) in cases.items():
            rows, _ = index.search([without_marks(text)], TOP_K)
            counts[name] = counts.get(name, 0) + (row_of[passage] in rows[0])
    shares = {name: count / len(questions) for name, count in counts.items()}
    return {'questions': len(questions), **shares}


def proposals(workdir: pathlib.Path) -> dict[str, float]:
    """Returns the number of proposals of two hops in the log of a run and the shares of some properties."""
    total = accepted = about_other = joined = 0
    for row in read_lines(workdir / 'run' / 'trajectories.jsonl'):
        if not row['is_proposal'] or row['info'].get('hops') != 2:
            continue
        total += 1
        if not is_accepted(row):
            continue
        accepted += 1
        is_about_other, is_joined = documents_of(row)
        about_other += is_about_other
        joined += is_joined
    return {
        'proposals': total,
        'accepted': accepted / max(1, total),
        'second half of another document': about_other / max(1, total),
        'joins two documents': joined / max(1, total),
    }


def is_accepted(row: Json) -> bool:
    """Returns whether a proposal passed the checks; a rejected one may have no question or no answer."""
    return row['drop'] is None and row['info'].get('rejected') is None


def first_search(row: Json) -> Json | None:
    """Returns the first call of a rollout that found passages; None if there is none."""
    for turn in row['turns']:
        # A malformed call has no arguments, and a failed search no documents.
        if turn and turn['arguments'] and turn['documents']:
            return turn
    return None


def documents_of(row: Json) -> tuple[bool, bool]:
    """Returns whether the halves of a proposal are from other documents, both False if it has another form.

    Returns:
      Whether its clause, with name and answer, occurs in a passage found with another title than that of the proposer's
      document; and whether also its sentence, with the name, occurs in the proposer's document.
    """
    call, parts = first_search(row), halves(row['info']['question'])
    if parts is None or call is None or BLANK not in parts[1]:
        return False, False
    name = call['arguments']['query_list'][0]
    sentence, clause = (half.replace(BRIDGE, name) for half in parts)
    clause = clause.replace(BLANK, row['info']['answers'][0])
    document = row['segments'][0]['text']
    # The document marks the name as a link.
    is_own = sentence in ' '.join(document.split()).replace(f'[ {name} ]', name)
    for passage in call['documents'][0]:
        is_other = f'(Title: {passage["title"]})' not in document
        if is_other and clause in ' '.join(passage['text'].split()):
            return True, is_own
    return False, False


def check(workdir: pathlib.Path) -> None:
    """Raises UserError unless a folder has the files of a quickstart with held-out questions."""
    for name in ('questions.jsonl', 'held_out.jsonl', 'corpus.jsonl', 'index'):
        if not (workdir / name).exists():
            raise UserError(
                f'{workdir} has no {name}; give the workdir of make quickstart CORPUS=… without EVAL: with questions '
                'of your own nothing is held out, and there is nothing to measure here'
            )


def main() -> None:
    """Prints what was measured."""
    flags = parser('two_hops', __doc__)
    flags.add_argument('workdir', type=pathlib.Path, help='the workdir of make quickstart CORPUS=…')
    args = flags.parse_args()
    with one_line_errors('benchmarks.two_hops'):
        check(args.workdir)
    result: dict[str, Any] = {'held out': searches(args.workdir)}
    if (args.workdir / 'run').exists():
        result['proposed'] = proposals(args.workdir)
    print(json.dumps(result, indent=1))


if __name__ == '__main__':
    main()
