"""A policy in float64: the decoder of `transformers`, and its weights, whole ones or adapters over a base."""

import json
import pathlib
from unittest import mock

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.audit.files import read_weights

Weights = dict[str, Tensor]


def copied(weights: Weights) -> Weights:
    """Returns a copy without a gradient."""
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


class Policy:
    """A policy and its trained weights.

    Attributes:
      trained: name of a tensor → its value, with a gradient.
      start: the same as they were at first.
      reference: whole weights as they were at first.
      is_adapter: whether adapters are trained.

    Args:
      folder: from which it starts.
    """

    def __init__(self, folder: pathlib.Path):
        self.start = read_weights(folder)
        self.trained = copied(self.start)
        for tensor in self.trained.values():
            tensor.requires_grad_()
        adapter = folder / 'adapter_config.json'
        self.is_adapter = adapter.exists()
        if self.is_adapter:
            fields = json.loads(adapter.read_text())
            folder = pathlib.Path(fields['base_model_name_or_path'])
            self._base = read_weights(folder)
            self._scale = fields['lora_alpha'] / fields['r']
        config = AutoConfig.from_pretrained(folder)
        network = AutoModelForCausalLM.from_config(
            config, dtype=torch.float64, attn_implementation='eager'
        )
        self._decoder = network.model.eval()
        self.reference = copied(self.weights())

    def weights(self) -> Weights:
        """Returns whole weights, through which gradients reach the trained ones."""
        if not self.is_adapter:
            return self.trained
        whole = dict(self._base)
        for name, b in self.trained.items():
            if '.lora_B.' in name:
                a = self.trained[name.replace('.lora_B.', '.lora_A.')]
                linear = name.removeprefix('base_model.model.').replace('.lora_B.', '.')
                whole[linear] = whole[linear] + self._scale * (b @ a)
        return whole

    def states(self, weights: Weights, tokens: Tensor, written: Tensor) -> Tensor:
        """Returns the states of whole weights before these positions, [N, H]."""
        decoder = {}
        for name, tensor in weights.items():
            if name.startswith('model.'):
                decoder[name.removeprefix('model.')] = tensor
        arguments = {'input_ids': tokens[None], 'use_cache': False}
        # The library names float32 for norms and softmax.
        with mock.patch.object(torch, 'float32', torch.float64):
            output = functional_call(self._decoder, decoder, kwargs=arguments)
        return output.last_hidden_state[0, written - 1]

    def scores(
        self, weights: Weights, tokens: Tensor, written: Tensor, kept: Tensor, temperature: float
    ) -> Tensor:
        """Returns the log-probs of the whole vocabulary at these positions, [N, V], within `kept` (`Rollout`)."""
        head = weights.get('lm_head.weight', weights['model.embed_tokens.weight'])
        logits = self.states(weights, tokens, written) @ head.T
        if len(kept):
            is_kept = torch.zeros(logits.shape, dtype=torch.bool)
            is_kept[kept[:, 0], kept[:, 1]] = True
            logits = logits.masked_fill(~is_kept, -1e30)
        return torch.log_softmax(logits / temperature, 1)
