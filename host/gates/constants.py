"""RoPE tables and scheduler settings as files, for hosts in other languages, and proof that they are right.

What is written is read back and compared with what this pack computes and with diffusers. Bits are
compared, so that a last digit counts.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..contract import ContractError
from ..export.checkpoint import checkpoint_scheduler
from ..export.model_set import SCHEDULER_FILE, write_host_constants
from ..rope import (
    AXIS_WIDTHS,
    FIRST_POSITION,
    THETA,
    AxisTables,
    RopeTables,
    axis_tables,
    read_axis_tables,
    rope_tables,
)
from ..schedule import Schedule, SchedulerConfig, flow_match_schedule

LENGTHS = (8, 18, 512)
GRIDS = ((8, 8), (9, 11), (12, 8), (1, 64), (64, 64))
STEPS = (2, 4, 6, 20, 40, 100)
IMAGE_TOKENS = (64, 99, 256, 1024, 4096)

Cases = Iterator[tuple[str, bool]]
"""What was compared, and whether it is the same."""


@dataclass(frozen=True)
class Check:
    """One comparison; ``same`` is None where it could not be made, which ``note`` explains."""

    what: str
    same: bool | None
    note: str

    def __str__(self) -> str:
        verdict = "not run" if self.same is None else "same" if self.same else "DIFFERENT"
        return f"{verdict}: {self.what}: {self.note}"


def host_constants(folder: Path, checkpoint: Path | None = None) -> list[Check]:
    """Write the files for Qwen-Image-2.1, or for ``checkpoint``, and check them."""
    config = SchedulerConfig() if checkpoint is None else checkpoint_scheduler(checkpoint)
    write_host_constants(folder, config)
    return check_host_constants(folder, config, checkpoint)


def check_host_constants(folder: Path, config: SchedulerConfig, checkpoint: Path | None = None) -> list[Check]:
    """The files in ``folder`` against what this pack computes, and against diffusers where it is installed."""
    steps = STEPS if config.sample_sigmas is None else (config.steps,)
    defined = [count for count in steps if config.nodes(count)[-1] < 1 or not config.shift_terminal]
    return [
        _check("RoPE tables and rope_tables", lambda: _rope_cases(folder, axis_tables(), rope_tables)),
        _check("RoPE tables and diffusers' QwenImage21Rope", lambda: _rope_cases(folder, *_reference_rope())),
        _check(
            "scheduler.json and flow_match_schedule",
            lambda: _settings_cases(folder, steps, config),
        ),
        _check(
            "scheduler.json and diffusers' FlowMatchEulerDiscreteScheduler",
            lambda: _schedule_cases(folder, defined, _reference_schedule(config, checkpoint)),
        ),
    ]


def _check(what: str, compare: Callable[[], Cases]) -> Check:
    try:
        results = dict(compare())
    except ImportError as error:
        return Check(what, None, f"{error}; pip install -e '.[reference]'")
    except ContractError as error:
        return Check(what, False, str(error))
    if not results:
        return Check(what, None, "diffusers divides 0 by 0 for a single step from pure noise")
    different = [case for case, same in results.items() if not same]
    if different:
        return Check(what, False, f"{len(different)} of {len(results)} cases, the first: {different[0]}")
    return Check(what, True, f"{len(results)} cases, bit for bit")


def _rope_cases(folder: Path, reference: AxisTables, reference_rope: Callable[[int, int, int], RopeTables]) -> Cases:
    tables = read_axis_tables(folder)
    if tables is None:
        raise ContractError(f"{folder} holds no RoPE tables")
    for axis, pairs in enumerate(zip(tables, reference, strict=True)):
        yield f"axis {axis}, every position", _all_same(*pairs)
    for length, (height, width) in product(LENGTHS, GRIDS):
        found, expected = rope_tables(length, height, width, tables), reference_rope(length, height, width)
        same = _all_same(vars(found).values(), vars(expected).values())
        yield f"{length} text tokens on a {height} x {width} grid", same


def _reference_rope() -> tuple[AxisTables, Callable[[int, int, int], RopeTables]]:
    """diffusers' axis tables, and its rows for a text and a grid."""
    from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21Rope

    rope = QwenImage21Rope(theta=THETA, axes_dim=list(AXIS_WIDTHS))
    # Its rows are the positions from 0 on, then the negative ones, so that a negative index finds them.
    axes = [torch.roll(axis, -FIRST_POSITION, 0) for axis in rope.freqs]

    def tables(text_len: int, height: int, width: int) -> RopeTables:
        image = torch.arange(text_len + height * width) >= text_len
        rotation = rope([(1, height, width)], image, torch.device("cpu"))[None]
        cos, sin = rotation.real.numpy(), rotation.imag.numpy()
        return RopeTables(cos[:, :text_len], sin[:, :text_len], cos[:, text_len:], sin[:, text_len:])

    return tuple((axis.real.numpy(), axis.imag.numpy()) for axis in axes), tables


def _settings_cases(folder: Path, steps: Iterable[int], config: SchedulerConfig) -> Cases:
    yield "every setting", SchedulerConfig.from_file(folder / SCHEDULER_FILE) == config
    yield from _schedule_cases(folder, steps, partial(flow_match_schedule, config=config))


def _schedule_cases(folder: Path, steps: Iterable[int], reference: Callable[[int, int], Schedule]) -> Cases:
    config = SchedulerConfig.from_file(folder / SCHEDULER_FILE)
    for count, image_tokens in product(steps, IMAGE_TOKENS):
        found, expected = flow_match_schedule(count, image_tokens, config), reference(count, image_tokens)
        same = _all_same((found.sigmas, found.timesteps), (expected.sigmas, expected.timesteps))
        yield f"{count} steps for {image_tokens} image tokens", same and found.mu == expected.mu


def _reference_schedule(config: SchedulerConfig, checkpoint: Path | None) -> Callable[[int, int], Schedule]:
    """diffusers' schedule, with the checkpoint's own file where there is one, called as its pipeline calls it."""
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.qwenimage21.pipeline_qwenimage21 import calculate_shift

    if checkpoint is None:
        settings: dict[str, Any] = asdict(config)
        own = {name: settings[name] for name in settings if name not in ("steps", "sample_sigmas")}
        scheduler = FlowMatchEulerDiscreteScheduler(**own)
    else:
        scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(checkpoint / "scheduler")
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")

    def schedule(steps: int, image_tokens: int) -> Schedule:
        mu = calculate_shift(image_tokens, *(scheduler.config[name] for name in names))
        scheduler.set_timesteps(sigmas=config.sample_sigmas or np.linspace(1.0, 1 / steps, steps), mu=mu)
        # A static shift has no mu of its own; what it amounts to is ours.
        mu = mu if scheduler.config.use_dynamic_shifting else config.mu(image_tokens)
        return Schedule(scheduler.sigmas.numpy(), scheduler.timesteps.numpy(), mu)

    return schedule


def same_bits(array: np.ndarray, other: np.ndarray) -> bool:
    """Whether dtype, shape and every bit are equal: 0 is not -0 then, and NaN is NaN."""
    return array.dtype == other.dtype and array.shape == other.shape and array.tobytes() == other.tobytes()


def _all_same(found: Iterable[np.ndarray], expected: Iterable[np.ndarray]) -> bool:
    return all(same_bits(array, other) for array, other in zip(found, expected, strict=True))
