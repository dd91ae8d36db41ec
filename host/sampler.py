"""The denoising loop: a generator over any callable denoiser, so the caller owns progress and stopping.

Flow matching: a latent at noise level sigma is ``sigma * noise + (1 - sigma) * data`` and the
denoiser returns the velocity ``noise - data``. Everything is fp32.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from .contract import ContractError
from .schedule import Schedule

Denoiser = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Tokens ``[B, N, 64]`` and ``t [1]`` in [0, 1] to the velocity ``[B, N, 64]``."""


@dataclass(frozen=True)
class Step:
    """What one step made: ``x`` after it, and ``denoised``, the picture it points at, ``[B, N, 64]`` each."""

    index: int
    total: int
    x: np.ndarray
    denoised: np.ndarray


@dataclass(frozen=True)
class Inpainting:
    """Keeps what ``mask`` excludes: 1 is denoised anew, 0 stays ``latents``. ``[B or 1, N, 1]`` and ``[B, N, 64]``."""

    mask: np.ndarray
    latents: np.ndarray
    noise: np.ndarray

    def restore(self, x: np.ndarray, sigma: np.float32) -> np.ndarray:
        kept = add_noise(self.latents, self.noise, sigma)
        return x * self.mask + kept * (1 - self.mask)


def add_noise(latents: np.ndarray, noise: np.ndarray, sigma: np.float32) -> np.ndarray:
    """``latents`` at noise level ``sigma``; at 1 exactly the noise."""
    return sigma * noise + (1 - sigma) * latents


def sample_euler(
    denoise: Denoiser, x: np.ndarray, schedule: Schedule, inpainting: Inpainting | None = None
) -> Iterator[Step]:
    """Euler's method on the flow, one ``Step`` for each of the schedule.

    Source: ``FlowMatchEulerDiscreteScheduler.step``. The DiT's timestep is ``timesteps[i] / 1000``
    as written there: multiplied by 1000, then divided, to match the last bit. Raises
    ``ContractError`` that names the step when a velocity is not finite.
    """
    for index in range(schedule.steps):
        sigma, next_sigma = schedule.sigmas[index], schedule.sigmas[index + 1]
        timestep = schedule.timesteps[index : index + 1] / np.float32(1000)
        velocity = denoise(x, timestep)
        if not np.isfinite(velocity).all():
            raise ContractError(
                f"the velocity of step {index + 1} of {schedule.steps} is not finite "
                f"({np.count_nonzero(~np.isfinite(velocity))} of {velocity.size} values): the model set is damaged or "
                "its precision is too low for this prompt"
            )
        denoised = x - sigma * velocity
        x = x + (next_sigma - sigma) * velocity
        if inpainting is not None:
            x = inpainting.restore(x, next_sigma)
        yield Step(index, schedule.steps, x, denoised)


def with_guidance(positive: Denoiser, negative: Denoiser, cfg: float) -> Denoiser:
    """True classifier-free guidance: ``neg + cfg * (pos - neg)``."""

    def guided(x: np.ndarray, timestep: np.ndarray) -> np.ndarray:
        away = negative(x, timestep)
        return away + np.float32(cfg) * (positive(x, timestep) - away)

    return guided
