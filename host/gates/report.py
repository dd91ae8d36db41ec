"""The findings as one HTML page that stands alone, so that whoever ran the gates can send one file.

It fetches nothing and runs no script: pictures are data URIs and curves are SVG. Colour only repeats
what words say. All text of the findings is escaped: prompts and error messages hold what they like.
"""

import base64
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from io import BytesIO
from itertools import groupby

import numpy as np
from PIL import Image

from ..bench.results import Bar, Spread
from ..pixels import composite
from .rows import FAIL, NOT_RUN, PASS, Control, Figure, Findings, Measured, Probe, Row, at_least

PAGE_LIMIT, SIDES = 5_000_000, (512, 256, 128)
"""Bytes that the page stays below, by showing pictures smaller: the longer side at most the first that will do."""

LEAST_AMPLIFICATION = 16  # of differences: a large one may saturate, so that small ones show beside it
LOG_FROM = 100  # values that span this ratio are drawn on a logarithmic axis
DRAWN_BELOW = 1e150  # a curve has gaps at NaN, infinity and what is so large that the span of the axis may overflow
LEAST_RUNS = 3  # for a spread to say anything
CHART_WIDTH, CHART_HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460, 240, 84, 14, 14, 42

STATES = {PASS: ("passed", "✓", "passed"), FAIL: ("failed", "✗", "FAILED"), NOT_RUN: ("not-run", "○", "not run")}
"""CSS class, sign and words of each verdict."""


def report_page(findings: Findings) -> str:
    """The page, to be written as UTF-8: verdict, table of gates, pictures, curves and probes.

    Raises ``ValueError`` where a row's pictures "reference" and "ours" have different sizes.
    """
    pages = (_page(findings, side) for side in SIDES[:-1])
    return next((page for page in pages if len(page.encode()) < PAGE_LIMIT), "") or _page(findings, SIDES[-1])


def _page(findings: Findings, side: int) -> str:
    about = "".join(f"<div><dt>{escape(what)}</dt><dd>{escape(it)}</dd></div>" for what, it in findings.about.items())
    details = "".join(_details(index, row, side) for index, row in enumerate(findings.rows))
    probes = "".join(map(_probe, range(len(findings.probes)), findings.probes))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>Fidelity gates {STATES[PASS if findings.passed else FAIL][2]}</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>Fidelity gates of Core AI RGBA Image</h1>
{_head(findings)}
<dl>{about}</dl>
</header>
<main>
<h2 id="gates">Gates</h2>
<p>A gate passes if every figure clears its bar and each defect planted on purpose (its negative controls) makes
a figure miss. A gate that was not run has not passed.</p>
{_table("gates", COLUMNS, map(_row, range(len(findings.rows)), findings.rows))}
{details and f"<h2>Pictures and curves</h2>{details}"}
{probes and f"<h2>For proportion</h2>{probes}"}
</main>
</body>
</html>
"""


def _head(findings: Findings) -> str:
    """The verdict in words, counts, and a link to each gate that failed."""
    css, _, words = STATES[PASS if findings.passed else FAIL]
    verdicts = [row.verdict for row in findings.rows]
    caught = [control.caught for row in findings.rows for control in row.controls]
    counts = [f"{verdicts.count(verdict)} {state[2]}" for verdict, state in STATES.items()]
    counts.append(f"{sum(caught)} of {len(caught)} planted defects caught")
    links = {f'<a href="#gate-{index}">{escape(row.gate)}</a>': row.verdict for index, row in enumerate(findings.rows)}
    failed = "; ".join(link for link, verdict in links.items() if verdict == FAIL)
    return f"""<p class="verdict {css}"><strong>{words}</strong> {", ".join(counts)}</p>
{failed and f"<p>Failed: {failed}</p>"}"""


# The table

COLUMNS = ("Gate", "Verdict", "Measured", "Published by the port’s author", "Negative controls", "Seconds")


def _table(heading: str, columns: Sequence[str], rows: Iterable[str]) -> str:
    """Below the ``heading`` of that id. It scrolls by itself where it is too wide, by keyboard too."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    return f"""
<div class="scroll" role="region" aria-labelledby="{heading}" tabindex="0"><table aria-labelledby="{heading}">
<thead><tr>{head}</tr></thead>
<tbody>{"".join(rows)}</tbody>
</table></div>"""


def _row(index: int, row: Row) -> str:
    css, sign, words = STATES[row.verdict]
    name, measured = escape(row.gate), row.measured
    if measured and (measured.curves or measured.pictures):
        name = f'<a href="#details-{index}">{name}</a>'
    controls = "".join(map(_control, row.controls))
    return f"""
