"""Writes an invented encyclopedia as text files, with questions: sample data for the tools that read your own texts.

    zeroplay sample --out notes

Writes one file per article, with its title on the first line. The same folder gets `questions.jsonl` for evaluation
and `more_questions.jsonl`, with other questions, for training.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Sequence

import numpy as np

from zeroplay_jax.mini.names import shuffled
from zeroplay_jax.mini.world import Item, World, evaluation_questions
from zeroplay_jax.retrieval.command import Parser, exit_status
from zeroplay_jax.types import UserError

HOPS = (1, 2, 3)


def write(out: pathlib.Path, worlds: int, per_hop: int, first_world: int) -> int:
    """Writes the passages of several worlds and two sets of questions.

    Args:
      out: folder to create.
      worlds: number of worlds.
      per_hop: evaluation questions per hop count. Twice as many training questions are drawn, less the common ones.
      first_world: number of the first world, from 0; the next ones follow. It also seeds the order of the questions.

    Returns:
      The number of passages.

    Raises:
      UserError: the folder exists already, no names are left for a world, or the worlds do not have that many
        questions.
    """
    if out.exists():
        raise UserError(f'--out {out}: is there already; remove it or choose another folder')
    # Evaluation worlds are used, because the shipped checkpoints were trained on the names of the other split.
    members = [World(first_world + i, 'evaluation') for i in range(worlds)]
    evaluation_set = evaluation_questions(members, per_hop, HOPS)
    training_candidates = evaluation_questions(members, 2 * per_hop, HOPS, seed=1)
    # The two draws overlap; no evaluation question may be trained on.
    evaluation_texts = {item['question'] for item in evaluation_set}
    training_set = []
    for item in training_candidates:
        if item['question'] not in evaluation_texts:
            training_set.append(item)
    # The folder is created last: an error above leaves nothing behind.
    out.mkdir(parents=True)
    count = 0
    for world in members:
        for passage in world.passages:
            text = f'{passage.title}\n{passage.text}\n'
            (out / f'{passage.title}.txt').write_text(text, encoding='utf-8')
            count += 1
    _write_questions(out / 'questions.jsonl', evaluation_set, first_world)
    _write_questions(out / 'more_questions.jsonl', training_set, first_world)
    return count


def _write_questions(path: pathlib.Path, questions: Sequence[Item], seed: int) -> None:
    """Writes questions as JSON lines in random order."""
    # Shuffled, so that a prefix of the file contains all hop counts.
    lines = []
    for question in shuffled(np.random.default_rng(seed), questions):
        lines.append(json.dumps(question, ensure_ascii=False) + '\n')
    path.write_text(''.join(lines), encoding='utf-8')


def _run(argv: Sequence[str] | None) -> None:
    """Parses the arguments, writes the folder and says what is in it."""
    parser = Parser(prog='zeroplay sample', description=__doc__)
    add = parser.add_argument
    out_help = 'folder to create, for texts and questions'
    add('--out', type=pathlib.Path, required=True, metavar='FOLDER', help=out_help)
    add('--worlds', type=int, default=4, help='number of encyclopedias, 132 articles each (4)')
    add('--questions', type=int, default=15, help='questions per hop count (15)')
    seed_help = 'number of the first encyclopedia, from 0; the next ones follow (0)'
    add('--seed', type=int, default=0, help=seed_help)
    args = parser.parse_args(argv)
    count = write(args.out, args.worlds, args.questions, args.seed)
    # The training questions are not counted: their number depends on the overlap.
    question_count = len(HOPS) * args.questions
    print(
        f'{args.out}: {count} texts, {question_count} questions in {args.out / "questions.jsonl"}, others in '
        f'{args.out / "more_questions.jsonl"}'
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status, 2 after an error of the user."""
    return exit_status('zeroplay sample', lambda: _run(argv), 'choose another --out')


if __name__ == '__main__':
    sys.exit(main())
