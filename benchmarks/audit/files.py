"""What a run with `config.log.rows` has left, read without the code that wrote it: JSON lines and safetensors."""

import dataclasses
import json
import pathlib

import torch
from safetensors.torch import load_file
from torch import Tensor

# Labels of the author of a token.
PROMPT, POLICY = 0, 1


@dataclasses.dataclass(eq=False)
class Rollout:
    """A line of rows.jsonl. N: tokens that the policy wrote.

    Attributes:
      record: the line.
      tokens: int64 [T].
      source: int64 [T], their authors.
      written: int64 [N], positions of those that the policy wrote.
      kept: int64 [K, 2], (number of a written token, id) of the ids that it was drawn from; K = 0: of all ids.
      sampler_logp, old_logp: float64 [N], log-probs of sampler, and in the denominator of the ratio.
      advantage: float64 [N], computed here.
      old_values, returns: float64 [N], where there is a value network.
    """

    record: dict
    tokens: Tensor
    source: Tensor
    written: Tensor
    kept: Tensor
    sampler_logp: Tensor
    old_logp: Tensor
    advantage: Tensor
    old_values: Tensor
    returns: Tensor

    @property
    def is_counted(self) -> bool:
        """Whether it was not dropped, and has a token to train."""
        return self.record['drop'] is None and len(self.written) > 0

    def behind_teacher_prompt(self) -> tuple[Tensor, Tensor]:
        """Returns tokens and `written` with the teacher's prompt in place of the student's."""
        prompt = torch.tensor(self.record['teacher_prompt'])
        prompt_tokens = int(torch.nonzero(self.source != PROMPT)[0])
        tokens = torch.cat([prompt, self.tokens[prompt_tokens:]])
        return tokens, self.written + len(prompt) - prompt_tokens


def _rollout(record):
    if len(record['contexts']) > 1:
        raise ValueError('rollouts of several contexts (rollout.drop_thinking) cannot be audited')
    (context,) = record['contexts']
    tokens, source = (torch.tensor(context[name]) for name in ('tokens', 'source'))
    (written,) = torch.nonzero(source == POLICY, as_tuple=True)
    logp = torch.tensor(context['logp']).double()[written]
    kept = torch.tensor(context.get('kept', []), dtype=torch.int64).reshape(-1, 2)
    kept[:, 0] = torch.searchsorted(written, kept[:, 0].contiguous())
    return Rollout(record, tokens, source, written, kept, *[logp] * 5)


def read_lines(path: pathlib.Path) -> list[dict]:
    """Returns the objects of a file of JSON lines."""
    with path.open(encoding='utf-8') as file:
        return [json.loads(line) for line in file]


def read_updates(run: pathlib.Path) -> dict[int, dict[str, dict[int, list[Rollout]]]]:
    """Returns step → role → number of a minibatch → its rollouts, all in the order of the run.

    Raises:
      ValueError: the folder has no trained rollouts.
    """
    path = run / 'rows.jsonl'
    if not path.exists():
        raise ValueError(
            f'there is no {path}; name the workdir of a run that was trained with log.rows'
        )
    steps = {}
    for record in read_lines(path):
        minibatches = steps.setdefault(record['step'], {}).setdefault(record['role'], {})
        minibatches.setdefault(record['minibatch'], []).append(_rollout(record))
    return steps


def read_weights(folder: pathlib.Path) -> dict[str, Tensor]:
    """Returns the tensors of a folder, float64; ValueError if it has none."""
    weights = {}
    for path in folder.glob('*.safetensors'):
        for name, tensor in load_file(path).items():
            weights[name] = tensor.double()
    if not weights:
        raise ValueError(f'there are no weights in {folder}')
    return weights
