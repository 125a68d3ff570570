"""Inputs of a teacher for the rows of a training batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from infcl_jax.data.feature_store import FeatureStore
from infcl_jax.data.tokenizers import BaseTokenizer


class TeacherRow(NamedTuple):
    """Row of a training batch.

    Attributes:
      sample: sample index.
      caption: caption drawn for the row.
      number: number of that caption among those of the sample.
    """

    sample: int
    caption: str
    number: int


@dataclasses.dataclass(frozen=True)
class TeacherTokens:
    """Token ids of a teacher whose tokenizer is not the student's.

    Attributes:
      tokenizer: tokenizer of the teacher.
    """

    tokenizer: BaseTokenizer

    def __call__(self, rows: Sequence[TeacherRow]) -> dict[str, np.ndarray]:
        """Return {"teacher_text": int32 [rows, L]}."""
        return {"teacher_text": self.tokenizer([row.caption for row in rows])}


@dataclasses.dataclass(frozen=True)
class TeacherFeatures:
    """Cached features of a teacher.

    Attributes:
      stores: features of the samples by tower, "image" and "text".
    """

    stores: Mapping[str, FeatureStore]

    def __call__(self, rows: Sequence[TeacherRow]) -> dict[str, np.ndarray]:
        """Return {"teacher_image": [rows, D], "teacher_text": [rows, D]}.

        Raises:
          ValueError: the cache lacks a sample, which could not be read when the features were computed.
        """
        image = [self._row("image", row.sample, 0) for row in rows]
        text = [self._row("text", row.sample, row.number) for row in rows]
        return {"teacher_image": np.stack(image), "teacher_text": np.stack(text)}

    def _row(self, tower: str, index: int, number: int) -> np.ndarray:
        features = self.stores[tower].features(index)
        if number >= len(features):
            raise ValueError(
                f"expected cached {tower} features of the teacher for sample {index}, got {len(features)} rows; the "
                f"sample could not be read when they were computed, delete {self.stores[tower].folder} to try again"
            )
        return features[number]
