"""The packed batch: what one update of the learner reads.

Array shapes: B packed rows of L tokens; M tokens of a teacher's row.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class TeacherBatch:
    """The rollouts of a `Batch` behind the teacher's prompts; row b matches row b of the student's batch.

    Attributes:
      tokens, positions, segment: int32 [B, M], as in `Batch`.
      teacher_index: int32 [B, L], index in the teacher's row of the token at each index of the student's row; 0 without
        one.
      weight: float32 [B, L], weight of the token in the distillation loss, global denominator included.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segment: np.ndarray
    teacher_index: np.ndarray
    weight: np.ndarray


@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed rows: several trajectories share a row of L tokens, separated by `segment`.

    Attributes (all [B, L]; label arrays refer to the token at that position, predicted by the previous one):
      tokens: int32, 0 where empty.   positions: int32, restarting at 0 in every segment.
      segment: int32, 1, 2, … per row; 0 where empty.   mask: bool, True on trained tokens (source POLICY),
        never at the first position of a row, which nothing predicts.
      old_logp: float32, denominator of the importance ratio: the sampler's log-probs, or the trainer's
        own before the first update of a batch.   sampler_logp: float32, the sampler's.   advantage: float32.
      weight: float32, weight of the token in the loss, global denominator included.
      teacher: the teacher's view of the rows, or None.
      means: name → float32, the mean over the batch of the optimiser step at every token, where the loss declares any.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segment: np.ndarray
    mask: np.ndarray
    old_logp: np.ndarray
    sampler_logp: np.ndarray
    advantage: np.ndarray
    weight: np.ndarray
    teacher: TeacherBatch | None = None
    means: dict[str, np.ndarray] | None = None

    @classmethod
    def blank(cls, shape: tuple[int, int], teacher_tokens: int = 0) -> Batch:
        """Returns a batch of zeros, to be filled in place.

        Args:
          shape: (B, L).
          teacher_tokens: M, tokens of a row of the teacher's batch; 0: without a teacher's batch.
        """
        rows, tokens = shape

        def ints(columns: int) -> np.ndarray:
            return np.zeros((rows, columns), np.int32)

        def floats() -> np.ndarray:
            return np.zeros(shape, np.float32)

        teacher = None
        if teacher_tokens:
            teacher = TeacherBatch(
                tokens=ints(teacher_tokens),
                positions=ints(teacher_tokens),
                segment=ints(teacher_tokens),
                teacher_index=ints(tokens),
                weight=floats(),
            )
        return cls(
            tokens=ints(tokens),
            positions=ints(tokens),
            segment=ints(tokens),
            mask=np.zeros(shape, bool),
            old_logp=floats(),
            sampler_logp=floats(),
            advantage=floats(),
            weight=floats(),
            teacher=teacher,
        )


# Batches pass through jit, device_put and tree.map.
for _batch_class in (Batch, TeacherBatch):
    _field_names = [field.name for field in dataclasses.fields(_batch_class)]
    jax.tree_util.register_dataclass(_batch_class, data_fields=_field_names, meta_fields=[])
