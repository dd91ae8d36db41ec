"""One network of a checkpoint on its way to a bundle, and what that takes."""

import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from torch import nn

from ..bundle import Bundle
from ..contract import ContractError
from .convert import Part, Stage, convert
from .stored import StandIns, shards

logger = logging.getLogger(__name__)

MEMORY_FACTOR, MEMORY_BASE = 1.1, 900_000_000
"""Resident bytes at the peak: for each byte of a bundle, and beside them. The pages of the largest weight come on top.

Measured at 4.6 GB of DiT, 4.3 GB of text encoder and 4.0 GB of VAE: 1.28, 0.96 and 0.85 GB more than the bundle.
"""
HOST_BYTES = 50_000_000
"""More than the tokenizer, the RoPE tables and the settings of a set take."""


@dataclass(frozen=True)
class Cost:
    """Bytes of a component's source files, of its bundle, and of resident memory at the peak of its export."""

    title: str
    source: int
    bundle: int
    memory: int


@dataclass(frozen=True)
class Component:
    """``load`` makes the network; ``parts`` and ``describe`` make functions and metadata of the bundle from it."""

    title: str
    source: Path
    bundle: Path
    load: Callable[[StandIns], Any]
    parts: Callable[[Any], list[Part]]
    describe: Callable[[Any], dict[str, Any]]

    def export(self, stage: Stage = logger.info) -> Bundle:
        stand_ins = StandIns()
        model = self.load(stand_ins)
        main, *others = self.parts(model)
        return convert(*main, self.bundle, self.describe(model), others, stand_ins, stage)

    def cost(self) -> Cost:
        """Without reading a weight. Raises ``ContractError`` if the checkpoint does not fit its own config."""
        model: nn.Module = self.load(StandIns())
        sizes = [tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers())]
        source = sum(path.stat().st_size for path in shards(self.source))
        memory = MEMORY_BASE + MEMORY_FACTOR * sum(sizes) + max(sizes)
        return Cost(self.title, source, sum(sizes), int(memory))


@dataclass(frozen=True)
class Plan:
    """What exporting some components into ``out``, one after another, takes and finds."""

    out: Path
    costs: tuple[Cost, ...]
    disk_free: int
    memory_available: int

    @classmethod
    def of(cls, components: Sequence[Component], out: Path) -> "Plan":
        existing = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
        costs = tuple(component.cost() for component in components)
        return cls(out, costs, shutil.disk_usage(existing).free, psutil.virtual_memory().available)

    @property
    def disk(self) -> int:
        """The bundles, and beside the last of them what the converter keeps of one while it works."""
        sizes = [cost.bundle for cost in self.costs]
        return HOST_BYTES + sum(sizes) + max(sizes, default=0)

    @property
    def memory(self) -> int:
        """Components are exported one at a time, so the largest decides."""
        return max((cost.memory for cost in self.costs), default=MEMORY_BASE)

    def lines(self) -> list[str]:
        """A table for a terminal."""
        return [
            f"{'part':<24}{'checkpoint':>12}{'bundle':>12}{'memory':>12}",
            *(
                f"{cost.title:<24}{_gigabytes(cost.source):>12}{_gigabytes(cost.bundle):>12}{_gigabytes(cost.memory):>12}"
                for cost in self.costs
            ),
            f"needed: {_gigabytes(self.disk)} of disk ({_gigabytes(self.disk_free)} free), "
            f"{_gigabytes(self.memory)} of memory ({_gigabytes(self.memory_available)} available)",
        ]

    def check(self) -> None:
        """Raise ``ContractError`` if the export would not fit."""
        if self.disk > self.disk_free:
            raise ContractError(
                f"the export needs {_gigabytes(self.disk)} of disk, {_gigabytes(self.disk_free)} are free for "
                f"{self.out}: make room, pass --out on another disk, or export fewer parts or sizes at once"
            )
        if self.memory > self.memory_available:
            largest = max(self.costs, key=lambda cost: cost.memory)
            raise ContractError(
                f"exporting the {largest.title} needs {_gigabytes(self.memory)} of memory, "
                f"{_gigabytes(self.memory_available)} are available: close other programs, or name only the parts "
                "that fit"
            )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