<tr id="gate-{index}" class="{css}"><th scope="row">{name}</th>
<td class="state"><span aria-hidden="true">{sign}</span> {words}</td>
<td>{_figures(measured) if measured else f"Not run: {escape(row.reason)}"}</td>
<td>{escape(row.published) or "nothing"}</td>
<td>{f"<ul>{controls}</ul>" if controls else "none" if measured else "–"}</td>
<td class="number">{f"{row.seconds:.1f}" if measured else "–"}</td></tr>"""


def _figures(measured: Measured) -> str:
    items = "".join(
        f"<li>{escape(figure.what)} <b>{escape(figure.text)}</b>, bar {_bar_text(figure.bar)}"
        f"{'' if figure.ok else ' <strong>MISSED</strong>'}</li>"
        for figure in measured.figures
    )
    return f"<ul>{items}</ul>{escape(measured.note)}"


def _control(control: Control) -> str:
    """With every figure that the defect made miss its bar, or the error that it ended in."""
    missed = [figure for figure in control.figures if not figure.ok]
    reasons = [f"{escape(figure.what)} {escape(figure.text)} misses {_bar_text(figure.bar)}" for figure in missed]
    reasons += [f"stopped with an error: {escape(control.error)}"] * bool(control.error)
    outcome = f"caught: {'; '.join(reasons)}" if control.caught else "<strong>NOT CAUGHT</strong>"
    return f"<li><b>{escape(control.defect)}</b> {outcome}</li>"


def _bar_text(bar: Bar) -> str:
    return str(bar).replace(">= ", "≥\N{NO-BREAK SPACE}").replace("<= ", "≤\N{NO-BREAK SPACE}")


# Pictures


def _details(index: int, row: Row, side: int) -> str:
    measured = row.measured
    if measured is None or not (measured.curves or measured.pictures):
        return ""
    pictures = "".join(_pictures(measured.pictures, side))
    curves = "".join(_curve(name, values, measured.figures) for name, values in measured.curves.items())
    return f"""
<section aria-labelledby="details-{index}">
<h3 id="details-{index}">{escape(row.gate)}: {STATES[row.verdict][2]}</h3>
<div class="pictures">{pictures}</div><div class="curves">{curves}</div>
</section>"""


def _pictures(pictures: Mapping[str, np.ndarray], side: int) -> Iterator[str]:
    """Each picture; of "reference" and "ours" also where they differ, and the alpha of both."""
    for name, picture in pictures.items():
        yield _picture(name, picture, side)
    if {"reference", "ours"} <= pictures.keys():
        reference, ours = pictures["reference"], pictures["ours"]
        difference = visible_difference(reference, ours)
        factor = amplification(difference)
        caption = f"difference × {factor}; the largest is {difference.max()} of 255, on white or on black"
        amplified = np.minimum(difference.astype(np.int32) * factor, 255).astype(np.uint8)
        yield _picture(caption if difference.any() else "no difference", amplified, side, by_largest=True)
        for name, picture in (("reference", reference), ("ours", ours)):
            if picture.shape[2] == 4:
                yield _picture(f"alpha, {name}", picture[..., 3], side)


def visible_difference(reference: np.ndarray, ours: np.ndarray) -> np.ndarray:
    """How far two pictures, uint8 ``[H, W, 4]`` or ``[H, W, 3]``, are apart: uint8 ``[H, W, 3]``.

    On white or on black, whichever is more: on any other background it lies between these two, and
    colour that an alpha of 0 hides counts for nothing. Raises ``ValueError`` for different sizes.
    """
    if reference.shape[:2] != ours.shape[:2]:
        raise ValueError(f"the reference has shape {list(reference.shape)}, ours {list(ours.shape)}")
    apart = []
    for colour in ((255, 255, 255), (0, 0, 0)):
        first, second = (composite(_with_alpha(picture)[None], colour)[0] for picture in (reference, ours))
        apart.append(np.maximum(first, second) - np.minimum(first, second))
    return np.maximum(*apart)


def amplification(difference: np.ndarray) -> int:
    """The factor that makes the largest difference white, or ``LEAST_AMPLIFICATION`` where that is more."""
    return max(LEAST_AMPLIFICATION, 255 // max(1, int(difference.max())))


def _with_alpha(picture: np.ndarray) -> np.ndarray:
    return picture if picture.shape[2] == 4 else np.dstack([picture, np.full_like(picture[..., 0], 255)])


def _picture(caption: str, picture: np.ndarray, side: int, by_largest: bool = False) -> str:
    """A figure; ``by_largest`` reduces blocks to their largest value, as a mean would hide a single wrong pixel."""
    factor = math.ceil(max(picture.shape[:2]) / side)
    if by_largest:
        for axis in (0, 1):
            picture = np.maximum.reduceat(picture, np.arange(0, picture.shape[axis], factor), axis=axis)
    image = Image.fromarray(np.ascontiguousarray(picture)).reduce(1 if by_largest else factor)
    css = "board " * (image.mode == "RGBA") + "small" * (max(image.size) < 256)
    text = escape(caption + (f" (shown at 1/{factor} of its size)" if factor > 1 else ""))
    return f"""
