"""Times taken in turns, and results with their spread and the bar each has to clear.

A machine's speed drifts while it is measured, and other programs slow it down. Paths that are
compared therefore run in turns, and only ratios within a turn are judged.
"""

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from statistics import median
from typing import Any, TypeVar

from tqdm import tqdm

Returned = TypeVar("Returned")


def timed(call: Callable[[], Returned], clock: Callable[[], float] = time.perf_counter) -> tuple[float, Returned]:
    """Seconds that ``call`` takes, and what it returns."""
    started = clock()
    returned = call()
    return clock() - started, returned


def progress(items: Sequence[Returned], label: str) -> Iterable[Returned]:
    """``items``, with a bar on standard error where somebody is watching."""
    return tqdm(items, desc=label, leave=False, disable=None, file=sys.stderr)


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of one thing measured again and again."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        found = list(values)
        return cls(median(found), min(found), max(found))

    def __str__(self) -> str:
        if self.low == self.high:
            return number(self.median)
        return f"{number(self.median)} ({number(self.low)}-{number(self.high)})"


def number(value: float) -> str:
    """Three digits, or all before the point; a count as it is."""
    return f"{value:.0f}" if abs(value) >= 100 or isinstance(value, int) else f"{value:#.3g}".rstrip(".")


@dataclass(frozen=True)
class Ratios:
    """Seconds of two paths in each turn. The ratio is above 1 where the second is the faster one."""

    first: Sequence[float]
    second: Sequence[float]

    @property
    def spread(self) -> Spread:
        return Spread.of(first / second for first, second in zip(self.first, self.second, strict=True))


def in_turns(
    paths: Sequence[Callable[[], object]],
    repeats: int,
    label: str = "",
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Seconds ``[paths][repeats]``: all paths once, then all of them again. Warm them up before."""
    seconds: list[list[float]] = [[] for _ in paths]
    for index in progress([*range(len(paths))] * repeats, label):
        seconds[index].append(timed(paths[index], clock)[0])
    return seconds


def alternate(
    first: Callable[[], object],
    second: Callable[[], object],
    repeats: int,
    label: str = "",
    clock: Callable[[], float] = time.perf_counter,
) -> Ratios:
    """Two paths: first, second, first, second, ..."""
    return Ratios(*in_turns((first, second), repeats, label, clock))


@dataclass(frozen=True)
class Bar:
    """What the median of a result, or ``every`` value, has to reach: ``at_least`` the limit, or else at most."""

    limit: float
    at_least: bool
    every: bool = False

    def cleared(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit

    def cleared_by(self, spread: Spread) -> bool:
        worst = spread.low if self.at_least else spread.high
        return self.cleared(worst if self.every else spread.median)

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.limit:g}{' each' if self.every else ''}"


@dataclass(frozen=True)
class Result:
    """One thing that was measured. Without a ``value`` it could not be, and ``note`` says why."""

    setting: str
    what: str
    value: Spread | None
    unit: str = ""
    bar: Bar | None = None
    note: str = ""

    @property
    def ok(self) -> bool | None:
        """None where nothing is asked for; what could not be measured clears no bar."""
        if self.bar is None:
            return None
        return self.value is not None and self.bar.cleared_by(self.value)

    def __str__(self) -> str:
        text = f"{self.what} {'not measured' if self.value is None else self.value}{self.unit and ' ' + self.unit}"
        if self.note:
            text += f" [{self.note}]"
        return text if self.bar is None else f"{text}, bar {self.bar}: {'ok' if self.ok else 'MISSED'}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Result":
        value, bar = content["value"], content["bar"]
        own = {name: content[name] for name in ("setting", "what", "unit", "note")}
        return cls(**own, value=value and Spread(**value), bar=bar and Bar(**bar))


@dataclass(frozen=True)
class Panel:
    """A plot of named series of points ``(x, y, label)``; ``guides`` are the bars, as (x, y)."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[float, float, str]]]
    guides: tuple[float, float] | None = None


@dataclass(frozen=True)
class Section:
    """Results that belong together."""

    title: str
    results: list[Result]
    panels: Sequence[Panel] = ()

    def __str__(self) -> str:
        """The title, and a line for each setting."""
        settings = groupby(self.results, key=lambda result: result.setting)
        lines = [f"{setting}: {'; '.join(map(str, results))}" for setting, results in settings]
        return "\n  ".join([self.title, *lines])

    def to_json(self) -> dict[str, Any]:
        return {"title": self.title, "results": [result.to_json() for result in self.results]}
