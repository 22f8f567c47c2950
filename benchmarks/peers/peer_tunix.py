"""The workload by Tunix (JAX on the CPU): its own sampler for rollouts, its Qwen3 model and optax for the update.

JAX_PLATFORMS=cpu PYTHONPATH=. /path/to/peers/bin/python -m benchmarks.peers.peer_tunix
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.generate import sampler as tunix_sampler
from tunix.models.qwen3 import model as qwen3

from benchmarks.peers import workload

PAD_ID = 0
EOS_ID = 1


class IntegerTokenizer:
    """A tokenizer whose text is a list of token ids: Tunix's sampler takes strings only."""

    def encode(self, text: str, **options) -> list[int]:
        """Returns the token ids that the text lists."""
        return [int(word) for word in text.split()]

    def decode(self, ids, **options) -> str:
        """Returns the token ids as text."""
        return to_text(ids)

    def bos_id(self) -> int:
        """Returns the first id of a text; the workload never adds it."""
        return PAD_ID

    def eos_id(self) -> int:
        """Returns the end-of-sequence id."""
        return EOS_ID

    def pad_id(self) -> int:
        """Returns the padding id."""
        return PAD_ID


def to_text(ids) -> str:
    """Returns token ids as the text that IntegerTokenizer reads."""
    return ' '.join(str(int(token)) for token in ids)


def make_model() -> qwen3.Qwen3:
    """Returns the policy with random weights in float32."""
    sizes = workload.QWEN3
    config = qwen3.ModelConfig(
        num_layers=sizes['num_hidden_layers'],
        vocab_size=sizes['vocab_size'],
        embed_dim=sizes['hidden_size'],
        hidden_dim=sizes['intermediate_size'],
        num_heads=sizes['num_attention_heads'],
        head_dim=sizes['head_dim'],
        num_kv_heads=sizes['num_key_value_heads'],
        rope_theta=int(sizes['rope_theta']),
        norm_eps=sizes['rms_norm_eps'],
        use_tied_embedding=sizes['tie_word_embeddings'],
    )
    return qwen3.Qwen3(config, rngs=nnx.Rngs(0))


def make_sampler(model: qwen3.Qwen3, cache_tokens: int) -> tunix_sampler.Sampler:
    """Returns Tunix's sampler with a key/value cache of `cache_tokens` places per rollout."""
    cache_config = tunix_sampler.CacheConfig(
        cache_size=cache_tokens,
        num_layers=model.config.num_layers,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
    )
    return tunix_sampler.Sampler(model, IntegerTokenizer(), cache_config)


def rollout(sampler: tunix_sampler.Sampler, rollouts: workload.Rollouts) -> list[list[int]]:
    """Returns the token ids of the finished rollouts of a batch."""

    def generate(contexts: list[list[int]]) -> list[list[int]]:
        output = sampler(
            [to_text(context) for context in contexts],
            max_generation_steps=rollouts.turn_tokens,
            # The exact length is given, because otherwise Tunix pads prompts to the next power of two.
            max_prompt_length=max(map(len, contexts)),
            # An end-of-sequence token would end a turn early.
            forbidden_tokens=(PAD_ID, EOS_ID),
        )
        return [np.asarray(tokens)[: rollouts.turn_tokens].tolist() for tokens in output.tokens]

    contexts = workload.play(rollouts, generate)
    lengths = [len(context) for context in contexts]
    assert lengths == [rollouts.length(row) for row in range(len(rollouts))]
    return contexts


def make_update(model: qwen3.Qwen3) -> Callable[[], jax.Array]:
    """Returns a function that does one clipped policy-gradient step and returns the loss."""
    rows = workload.TRAIN_BATCH
    length = workload.TRAIN_LEN
    ids = jax.random.randint(
        jax.random.key(0), (rows, length), workload.FIRST_TOKEN, workload.VOCAB_SIZE
    )
    positions = jnp.broadcast_to(jnp.arange(length), ids.shape)
    causal_mask = jnp.tril(jnp.ones((length, length), bool))
    attention_mask = jnp.broadcast_to(causal_mask, (rows, length, length))
    # One advantage per row, as in GRPO, where a rollout has one reward.
    advantages = jax.random.normal(jax.random.key(1), (rows, 1))

    def token_log_probs(model):
        logits, _ = model(ids, positions, None, attention_mask)
        log_probs = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
        return jnp.take_along_axis(log_probs, ids[:, 1:, None], axis=-1)[..., 0]

    old_log_probs = nnx.jit(token_log_probs)(model)
    transformation = optax.chain(
        optax.clip_by_global_norm(workload.MAX_GRADIENT_NORM),
        optax.adamw(workload.LEARNING_RATE),
    )
    optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        def loss_of(model):
            ratio = jnp.exp(token_log_probs(model) - old_log_probs)
            clipped_ratio = jnp.clip(ratio, 1 - workload.CLIP, 1 + workload.CLIP)
            return -jnp.minimum(ratio * advantages, clipped_ratio * advantages).mean()

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return loss

    # JAX returns before the device has finished; a timed call has to wait for the result.
    return lambda: jax.block_until_ready(step(model, optimizer))


def main() -> None:
    """Prints the rates of rollouts and updates."""
    arguments = workload.parser(__doc__.split('\n')[0]).parse_args()
    rollouts = workload.WORKLOADS[arguments.workload]
    model = make_model()
    # Tunix attends to all places at every step: the smallest cache that holds the workload is the fastest.
    sampler = make_sampler(model, rollouts.context)
    rollout_seconds = workload.median_seconds(lambda: rollout(sampler, rollouts))
    update_seconds = workload.median_seconds(make_update(model))
    workload.print_rates('tunix', rollouts, rollout_seconds, update_seconds)


if __name__ == '__main__':
    main()
