"""The work of `benchmarks.rollout`: one small policy, two batches of scripted multi-turn rollouts, one update step.

Our benchmark and the scripts of the other engines read it, each in a Python environment of its own. The module
therefore imports the standard library only.

A rollout is a prompt, then turns of generated tokens with the tokens of an observation between two turns. Decoding is
greedy and never stops early, so that every engine generates exactly the same number of tokens.
"""

import argparse
import dataclasses
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

CORES = 2  # processor cores that every engine may use

# The policy, in the field names of a Hugging Face config.json: 23 million parameters, computed in float32.
VOCAB_SIZE = 8192
QWEN3: dict[str, Any] = {
    'vocab_size': VOCAB_SIZE,
    'hidden_size': 512,
    'intermediate_size': 1536,
    'num_hidden_layers': 6,
    'num_attention_heads': 8,
    'num_key_value_heads': 4,
    'head_dim': 64,
    'rms_norm_eps': 1e-6,
    'rope_theta': 1e6,
    'tie_word_embeddings': True,
}

# The update step.
TRAIN_BATCH = 16  # rows
TRAIN_LEN = 256  # tokens of a row
CLIP = 0.2  # of the probability ratio, on both sides
MAX_GRADIENT_NORM = 1.0
LEARNING_RATE = 1e-6

# Ids below this one are left to special tokens: padding (0) and end of sequence (1) in every engine.
FIRST_TOKEN = 10


def random_tokens(seed: int, tokens: int, vocab_size: int) -> list[int]:
    """Returns `tokens` token ids in [FIRST_TOKEN, vocab_size)."""
    generator = random.Random(seed)
    return [generator.randrange(FIRST_TOKEN, vocab_size) for _ in range(tokens)]


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """A batch of scripted rollouts.

    Attributes:
      name: name on the command line.
      context: tokens that the cache of a rollout must hold.
      observation_tokens: by rollout, the lengths of the observations between its turns; it has one turn more.
      prompt_tokens: tokens of a prompt.
      turn_tokens: tokens that the policy generates in a turn.
    """

    name: str
    context: int
    observation_tokens: tuple[tuple[int, ...], ...]
    prompt_tokens: int = 64
    turn_tokens: int = 32

    def __len__(self) -> int:
        """Returns the number of rollouts, all of which run at the same time."""
        return len(self.observation_tokens)

    def turns(self, row: int) -> int:
        """Returns the number of turns of a rollout."""
        return len(self.observation_tokens[row]) + 1

    def length(self, row: int) -> int:
        """Returns the tokens of a finished rollout."""
        generated = self.turns(row) * self.turn_tokens
        return self.prompt_tokens + generated + sum(self.observation_tokens[row])

    @property
    def generated(self) -> int:
        """Tokens that the policy generates in the whole batch."""
        turns = sum(self.turns(row) for row in range(len(self)))
        return turns * self.turn_tokens

    def prompt(self, row: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
        """Returns the token ids of a rollout's prompt."""
        return random_tokens(row, self.prompt_tokens, vocab_size)

    def observation(self, row: int, turn: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
        """Returns the token ids of the observation after turn number `turn` of a rollout, counted from 0."""
        seed = 1000 * (turn + 1) + row
        return random_tokens(seed, self.observation_tokens[row][turn], vocab_size)


def uneven_rollouts(name: str, count: int, context: int) -> Rollouts:
    """Returns rollouts of 1 to 5 turns with observations of 20 to 300 tokens, none longer than `context`."""
    generator = random.Random(0)
    batch: list[tuple[int, ...]] = []
    while len(batch) < count:
        between_turns = generator.randint(0, 4)
        lengths = tuple(generator.randint(20, 300) for _ in range(between_turns))
        # A rollout that does not fit is drawn again, with another number of turns.
        if Rollouts('', context, (lengths,)).length(0) <= context:
            batch.append(lengths)
    return Rollouts(name, context, tuple(batch))


# All rollouts have equal turns, so that they wait for their observations together.
EVEN = Rollouts('even', context=352, observation_tokens=((96, 96),) * 32)
# The number of turns and the lengths of observations differ, as those of search agents do.
UNEVEN = uneven_rollouts('uneven', count=64, context=1024)

# For GPUs.
LARGE = uneven_rollouts('large', count=128, context=2048)

WORKLOADS = {rollouts.name: rollouts for rollouts in (EVEN, UNEVEN, LARGE)}


def play(
    rollouts: Rollouts, generate: Callable[[list[list[int]]], list[list[int]]]
) -> list[list[int]]:
    """Returns the token ids of the finished rollouts of a batch.

    Args:
      rollouts: the batch.
      generate: returns the next `turn_tokens` ids of every context. It begins with an empty key/value cache, so that
        every turn reads the whole context again.
    """
    rows = range(len(rollouts))
    contexts = [rollouts.prompt(row) for row in rows]
    for turn in range(max(rollouts.turns(row) for row in rows)):
        # Finished rollouts leave the batch.
        running = [row for row in rows if turn < rollouts.turns(row)]
        generated = generate([contexts[row] for row in running])
        for row, tokens in zip(running, generated, strict=True):
            contexts[row] += tokens
            if turn < rollouts.turns(row) - 1:
                contexts[row] += rollouts.observation(row, turn)
    return contexts


def median_seconds(call: Callable[[], object], repeats: int = 1) -> float:
    """Returns the median wall-clock time of `repeats` calls in seconds, after one call that is not timed."""
    # The first call compiles programs, allocates memory and fills caches.
    call()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def print_rates(
    engine: str, rollouts: Rollouts, rollout_seconds: float, update_seconds: float
) -> None:
    """Prints the two lines that `benchmarks.rollout` reads: generated tokens/s and update tokens/s."""
    generated_rate = rollouts.generated / rollout_seconds
    update_rate = TRAIN_BATCH * TRAIN_LEN / update_seconds
    print(f'{engine} rollout {generated_rate:.1f} generated tokens/s ({rollout_seconds:.2f} s)')
    print(f'{engine} train {update_rate:.1f} tokens/s ({update_seconds:.2f} s)')


def parser(description: str) -> argparse.ArgumentParser:
    """Returns the parser of the arguments that all engines take."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument(
        '--workload', choices=WORKLOADS, default='even', help='batch of rollouts (even)'
    )
    return arguments
