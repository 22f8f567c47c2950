"""The work of `benchmarks.rollout`: one small policy, one scripted multi-turn rollout, one update step.

Our benchmark and the scripts of the other engines read it, each in a Python environment of its own. The module
therefore imports the standard library only.

A rollout is a prompt, then TURNS turns of GEN generated tokens with TOOL observation tokens between two turns.
Decoding is greedy and never stops early, so that every engine generates exactly the same number of tokens.
"""

import random
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

# The rollout batch.
BATCH = 32  # rollouts that run at the same time
PROMPT = 64  # tokens of a prompt
GEN = 32  # tokens that the policy generates in a turn
TOOL = 96  # observation tokens after a turn, except after the last one
TURNS = 3
LENGTH = PROMPT + GEN * TURNS + TOOL * (TURNS - 1)  # tokens of a finished rollout
GENERATED = BATCH * GEN * TURNS  # tokens that the policy generates in the whole batch

# The update step.
TRAIN_BATCH = 16  # rows
TRAIN_LEN = 256  # tokens of a row
CLIP = 0.2  # of the probability ratio, on both sides
MAX_GRADIENT_NORM = 1.0
LEARNING_RATE = 1e-6

# Ids below this one are left to special tokens: padding (0) and end of sequence (1) in every engine.
FIRST_TOKEN = 10


def random_rows(seed: int, tokens: int, vocab_size: int) -> list[list[int]]:
    """Returns token ids for every rollout of the batch: BATCH rows of `tokens` ids in [FIRST_TOKEN, vocab_size)."""
    generator = random.Random(seed)
    rows = []
    for _ in range(BATCH):
        rows.append([generator.randrange(FIRST_TOKEN, vocab_size) for _ in range(tokens)])
    return rows


def prompts(vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    """Returns the prompts: BATCH rows of PROMPT token ids."""
    return random_rows(0, PROMPT, vocab_size)


def observation(turn: int, vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    """Returns the observations that follow turn number `turn`, counted from 0: BATCH rows of TOOL token ids."""
    return random_rows(100 + turn, TOOL, vocab_size)
