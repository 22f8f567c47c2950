"""Writes an invented encyclopedia as text files, with questions: to try what is done with texts of one's own.

    python -m zeroplay_jax.mini.sample --out notes

One file per article, its title on the first line; in the same folder `questions.jsonl` to measure by, and others in
`more_questions.jsonl` to train on.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence

import numpy as np

from zeroplay_jax.mini.world import World, evaluation_questions
from zeroplay_jax.retrieval.command import Parser
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.types import UserError


def write(out: pathlib.Path, worlds: int, per_hop: int, seed: int) -> int:
    """Writes the texts of `worlds` worlds that no training saw, and two sets of questions; how many texts.

    Raises:
      UserError: the folder is there already, or so many questions cannot be asked.
    """
    if out.exists():
        raise UserError(f'--out {out}: is there already; remove it or choose another folder')
    members = [World(seed + i, 'evaluation') for i in range(worlds)]
    asked = evaluation_questions(members, per_hop, (1, 2, 3))
    known = {question['question'] for question in asked}
    more = [
        q
        for q in evaluation_questions(members, 2 * per_hop, (1, 2, 3), seed=1)
        if q['question'] not in known
    ]
    out.mkdir(parents=True)
    pages = [page for world in members for page in world.passages]
    for page in pages:
        (out / f'{page.title}.txt').write_text(f'{page.title}\n{page.text}\n', encoding='utf-8')
    for name, questions in (('questions', asked), ('more_questions', more)):
        mixed = [questions[i] for i in np.random.default_rng(seed).permutation(len(questions))]
        lines = ''.join(json.dumps(question, ensure_ascii=False) + '\n' for question in mixed)
        (out / f'{name}.jsonl').write_text(lines, encoding='utf-8')
    return len(pages)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = Parser(
        prog='python -m zeroplay_jax.mini.sample',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        '--out',
        type=pathlib.Path,
        required=True,
        metavar='FOLDER',
        help='made, for texts and questions',
    )
    parser.add_argument(
        '--worlds', type=int, default=4, help='how many encyclopedias, 132 articles each (4)'
    )
    parser.add_argument('--questions', type=int, default=15, help='per number of hops (15)')
    parser.add_argument(
        '--seed', type=int, default=0, help='of the first encyclopedia; the others follow (0)'
    )
    try:
        args = parser.parse_args(argv)
        count = write(args.out, args.worlds, args.questions, args.seed)
    except (UserError, RetrievalError, OSError) as error:
        print(f'zeroplay_jax.mini.sample: {error}', file=sys.stderr)
        return 2
    print(
        f'{args.out}: {count} texts, {3 * args.questions} questions in {args.out / "questions.jsonl"}, others in '
        f'{args.out / "more_questions.jsonl"}'
    )
    return 0


if __name__ == '__main__':
    sys.exit(main())
