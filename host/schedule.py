"""Sigmas and timesteps of the flow-matching samplers, bit-exact with diffusers' scheduler.

A schedule starts from *nodes*: evenly spaced, or the fixed ones that a few-step model was distilled
for. A shift then makes the high noise levels denser, and a stretch may move the last one. What a
model set or a named schedule changes about this is all in ``SchedulerConfig``.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from .contract import ContractError

LONGEST = 10_000_000
"""Steps of the longest schedule that is computed: a small ``denoise`` takes the end of one of ``steps / denoise``."""

WHOLE = 0.9999
"""A ``denoise`` above this is the whole schedule, as in ComfyUI's ``KSampler.set_steps``."""

HIGHEST_SIGMA = 1 + 1e-6
"""Pure noise is 1, but ``shift * 1 / (1 + (shift - 1) * 1)``, ComfyUI's and diffusers', may round above it in fp32."""

LARGEST_MU = 10.0
"""Far above any model's; beyond, fp32 cannot tell the first noise levels from pure noise."""

NOT_SUPPORTED = (
    "invert_sigmas",
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "stochastic_sampling",
)
"""Switches of diffusers' scheduler that would need another schedule or sampler."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _as_float32(values: Sequence[float] | np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # what overflows is refused as infinite, not warned about
        return np.asarray(values, dtype=np.float32)


def _check_sigmas(name: str, sigmas: np.ndarray) -> None:
    """Raise ``ContractError`` unless they fall strictly, in fp32, and stay above 0 and within 1."""
    if not sigmas.size:
        raise ContractError(f"{name} holds no noise level above 0: give at least one, such as 1")
    for place, sigma in enumerate(sigmas, start=1):
        if not 0 < sigma <= HIGHEST_SIGMA:
            raise ContractError(
                f"number {place} of {name} is {sigma:g}: a noise level must be above 0 and at most 1, as the schedules "
                "of flow-matching models are; only a last one may be 0"
            )
        if place > 1 and not sigma < sigmas[place - 2]:
            raise ContractError(
                f"number {place} of {name} is {sigma:g} after {sigmas[place - 2]:g}: each must be below the one before"
            )


@dataclass(frozen=True)
class SchedulerConfig:
    """The published ``host/scheduler.json``, under diffusers' names; the defaults are Qwen-Image-2.1's.

    ``shift`` counts only where ``use_dynamic_shifting`` is false, the four settings of ``mu`` only
    where it is true. ``shift_terminal`` is the last sigma that is not 0, or 0 to leave it where the
    shift puts it. ``sample_sigmas`` are fixed nodes without the final 0; they take the place of the
    evenly spaced ones, so they are shifted and stretched too, and ``steps`` becomes their number.
    Source: ``QwenImage21Pipeline.__call__``, which hands its ``sample_sigmas`` (from a checkpoint's
    ``model_index.json``) to ``FlowMatchEulerDiscreteScheduler.set_timesteps(sigmas=..., mu=...)``.
    """

    base_image_seq_len: int = 256
    max_image_seq_len: int = 8192
    base_shift: float = 0.5
    max_shift: float = 0.9
    shift_terminal: float = 0.02
    time_shift_type: str = "exponential"
    num_train_timesteps: int = 1000
    steps: int = 40
    use_dynamic_shifting: bool = True
    shift: float = 1.0
    sample_sigmas: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.sample_sigmas is not None:
            if not (isinstance(self.sample_sigmas, tuple) and all(map(_is_number, self.sample_sigmas))):
                raise ContractError(f"sample_sigmas is {self.sample_sigmas!r}: it must be a list of numbers, or null")
            _check_sigmas("sample_sigmas", _as_float32(self.sample_sigmas))
            object.__setattr__(self, "steps", len(self.sample_sigmas))
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool):
                if not isinstance(value, bool):
                    raise ContractError(f"{field.name} is {value!r}: it must be true or false")
            elif isinstance(field.default, int | float) and not _is_number(value):
                raise ContractError(f"{field.name} is {value!r}: it must be a number")
        for name in ("shift", "num_train_timesteps", "steps"):
            if getattr(self, name) <= 0:
                raise ContractError(f"{name} is {getattr(self, name)}: it must be above 0")
        if self.time_shift_type != "exponential":
            raise ContractError(f"time_shift_type is {self.time_shift_type!r}: only 'exponential' is supported")
        if self.max_image_seq_len == self.base_image_seq_len:
            raise ContractError("max_image_seq_len equals base_image_seq_len: the shift is undefined")
        if not 0 <= self.shift_terminal < 1:
            raise ContractError(f"shift_terminal is {self.shift_terminal}: it must be from 0 to below 1")

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> "SchedulerConfig":
        """From ``host/scheduler.json`` or a checkpoint's ``scheduler_config.json``; other keys are not ours.

        A key that is missing or null keeps its default, but a ``shift_terminal`` of null is 0: that
        is how diffusers writes that nothing is stretched.
        """
        for name in NOT_SUPPORTED:
            if config.get(name):
                raise ContractError(f"{name} is {config[name]!r}: only a schedule without it is supported")
        known = {field.name for field in fields(cls)}
        given = {key: value for key, value in config.items() if key in known and value is not None}
        if "shift_terminal" in config:
            given.setdefault("shift_terminal", 0.0)
        if isinstance(given.get("sample_sigmas"), list):
            given["sample_sigmas"] = tuple(given["sample_sigmas"])
        return cls(**given)

    @classmethod
    def from_file(cls, path: str | Path) -> "SchedulerConfig":
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, AttributeError, ValueError) as error:
            raise ContractError(f"cannot read the scheduler's settings from {path}: {error}") from error

    def mu(self, image_tokens: int) -> float:
        """Logarithm of the shift: it grows linearly with the number of image tokens, unless the shift is static."""
        if not self.use_dynamic_shifting:
            return math.log(self.shift)
        slope = (self.max_shift - self.base_shift) / (self.max_image_seq_len - self.base_image_seq_len)
        return image_tokens * slope + (self.base_shift - slope * self.base_image_seq_len)

    def nodes(self, steps: int) -> np.ndarray:
        """The noise levels ``[steps]`` before shift and stretch, fp32.

        Raises ``ContractError`` where they are fixed and ``steps`` is not their number: a model
        distilled for certain nodes is no good at others.
        """
        if steps < 1:
            raise ContractError(f"steps is {steps}: at least 1 is needed")
        if self.sample_sigmas is None:
            return np.linspace(1.0, 1 / steps, steps).astype(np.float32)
        if steps != len(self.sample_sigmas):
            raise ContractError(
                f"steps is {steps}: this schedule has {len(self.sample_sigmas)} fixed steps, so set steps to "
                f"{len(self.sample_sigmas)} or choose another schedule"
            )
        return _as_float32(self.sample_sigmas)


NAMED_SCHEDULES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "model": {},
        "unstretched": {"shift_terminal": 0.0},
        "viggle-turbo-6": {
            "sample_sigmas": (1.0, 0.9375, 0.875, 0.75, 0.5, 0.25),
            "use_dynamic_shifting": True,
            "shift_terminal": 0.0,
        },
    }
)
"""What each named schedule changes about a model set's own ``SchedulerConfig``.

