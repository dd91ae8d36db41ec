"""What gates judge, and how two results are compared."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .. import sampler
from ..model_set import ModelSet
from ..rope import RopeTables, rope_tables
from ..schedule import Schedule
from .captured import Oracle


class NotRunError(Exception):
    """A gate that does not apply here; the message says why."""


@dataclass(frozen=True)
class Subject:
    """A model set, the checkpoint it was exported from, and what the reference made of the latter.

    ``steps`` are those of the oracle that are teacher-forced.
    """

    oracle: Oracle
    checkpoint: Path
    model: ModelSet
    steps: Sequence[int]

    @property
    def grid(self) -> tuple[int, int]:
        """(height, width) in latent tokens."""
        return self.oracle.request.grid

    def rope(self, text_length: int) -> RopeTables:
        return rope_tables(text_length, *self.grid, self.model.rope_tables)

    def inputs(self, step: int) -> dict[str, np.ndarray]:
        """What the DiT reads in ``step``, by the contract's names."""
        oracle = self.oracle
        return {
            "img_tokens": oracle.latents(step),
            "txt_feats": oracle.embeddings,
            "timestep": sampler.timestep_of(Schedule(oracle.sigmas, oracle.timesteps, 0.0), step),
            **vars(self.rope(oracle.embeddings.shape[1])),
        }


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest, as a share of the largest expected value."""
    return float(np.abs(found.astype(np.float64) - expected).max() / np.abs(expected).max())


def correlation(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.corrcoef(found.ravel().astype(np.float64), expected.ravel().astype(np.float64))[0, 1])


def rowwise(found: np.ndarray, expected: np.ndarray) -> list[float]:
    """The correlation of each row of ``[rows, values]``."""
    return [correlation(ours, theirs) for ours, theirs in zip(found, expected, strict=True)]


def decibels(found: np.ndarray, expected: np.ndarray) -> float:
    """PSNR of two 8-bit pictures of the same shape; 100 for equal ones."""
    error = float(np.mean((found.astype(np.float64) - expected) ** 2))
    return min(100.0, 10 * np.log10(255**2 / max(error, 1e-12)))
