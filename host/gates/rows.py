"""What a gate says: its figures with their bars, and its negative controls, which must miss them.

A gate that cannot fail proves nothing. Each is therefore measured again with defects planted, and
passes only if its figures clear their bars and every defect makes at least one of them miss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..bench.results import Bar, number


@dataclass(frozen=True)
class Figure:
    """One number and its bar. A figure that is not a number clears none."""

    what: str
    value: float
    bar: Bar
    unit: str = ""

    @property
    def ok(self) -> bool:
        return self.bar.cleared(self.value)

    @property
    def text(self) -> str:
        return precise(self.value) + (self.unit and f" {self.unit}")

    def __str__(self) -> str:
        return f"{self.what} {self.text} (bar {self.bar}{'' if self.ok else ', MISSED'})"

    def to_json(self) -> dict[str, Any]:
        # JSON has neither NaN nor infinity; a reader gets them as text.
        value = self.value if np.isfinite(self.value) else str(self.value)
        return {**asdict(self), "value": value, "ok": self.ok}


def precise(value: float) -> str:
    """A share near 1 with every digit that matters, a count as it is, anything else with three digits."""
    if float(value).is_integer():
        return f"{value:.0f}"
    return f"{value:.9f}" if 0.99 <= value < 1 else number(value)


def at_least(what: str, value: float, limit: float, unit: str = "") -> Figure:
    return Figure(what, float(value), Bar(limit, at_least=True), unit)


def at_most(what: str, value: float, limit: float, unit: str = "") -> Figure:
    return Figure(what, float(value), Bar(limit, at_least=False), unit)


@dataclass(frozen=True)
class Measured:
    """What one measurement of a gate gave.

    ``curves`` are values per step by name, ``pictures`` uint8 ``[H, W, 4]`` or ``[H, W, 3]`` by name.
    """

    figures: Sequence[Figure]
    note: str = ""
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)
    pictures: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Control:
    """A gate measured with a defect planted. ``error`` is the message of a defect that stopped the measurement."""

    defect: str
    figures: Sequence[Figure]
    error: str = ""

    @property
    def caught(self) -> bool:
        return bool(self.error) or not all(figure.ok for figure in self.figures)

    def __str__(self) -> str:
        if self.error:
            return f"{self.defect}: stopped with an error"
        missed = [figure for figure in self.figures if not figure.ok]
        return f"{self.defect}: " + (f"{missed[0].what} {missed[0].text}" if missed else "NOT CAUGHT")

    def to_json(self) -> dict[str, Any]:
        figures = [figure.to_json() for figure in self.figures]
        return {"defect": self.defect, "figures": figures, "error": self.error, "caught": self.caught}


PASS, FAIL, NOT_RUN = "pass", "FAIL", "not run"


@dataclass(frozen=True)
class Row:
    """One gate of the table. ``published`` is what the port's author measured on a Mac, as the port notes have it.

    ``reason`` says why a gate could not be run; it is then neither passed nor failed.
    """

    gate: str
    published: str
    measured: Measured | None
    controls: Sequence[Control] = ()
    reason: str = ""
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return NOT_RUN
        cleared = all(figure.ok for figure in self.measured.figures)
        return PASS if cleared and all(control.caught for control in self.controls) else FAIL

    def __str__(self) -> str:
        head = f"{self.verdict:7}  {self.gate} ({self.seconds:.1f} s)"
        if self.measured is None:
            return f"{head}\n           {self.reason}"
        lines = [*map(str, self.measured.figures)]
        if self.measured.note:
            lines.append(self.measured.note)
        lines += [f"control {control}" for control in self.controls]
        return "\n           ".join([head, *lines])

    def to_json(self) -> dict[str, Any]:
        measured = self.measured or Measured(())
        return {
            "gate": self.gate,
            "verdict": self.verdict,
            "figures": [figure.to_json() for figure in measured.figures],
            "controls": [control.to_json() for control in self.controls],
            "published": self.published,
            "note": measured.note,
            "reason": self.reason,
            "curves": {name: list(map(float, values)) for name, values in measured.curves.items()},
            "seconds": round(self.seconds, 2),
        }


@dataclass(frozen=True)
class Probe:
    """Figures that have no bar but put the others into proportion, a value for each run."""

    title: str
    explanation: str
    columns: Sequence[str]
    runs: Mapping[str, Sequence[float]]

    def __str__(self) -> str:
        lines = [f"{name}: {', '.join(map(precise, values))}" for name, values in self.runs.items()]
        return "\n           ".join([f"{self.title} ({'; '.join(self.columns)})", *lines])

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "runs": {name: list(map(float, values)) for name, values in self.runs.items()}}


@dataclass(frozen=True)
class Findings:
    """Everything that one run of the gates found. ``about`` names what was judged: versions, sizes, hashes."""

    about: Mapping[str, str]
    rows: Sequence[Row]
    probes: Sequence[Probe] = ()

    @property
    def passed(self) -> bool:
        """Whether no gate failed; what was not run has not passed, but is no failure either."""
        return any(row.verdict == PASS for row in self.rows) and not any(row.verdict == FAIL for row in self.rows)

    @property
    def verdict(self) -> str:
        """The last line of the table."""
        verdicts = [row.verdict for row in self.rows]
        counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in (PASS, FAIL, NOT_RUN))
        return f"{'passed' if self.passed else 'FAILED'}: {counts}"

    def to_json(self) -> dict[str, Any]:
        return {
            "about": dict(self.about),
            "verdict": self.verdict,
            "passed": self.passed,
            "gates": [row.to_json() for row in self.rows],
            "probes": [probe.to_json() for probe in self.probes],
        }