<figure><img src="{_data_uri(image)}" alt="{text}" width="{image.width}" height="{image.height}" class="{css}">
<figcaption>{text}</figcaption></figure>"""


def _data_uri(image: Image.Image) -> str:
    """The picture without loss, as PNG or WebP, whichever is smaller."""
    png, webp = BytesIO(), BytesIO()
    image.save(png, "PNG", optimize=True)
    image.save(webp, "WEBP", lossless=True, exact=True)  # exact: colour stays where alpha is 0
    kind, stored = min(("png", png.getvalue()), ("webp", webp.getvalue()), key=lambda each: len(each[1]))
    return f"data:image/{kind};base64,{base64.b64encode(stored).decode()}"


# Curves


def _curve(name: str, values: Sequence[float], figures: Sequence[Figure]) -> str:
    """A chart, what it shows in words, and every value behind a fold.

    A name is "quantity", "quantity, which one" or either "by" what the values are counted in, else
    steps. The bar is that of the figures which name the quantity, if they agree on one.
    """
    words, _, counted = name.partition(" by ")
    quantity, counted = words.partition(", ")[0], counted or "step"
    bars = {figure.bar for figure in figures if f" {quantity} " in f" {figure.what} "}
    limits = [bar.limit for bar in bars] if len(bars) == 1 else []
    sizes = [value for value in [*values, *limits] if 0 < value < DRAWN_BELOW]
    log = bool(sizes) and max(sizes) >= LOG_FROM * min(sizes) and not any(value < 0 for value in values)
    least = 0.0 if log else -math.inf
    drawn = {index: value for index, value in enumerate(values) if abs(value) < DRAWN_BELOW and value > least}
    caption = f"{words} by {counted}" + ", logarithmic" * log
    if drawn:
        lowest, highest = min(drawn, key=drawn.__getitem__), max(drawn, key=drawn.__getitem__)
        caption += f"; {_digits(drawn[lowest])} (no. {lowest}) to {_digits(drawn[highest])} (no. {highest})"
    if limits:
        caption += f"; bar {_bar_text(*bars)}"
    if len(drawn) < len(values):
        caption += f"; {len(values) - len(drawn)} of {len(values)} values cannot be drawn"
    caption, axis = escape(caption), escape(f"{counted} no.")
    chart = _chart(drawn, len(values) - 1, [limit for limit in limits if limit > least], log, axis) if drawn else ""
    items = "".join(f"<li>{value:.10g}</li>" for value in values)
    return f"""
<figure><svg viewBox="0 0 {CHART_WIDTH} {CHART_HEIGHT}" role="img" aria-label="{caption}">{chart}</svg>
<figcaption>{caption}<details><summary>Values from no. 0 on</summary><ol start="0">{items}</ol></details></figcaption>
</figure>"""


def _chart(drawn: Mapping[int, float], last: int, limits: Sequence[float], log: bool, by: str) -> str:
    """Values by number, 0 to ``last``, with a gap where there is none; ``limits`` are dashed lines across."""
    place = math.log10 if log else float
    bottom, right = CHART_HEIGHT - BOTTOM, CHART_WIDTH - RIGHT
    across = _Axis([0, last], LEFT, right)
    up = _Axis([place(value) for value in [*drawn.values(), *limits]], bottom, TOP)
    parts = [f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>', _label(right, bottom + 34, by, "end")]
    for tick in up.ticks(least=1.0 if log else 0.0):
        parts.append(f'<path d="M{LEFT} {up(tick):.1f}H{right}"/>')
        parts.append(_label(LEFT - 6, up(tick) + 4, f"{10.0**tick:g}" if log else f"{tick:.10g}", "end"))
    parts += [_label(across(tick), bottom + 16, f"{tick:g}") for tick in across.ticks(least=1.0) if 0 <= tick <= last]
    for limit in limits:
        parts.append(f'<path class="bar" d="M{LEFT} {up(place(limit)):.1f}H{right}"/>')
        parts.append(_label(right, up(place(limit)) - 4, "bar", "end"))
    # A line for each run of numbers that follow each other: each is as far from its place in the list as the last.
    for _, run in groupby(enumerate(drawn), key=lambda each: each[1] - each[0]):
        points = " ".join(f"{across(step):.1f},{up(place(drawn[step])):.1f}" for _, step in run)
        parts.append(f'<polyline points="{points}"/>')
    parts += [f'<circle cx="{across(step):.1f}" cy="{up(place(value)):.1f}" r="2"/>' for step, value in drawn.items()]
    return "".join(parts)


def _label(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


class _Axis:
    """From values to pixels, with a margin beyond the first and the last value."""

    def __init__(self, values: Sequence[float], start: float, end: float):
        low, high = min(values), max(values)
        margin = 0.08 * (high - low) or 0.05 * abs(low) or 1.0
        self.low, self.high, self.start, self.end = low - margin, high + margin, start, end

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, least: float) -> list[float]:
        """About five round numbers, ``least`` or more apart: multiples of 1, 2 or 5 times a power of ten."""
        wanted = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(wanted))
        step = max(least, next(factor * power for factor in (1, 2, 5, 10) if factor * power >= wanted))
        return [step * index for index in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


# Probes


def _probe(index: int, probe: Probe) -> str:
    rows = [_probe_row(name, map(_digits, values)) for name, values in probe.runs.items()]
    if len(probe.runs) >= LEAST_RUNS:
        rows.append(_probe_row("median (least to most)", map(_spread, zip(*probe.runs.values(), strict=True))))
    return f"""
