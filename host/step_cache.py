"""Re-uses a velocity on the steps that differ least from the step before: fewer calls of the DiT, approximately.

Consecutive velocities resemble each other most where the DiT's only input that is not the picture,
the timestep embedding, has moved least: the idea of TeaCache (https://arxiv.org/abs/2411.19108),
which compares embeddings. Here the steps are chosen before the first one, from the schedule alone,
so that their number is what was asked for.
"""

import math

import numpy as np

from .contract import ContractError
from .sampler import Denoiser, timestep_of
from .schedule import Schedule

LARGEST_SHARE = 0.5
"""Never two in a row: at most every second step."""

EMBEDDING_CHANNELS = 256
LONGEST_PERIOD = 10_000
"""Of the sinusoids, in radians of the timestep; both as in ``timestep_embedding`` of ``host/graphs/dit.py``."""


def embedding_distance(difference: np.ndarray) -> np.ndarray:
    """Euclidean distance of two timestep embeddings whose timesteps (0 to 1000) differ by ``difference``, any shape.

    With cosine and sine of every frequency, the distance is one of chords: it does not depend on the
    timesteps themselves. ``(cos a - cos b)² + (sin a - sin b)² = 4 sin²((a - b) / 2)``.
    """
    half = EMBEDDING_CHANNELS // 2
    frequencies = np.exp(np.arange(half) * (-math.log(LONGEST_PERIOD) / half))
    chords = 2 * np.sin(np.asarray(difference, dtype=np.float64)[..., None] * frequencies / 2)
    return np.sqrt((chords**2).sum(axis=-1))


def check_share(share: float) -> None:
    """Raise ``ContractError`` unless ``share`` is a share of steps that can be re-used."""
    if not 0 <= share <= LARGEST_SHARE:
        raise ContractError(f"the share of re-used steps is {share}: it must be from 0 (none) to {LARGEST_SHARE}")


def reused_steps(schedule: Schedule, share: float) -> frozenset[int]:
    """Indices of the steps that take the velocity of the step before: at most ``share`` of all steps.

    Those whose embedding moved least come first; none is in the first or the last tenth of the
    steps, and never are two in a row, so a large ``share`` is not always reached.
    """
    check_share(share)
    edge = math.ceil(schedule.steps / 10)
    inner = np.arange(edge, schedule.steps - edge)
    moved = embedding_distance(schedule.timesteps[inner] - schedule.timesteps[inner - 1])
    chosen: set[int] = set()
    for index in inner[np.argsort(moved, kind="stable")].tolist():
        if len(chosen) + 1 > share * schedule.steps:
            break
        if not {index - 1, index + 1} & chosen:
            chosen.add(index)
    return frozenset(chosen)


class StepCache:
    """A denoiser that calls ``denoise`` only on the steps of ``schedule`` that are not re-used.

    It works with any sampler that follows ``schedule`` from its first step, for one picture after
    another, and goes around guidance, whose two velocities are then both saved. ``called`` and
    ``reused`` count the steps of either kind.
    """

    def __init__(self, denoise: Denoiser, schedule: Schedule, share: float):
        self.called = 0
        self.reused = 0
        self._denoise = denoise
        self._reused_times = {timestep_of(schedule, index).item() for index in reused_steps(schedule, share)}
        self._velocity: np.ndarray | None = None

    def __call__(self, x: np.ndarray, timestep: np.ndarray) -> np.ndarray:
        if self._velocity is not None and timestep.item() in self._reused_times:
            self.reused += 1
        else:
            self.called += 1
            self._velocity = self._denoise(x, timestep)
        return self._velocity
