"""Sigmas and timesteps of the FlowMatch Euler sampler, bit-exact with diffusers' scheduler."""

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from .contract import ContractError

LONGEST = 10_000_000
"""Steps of the longest schedule that is computed: a small ``denoise`` takes the end of one of ``steps / denoise``."""


@dataclass(frozen=True)
class SchedulerConfig:
    """The published ``host/scheduler.json``; the defaults are Qwen-Image-2.1's."""

    base_image_seq_len: int = 256
    max_image_seq_len: int = 8192
    base_shift: float = 0.5
    max_shift: float = 0.9
    shift_terminal: float = 0.02
    time_shift_type: str = "exponential"
    num_train_timesteps: int = 1000
    steps: int = 40

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, int | float) and not (isinstance(value, int | float) and math.isfinite(value)):
                raise ContractError(f"{field.name} is {value!r}: it must be a number")
        if self.time_shift_type != "exponential":
            raise ContractError(f"time_shift_type is {self.time_shift_type!r}: only 'exponential' is supported")
        if self.max_image_seq_len == self.base_image_seq_len:
            raise ContractError("max_image_seq_len equals base_image_seq_len: the shift is undefined")
        if not 0 <= self.shift_terminal < 1:
            raise ContractError(f"shift_terminal is {self.shift_terminal}: it must be from 0 to below 1")

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> "SchedulerConfig":
        """From ``host/scheduler.json`` or a checkpoint's ``scheduler_config.json``; other keys are not ours."""
        known = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in config.items() if key in known and value is not None})

    @classmethod
    def from_file(cls, path: str | Path) -> "SchedulerConfig":
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, AttributeError, ValueError) as error:
            raise ContractError(f"cannot read the scheduler's settings from {path}: {error}") from error

    def shift(self, image_tokens: int) -> float:
        """``mu``: grows linearly with the number of image tokens."""
        slope = (self.max_shift - self.base_shift) / (self.max_image_seq_len - self.base_image_seq_len)
        return image_tokens * slope + (self.base_shift - slope * self.base_image_seq_len)


@dataclass(frozen=True)
class Schedule:
    """``sigmas [steps + 1]`` ending in 0, ``timesteps [steps]`` (sigma times 1000), and ``mu``."""

    sigmas: np.ndarray
    timesteps: np.ndarray
    mu: float

    @property
    def steps(self) -> int:
        return len(self.timesteps)

    def last(self, steps: int) -> "Schedule":
        """The schedule's final ``steps`` steps."""
        start = self.steps - steps
        return Schedule(self.sigmas[start:], self.timesteps[start:], self.mu)


def flow_match_schedule(steps: int, image_tokens: int, config: SchedulerConfig = SchedulerConfig()) -> Schedule:
    """The schedule of ``steps`` steps for a picture of ``image_tokens`` tokens.

    ``steps = 1`` would make the terminal stretch 0/0; a single step goes from pure noise (1) to 0.
    Source: ``FlowMatchEulerDiscreteScheduler.set_timesteps`` with dynamic shifting.
    """
    if steps < 1:
        raise ContractError(f"steps is {steps}: at least 1 is needed")
    if image_tokens < 1:
        raise ContractError(f"{image_tokens} image tokens: at least 1 is needed")
    mu = config.shift(image_tokens)
    sigmas: np.ndarray = np.linspace(1.0, 1 / steps, steps).astype(np.float32)
    if steps > 1:
        shift = np.float32(math.exp(mu))
        sigmas = shift / (shift + (1 / sigmas - 1))
        if config.shift_terminal:
            remaining = 1 - sigmas
            sigmas = 1 - remaining / (remaining[-1] / np.float32(1 - config.shift_terminal))
    timesteps = sigmas * np.float32(config.num_train_timesteps)
    return Schedule(np.append(sigmas, np.float32(0)), timesteps, mu)


def partial_schedule(
    steps: int, denoise: float, image_tokens: int, config: SchedulerConfig = SchedulerConfig()
) -> Schedule:
    """The last ``steps`` steps of a schedule of ``steps / denoise``: how ComfyUI's samplers read ``denoise``.

    ``denoise = 0`` gives an empty schedule.
    """
    if not 0 <= denoise <= 1:
        raise ContractError(f"denoise is {denoise}: it must be from 0 to 1")
    if 0 < denoise < steps / LONGEST:
        raise ContractError(f"denoise is {denoise}: with {steps} steps it must be 0 or at least {steps / LONGEST:g}")
    total = steps if denoise > 0.9999 or denoise == 0 else int(steps / denoise)
    return flow_match_schedule(total, image_tokens, config).last(0 if denoise == 0 else steps)
