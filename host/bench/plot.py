"""Panels of points joined by lines, drawn with Pillow: a bench is no reason to depend on a plotting library."""

import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from .results import Panel

WIDTH, HEIGHT = 900, 420
LEFT, RIGHT, TOP, BOTTOM = 80, 40, 50, 60
COLOURS = ((36, 96, 230), (222, 32, 40), (36, 150, 70), (132, 52, 184))
TICKS = 5


def plot(panels: Sequence[Panel], path: Path) -> None:
    """One below the other; the format is that of the name's ending."""
    image = Image.new("RGB", (WIDTH, HEIGHT * max(1, len(panels))), "white")
    for index, panel in enumerate(panels):
        image.paste(_draw(panel), (0, index * HEIGHT))
    image.save(path)


class _Axis:
    """From values to pixels, with a margin beyond the first and the last value."""

    def __init__(self, values: Sequence[float], start: int, end: int):
        low, high = min(values), max(values)
        margin = 0.08 * (high - low) or 1.0
        self.low, self.high, self.start, self.end = low - margin, high + margin, start, end

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """Round numbers: multiples of 1, 2 or 5 times a power of ten."""
        span = self.high - self.low
        power = 10.0 ** math.floor(math.log10(span / TICKS))
        step = next(factor * power for factor in (1, 2, 5, 10) if span / (factor * power) <= 2 * TICKS)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [step * index for index in range(first, last + 1)]


def _draw(panel: Panel) -> Image.Image:
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    pen = ImageDraw.Draw(image)
    points = [(x, y) for series in panel.series.values() for x, y, _ in series] + [panel.guides or (1.0, 1.0)]
    across = _Axis([x for x, _ in points], LEFT, WIDTH - RIGHT)
    up = _Axis([y for _, y in points], HEIGHT - BOTTOM, TOP)
    pen.rectangle((LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM), outline="black")
    pen.text((LEFT, 8), panel.title, fill="black")
    pen.text((LEFT, 26), f"up: {panel.y_label}; across: {panel.x_label}", fill="black")
    for tick in across.ticks:
        pen.text((across(tick), HEIGHT - BOTTOM + 8), f"{tick:g}", fill="black", anchor="ma")
    for tick in up.ticks:
        pen.text((LEFT - 8, up(tick)), f"{tick:g}", fill="black", anchor="rm")
    if panel.guides:
        x, y = panel.guides
        pen.line((across(x), TOP, across(x), HEIGHT - BOTTOM), fill=(190, 190, 190))
        pen.line((LEFT, up(y), WIDTH - RIGHT, up(y)), fill=(190, 190, 190))
    for number, (name, series) in enumerate(panel.series.items()):
        colour = COLOURS[number % len(COLOURS)]
        pen.text((LEFT + number * 200, HEIGHT - 24), name, fill=colour)
        pen.line([(across(x), up(y)) for x, y, _ in series], fill=colour, width=2)
        for x, y, label in series:
            pen.ellipse((across(x) - 4, up(y) - 4, across(x) + 4, up(y) + 4), fill=colour)
            pen.text((across(x) + 6, up(y) - 14), label, fill=colour)
    return image
