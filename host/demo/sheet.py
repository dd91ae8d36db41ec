"""Pictures for people: the sample sheet and the loss plot of a training run."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from ..pixels import on_checkerboard
from .captions import COLOURS, SHAPES, Scene

Pixels = NDArray[np.uint8]


def sheet_scenes() -> list[list[Scene]]:
    """A row for each colour, a column for each shape: large stickers on nothing."""
    return [[Scene("large", False, colour, shape) for shape in SHAPES] for colour in COLOURS]


def contact_sheet(rows: list[list[Pixels]], side: int = 128) -> Image.Image:
    """RGBA pictures on a checkerboard, each made to fit ``side`` x ``side``."""
    sheet = Image.new("RGB", (side * max(map(len, rows)), side * len(rows)), "white")
    for y, row in enumerate(rows):
        for x, rgba in enumerate(row):
            shown = Image.fromarray(on_checkerboard(rgba[None])[0])
            shown.thumbnail((side, side), Image.Resampling.LANCZOS)
            sheet.paste(shown, (x * side, y * side))
    return sheet


def plot_losses(losses: dict[str, list[float]], path: Path, width: int = 900, height: int = 260) -> None:
    """One panel for each named series: running means over the steps, log scale, its ends written beside it."""
    margin = 60
    image = Image.new("RGB", (width, height * len(losses)), "white")
    pen = ImageDraw.Draw(image)
    for panel, (name, values) in enumerate(losses.items()):
        top = panel * height
        pen.text((margin, top + 8), f"{name}: loss over {len(values)} steps", fill="black")
        window = max(1, len(values) // 100)
        if len(values) < 2 * window + 2:
            continue
        means = np.log10(np.convolve(values, np.ones(window) / window, mode="valid"))
        low, high = float(means.min()), float(means.max()) + 1e-9
        x = np.linspace(margin, width - 20, len(means))
        y = top + height - 30 - (means - low) / (high - low) * (height - 70)
        pen.line(list(zip(x.tolist(), y.tolist(), strict=True)), fill=(36, 96, 230), width=2)
        pen.text((4, top + 34), f"{10**high:.3g}", fill="black")
        pen.text((4, top + height - 38), f"{10**low:.3g}", fill="black")
    image.save(path)
