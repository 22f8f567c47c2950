"""The workload by transformers (PyTorch on the CPU): `generate` for rollouts, autograd and AdamW for the update.

PYTHONPATH=. /path/to/peers/bin/python -m benchmarks.peers.peer_hf
"""

from collections.abc import Callable

import torch
import transformers

from benchmarks.peers import workload

PAD_ID = 0
EOS_ID = 1


def make_model() -> transformers.Qwen3ForCausalLM:
    """Returns the policy with random weights in float32."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        **workload.QWEN3, max_position_embeddings=2048, attention_bias=False
    )
    return transformers.Qwen3ForCausalLM(config)


def rollout(model: transformers.Qwen3ForCausalLM, rollouts: workload.Rollouts) -> list[list[int]]:
    """Returns the token ids of the finished rollouts of a batch."""

    def generate(contexts: list[list[int]]) -> list[list[int]]:
        longest = max(map(len, contexts))
        ids = torch.full((len(contexts), longest), PAD_ID)
        mask = torch.zeros_like(ids)
        for i, context in enumerate(contexts):
            # Padding is on the left, because generated tokens are appended on the right.
            ids[i, longest - len(context) :] = torch.tensor(context)
            mask[i, longest - len(context) :] = 1
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=mask,
                # The minimum keeps a sampled end-of-sequence token from ending a turn early.
                min_new_tokens=rollouts.turn_tokens,
                max_new_tokens=rollouts.turn_tokens,
                do_sample=False,
                eos_token_id=EOS_ID,
                pad_token_id=PAD_ID,
            )
        return output[:, longest:].tolist()

    return workload.play(rollouts, generate)


def token_log_probs(model: transformers.Qwen3ForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Returns the log-probability of every token after the first, float32 [rows, tokens - 1]."""
    logits = model(ids).logits[:, :-1].float()
    log_probs = torch.log_softmax(logits, dim=-1)
    return log_probs.gather(-1, ids[:, 1:, None])[..., 0]


def make_update(model: transformers.Qwen3ForCausalLM) -> Callable[[], float]:
    """Returns a function that does one clipped policy-gradient step and returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.LEARNING_RATE)
    rows = workload.TRAIN_BATCH
    ids = torch.randint(workload.FIRST_TOKEN, model.config.vocab_size, (rows, workload.TRAIN_LEN))
    # One advantage per row, as in GRPO, where a rollout has one reward.
    advantages = torch.randn(rows, 1)
    mask = torch.ones(rows, workload.TRAIN_LEN - 1)
    with torch.no_grad():
        old_log_probs = token_log_probs(model, ids)

    def update() -> float:
        """Does one step on the fixed batch and returns the loss."""
        ratio = torch.exp(token_log_probs(model, ids) - old_log_probs)
        clipped_ratio = torch.clip(ratio, 1 - workload.CLIP, 1 + workload.CLIP)
        objective = torch.minimum(ratio * advantages, clipped_ratio * advantages)
        loss = -(objective * mask).sum() / mask.sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), workload.MAX_GRADIENT_NORM)
        optimizer.step()
        return loss.item()

    return update


def main() -> None:
    """Prints the rates of rollouts and updates."""
    arguments = workload.parser(__doc__.split('\n')[0]).parse_args()
    rollouts = workload.WORKLOADS[arguments.workload]
    torch.set_num_threads(workload.CORES)
    model = make_model().eval()
    rollout_seconds = workload.median_seconds(lambda: rollout(model, rollouts))
    model.train()
    update_seconds = workload.median_seconds(make_update(model))
    workload.print_rates('hf', rollouts, rollout_seconds, update_seconds)


if __name__ == '__main__':
    main()
