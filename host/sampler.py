"""The denoising loop: a generator over any callable denoiser, so the caller owns progress and stopping.

Flow matching: a latent at noise level sigma is ``sigma * noise + (1 - sigma) * data`` and the
denoiser returns the velocity ``noise - data``. Everything is fp32.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

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


def timestep_of(schedule: Schedule, index: int) -> np.ndarray:
    """The DiT's timestep of step ``index``, fp32 ``[1]`` from 0 to 1.

    ``timesteps[i] / 1000`` as diffusers' pipeline has it: multiplied by 1000, then divided, to match
    the last bit.
    """
    return schedule.timesteps[index : index + 1] / np.float32(1000)


def add_noise(latents: np.ndarray, noise: np.ndarray, sigma: np.float32) -> np.ndarray:
    """``latents`` at noise level ``sigma``; at 1 exactly the noise."""
    return sigma * noise + (1 - sigma) * latents


Integrator = Callable[[np.ndarray, np.ndarray, np.float32, np.float32], np.ndarray]
"""``(x, velocity, sigma, next_sigma)`` to ``x`` at ``next_sigma``, ``[B, N, 64]``; asked once a step, in order."""


def euler(x: np.ndarray, velocity: np.ndarray, sigma: np.float32, next_sigma: np.float32) -> np.ndarray:
    """Euler's method, first order. Source: ``FlowMatchEulerDiscreteScheduler.step``."""
    return x + (next_sigma - sigma) * velocity


class MultistepDPM:
    """DPM-Solver++(2M), second order at one velocity a step: what two steps saw, extrapolated by half a step.

    Source: https://arxiv.org/abs/2211.01095, algorithm 2, in the form of ComfyUI's ``dpmpp_2m``, whose
    latents these are: time is ``-log(sigma)``. There ``x' = sigma'/sigma x + (1 - sigma'/sigma) D`` with
    ``D = d + h / (2 h_last) (d - d_last)``, where ``d`` is the denoised picture and ``h`` the step in
    time. That is Euler's step plus a correction, which vanishes, to the last bit, in the first step
    and in the one to sigma = 0.
    """

    def __init__(self) -> None:
        self._last: tuple[float, np.ndarray] | None = None

    def __call__(self, x: np.ndarray, velocity: np.ndarray, sigma: np.float32, next_sigma: np.float32) -> np.ndarray:
        denoised = x - sigma * velocity
        moved = euler(x, velocity, sigma, next_sigma)
        if self._last is not None and next_sigma > 0:
            last_sigma, last_denoised = self._last
            if last_sigma > sigma:  # the longest schedules repeat a sigma in fp32
                extrapolation = math.log(sigma / next_sigma) / (2 * math.log(last_sigma / sigma))
                weight = np.float32((1 - float(next_sigma) / float(sigma)) * extrapolation)
                moved += weight * (denoised - last_denoised)
        self._last = float(sigma), denoised
        return moved


class AdamsBashforth:
    """Second order at one velocity a step: the last two, as a line over sigma, integrated. The first step is Euler's.

    Source: any text on the Adams-Bashforth methods, here with steps of unequal length. What it assumes
    to change evenly, the velocity over sigma, hardly changes on this flow, so it needs the fewest steps.
    """

    def __init__(self) -> None:
        self._last: tuple[float, np.ndarray] | None = None

    def __call__(self, x: np.ndarray, velocity: np.ndarray, sigma: np.float32, next_sigma: np.float32) -> np.ndarray:
        moved = euler(x, velocity, sigma, next_sigma)
        if self._last is not None:
            last_sigma, last_velocity = self._last
            if last_sigma > sigma:  # the longest schedules repeat a sigma in fp32
                step, last_step = float(next_sigma) - float(sigma), float(sigma) - last_sigma
                moved += np.float32(step**2 / (2 * last_step)) * (velocity - last_velocity)
        self._last = float(sigma), velocity
        return moved


SAMPLERS: Mapping[str, Callable[[], Integrator]] = MappingProxyType(
    {"euler": lambda: euler, "adams_bashforth_2m": AdamsBashforth, "dpmpp_2m": MultistepDPM}
)
"""A new integrator for each picture. A name that ComfyUI has means the same here."""


def check_sampler(name: str) -> None:
    """Raise ``ContractError`` unless ``SAMPLERS`` has ``name``."""
    if name not in SAMPLERS:
        raise ContractError(f"there is no sampler {name!r}: choose one of {', '.join(SAMPLERS)}")


def sample(
    denoise: Denoiser, x: np.ndarray, schedule: Schedule, inpainting: Inpainting | None = None, sampler: str = "euler"
) -> Iterator[Step]:
    """Follow the flow from noise to picture, one ``Step`` and one call of ``denoise`` for each of the schedule.

    Raises ``ContractError`` for a sampler that ``SAMPLERS`` has not (on the first step: call
    ``check_sampler`` before anything is loaded), and, naming the step, for a velocity that is not
    finite.
    """
    check_sampler(sampler)
    integrate = SAMPLERS[sampler]()
    for index in range(schedule.steps):
        sigma, next_sigma = schedule.sigmas[index], schedule.sigmas[index + 1]
        velocity = denoise(x, timestep_of(schedule, index))
        if not np.isfinite(velocity).all():
            raise ContractError(
                f"the velocity of step {index + 1} of {schedule.steps} is not finite "
                f"({np.count_nonzero(~np.isfinite(velocity))} of {velocity.size} values): the model set is damaged or "
                "its precision is too low for this prompt"
            )
        denoised = x - sigma * velocity
        x = integrate(x, velocity, sigma, next_sigma)
        if inpainting is not None:
            x = inpainting.restore(x, next_sigma)
        yield Step(index, schedule.steps, x, denoised)


def with_guidance(positive: Denoiser, negative: Denoiser, cfg: float) -> Denoiser:
    """True classifier-free guidance: ``neg + cfg * (pos - neg)``."""

    def guided(x: np.ndarray, timestep: np.ndarray) -> np.ndarray:
        away = negative(x, timestep)
        return away + np.float32(cfg) * (positive(x, timestep) - away)

    return guided
