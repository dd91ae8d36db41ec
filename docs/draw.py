"""Draws the registry's icon and banner with the model that ships: ``python docs/draw.py``."""

from pathlib import Path

import numpy as np
from PIL import Image

from coreai_rgba_image.host.demo.captions import COLOURS, SHAPES, Scene
from coreai_rgba_image.host.demo.sheet import contact_sheet
from coreai_rgba_image.host.model_set import EMBEDDED_FOLDER, ModelSet
from coreai_rgba_image.host.pipeline import generate
from coreai_rgba_image.host.sampling import Settings

FOLDER = Path(__file__).parent
MODEL = ModelSet(EMBEDDED_FOLDER)
COLUMNS, ROWS = 7, 3
"""Of square pictures: the registry wants a banner of 21:9."""


def draw(colour: str, shape: str, seed: int) -> np.ndarray:
    text = Scene("large", False, colour, shape).caption
    return generate(MODEL, text, 256, 256, Settings(20), seed=seed, keep_loaded="all")


def main() -> None:
    Image.fromarray(draw("red", "star", 42)).save(FOLDER / "icon.png", optimize=True)
    colours, shapes = list(COLOURS), list(SHAPES)
    places = [[row * COLUMNS + column for column in range(COLUMNS)] for row in range(ROWS)]
    pictures = [
        [draw(colours[place * 3 % 8], shapes[(place + place // 8) % 8], place) for place in row] for row in places
    ]
    contact_sheet(pictures, side=192).save(FOLDER / "banner.png", optimize=True)


if __name__ == "__main__":
    main()