``unstretched`` ends where the shift puts it: the last steps of a stretched schedule are far apart in
``log(sigma)``, which ``dpmpp_2m`` takes badly. ``viggle-turbo-6`` is for the six-step LoRA of
Viggle/Qwen-Image-2.1-viggle-turbo: nodes and settings of its model card and
``scheduler_config.json``. Nodes of one distilled LoRA do not suit another.
"""


def named_config(name: str, config: SchedulerConfig = SchedulerConfig()) -> SchedulerConfig:
    """``config`` as the schedule ``name`` of ``NAMED_SCHEDULES`` changes it."""
    if name not in NAMED_SCHEDULES:
        raise ContractError(f"there is no schedule {name!r}: choose one of {', '.join(NAMED_SCHEDULES)}")
    return replace(config, **NAMED_SCHEDULES[name])


@dataclass(frozen=True)
class Schedule:
    """``sigmas [steps + 1]`` ending in 0, ``timesteps [steps]`` (sigma times 1000), and ``mu``, 0 without a shift."""

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

    Source: ``FlowMatchEulerDiscreteScheduler.set_timesteps``. Raises ``ContractError`` for numbers
    below 1, and for other ``steps`` than ``config.sample_sigmas`` has.
    """
    nodes = config.nodes(steps)
    if image_tokens < 1:
        raise ContractError(f"{image_tokens} image tokens: at least 1 is needed")
    mu = config.mu(image_tokens)
    if not abs(mu) <= LARGEST_MU:
        raise ContractError(
            f"mu is {mu:g} for {image_tokens} image tokens: it must be from {-LARGEST_MU:g} to {LARGEST_MU:g}, so "
            "correct shift, base_shift or max_shift in the model set's scheduler.json"
        )
    return _with_timesteps(shifted(nodes, mu, config), mu, config)