<h3 id="probe-{index}">{escape(probe.title)}</h3><p>{escape(probe.explanation)}</p>
{_table(f"probe-{index}", ["Run", *probe.columns], rows)}"""


def _probe_row(name: str, cells: Iterable[str]) -> str:
    numbers = "".join(f'<td class="number">{cell}</td>' for cell in cells)
    return f'<tr><th scope="row">{escape(name)}</th>{numbers}</tr>'


def _spread(values: Sequence[float]) -> str:
    """Of the finite values; how many are not is said."""
    finite = [value for value in values if math.isfinite(value)]
    text = "none"
    if finite:
        spread = Spread.of(finite)
        text = f"{_digits(spread.median)} ({_digits(spread.low)} to {_digits(spread.high)})"
    return text + (f", {len(values) - len(finite)} not finite" if len(finite) < len(values) else "")


def _digits(value: float) -> str:
    """A number as figures have it."""
    return at_least("", value, 0).text


STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1b1f24; --quiet: #59636e; --line: #d0d7de; --soft: #f4f6f8;
  --link: #0b57c2; --good: #116329; --good-back: #dff5e4; --bad: #a40e26; --bad-back: #ffe5e7; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --text: #e6e9ed; --quiet: #a3adb8; --line: #3a424c;
  --soft: #1e2329; --link: #7fb2ff; --good: #7ee2a0; --good-back: #12351f; --bad: #ff9aa5; --bad-back: #47191f; } }
body { margin: 0 auto; max-width: 90rem; padding: 1rem clamp(0.75rem, 3vw, 2.5rem) 3rem; background: var(--page);
  color: var(--text); font: 0.95rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h2 { margin-top: 2.5rem; } h3 { margin: 1.8rem 0 0.5rem; } a { color: var(--link); }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
.verdict { padding: 0.7rem 1rem; border-left: 0.5rem solid; } .verdict strong { font-size: 1.6rem; margin-right: 1rem; }
.verdict, .state { color: var(--good); background: var(--good-back); }
.verdict.failed, .failed .state { color: var(--bad); background: var(--bad-back); } td strong { color: var(--bad); }
.not-run .state { background: none; } .not-run > * { color: var(--quiet); border-style: dashed; }
dl, .pictures, .curves { display: grid; gap: 0.7rem 1.2rem; margin-bottom: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, var(--column, 20rem)), 1fr)); }
.pictures { grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); } .curves { --column: 24rem; }
dt, figcaption { color: var(--quiet); font-size: 0.85rem; text-align: left; } dd, figure { margin: 0; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; overflow-wrap: break-word; }
th, td { border: 1px solid var(--line); padding: 0.5rem 0.7rem; text-align: left; vertical-align: top; }
thead th { background: var(--soft); } td { min-width: 8rem; } td ul { margin: 0; padding-left: 1.1rem; }
.state + td { min-width: 13rem; } .state + td b { white-space: nowrap; }
.state { font-weight: 600; } .state, .number { white-space: nowrap; min-width: 0; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
img { display: block; width: 100%; max-width: 512px; height: auto; } .small { image-rendering: pixelated; }
.board { background: repeating-conic-gradient(#999 0 25%, #ccc 0 50%) 0 0 / 32px 32px; }
svg { display: block; width: 100%; max-width: 40rem; } svg text { font-size: 12px; fill: var(--quiet);
  paint-order: stroke; stroke: var(--page); stroke-width: 4px; }
path, polyline { fill: none; stroke: var(--line); } polyline { stroke: var(--link); stroke-width: 1.5; }
circle { fill: var(--link); } .axis { stroke: var(--quiet); } .bar { stroke: var(--bad); stroke-dasharray: 6 4; }
ol { columns: 8rem; margin: 0.3rem 0; }
"""