def partial_schedule(
    steps: int, denoise: float, image_tokens: int, config: SchedulerConfig = SchedulerConfig()
) -> Schedule:
    """The end of a schedule, starting from about the noise level ``denoise`` (before the shift); 0 leaves no steps.

    Evenly spaced nodes: the last ``steps`` steps of a schedule of ``steps / denoise``, which is how
    ComfyUI's samplers read ``denoise``. Fixed nodes cannot be made denser: those up to ``denoise``
    are kept, so there are fewer than ``steps`` steps.
    """
    if not 0 <= denoise <= 1:
        raise ContractError(f"denoise is {denoise}: it must be from 0 to 1")
    if config.sample_sigmas is not None:
        return flow_match_schedule(steps, image_tokens, config).last(_fixed_steps_left(config.sample_sigmas, denoise))
    if 0 < denoise < steps / LONGEST:
        raise ContractError(f"denoise is {denoise}: with {steps} steps it must be 0 or at least {steps / LONGEST:g}")
    total = steps if denoise > WHOLE or denoise == 0 else int(steps / denoise)
    return flow_match_schedule(total, image_tokens, config).last(0 if denoise == 0 else steps)


def schedule_from_sigmas(sigmas: Sequence[float] | np.ndarray, config: SchedulerConfig = SchedulerConfig()) -> Schedule:
    """A schedule of noise levels taken exactly as given (ComfyUI's SIGMAS): neither shifted nor stretched.

    They fall strictly, from at most 1, and end in 0; without that 0 it is appended. Raises
    ``ContractError`` for anything else.
    """
    try:
        levels = _as_float32(sigmas)
    except (TypeError, ValueError) as error:
        raise ContractError(f"sigmas are {sigmas!r}: pass a list of numbers") from error
    if levels.ndim != 1:
        raise ContractError(f"sigmas have shape {list(levels.shape)}: pass one list of numbers")
    if levels.size and levels[-1] == 0:
        levels = levels[:-1]
    _check_sigmas("sigmas", levels)
    return _with_timesteps(levels, 0.0, config)


def shifted(nodes: np.ndarray, mu: float, config: SchedulerConfig) -> np.ndarray:
    """Shift and stretch, in fp32 and in the source's order of operations, to match it to the last bit.

    A single step from pure noise is not stretched: that would be 0/0. It goes from 1 to 0.
    """
    if config.use_dynamic_shifting:
        shift = np.float32(math.exp(mu))
        sigmas: np.ndarray = shift / (shift + (1 / nodes - 1))
    else:
        sigmas = config.shift * nodes / (1 + (config.shift - 1) * nodes)
    if config.shift_terminal and nodes[-1] < 1:
        remaining = 1 - sigmas
        sigmas = 1 - remaining / (remaining[-1] / np.float32(1 - config.shift_terminal))
    return sigmas


def _with_timesteps(sigmas: np.ndarray, mu: float, config: SchedulerConfig) -> Schedule:
    return Schedule(np.append(sigmas, np.float32(0)), sigmas * np.float32(config.num_train_timesteps), mu)


def _fixed_steps_left(nodes: tuple[float, ...], denoise: float) -> int:
    """How many of the final steps ``denoise`` leaves."""
    if denoise > WHOLE:
        return len(nodes)
    left = sum(node <= denoise for node in nodes)
    if denoise and not left:
        raise ContractError(
            f"denoise is {denoise}: the lowest of this schedule's fixed steps starts at {nodes[-1]:g}, so set denoise "
            "to that or more, or to 0"
        )
    return left
