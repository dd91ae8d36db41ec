"""Draws the pictures of the demo's grammar, and the ideal masks its measure compares with.

Shapes are signed distances on the pixel grid, so that antialiasing, the soft edge of glass and the
colour that bleeds under alpha 0 all come from one number. Arms and rings are not thinner than a
latent tile on a large shape, so that a tiny model can draw them. None of the drawings looks the same
with rows and columns exchanged, except circle, square and ring: a transposed picture is seen as wrong.
"""

import math
import random
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from .captions import COLOURS, Scene

Array = NDArray[np.float32]

RADII = {"large": (0.37, 0.41), "small": (0.22, 0.24)}
"""Radius as a fraction of the canvas's shorter side. Shapes fit a circle of that radius, roughly."""

SIZE_LIMIT = 0.3
"""Radius between the two size classes."""

GLASS_ALPHA = 0.5
GLASS_SOFTNESS = 0.03
"""Width of a glass edge as a fraction of the shorter side: about half a latent tile of 16 pixels at 256."""

BLEED = (0.02, 0.05)
"""Where the colour under alpha 0 starts and ends turning white, as distances from the edge."""

CENTRE_JITTER = 0.02
CIRCLE_RADIUS = 0.92
RING_RADIUS, RING_HALF_WIDTH = 0.69, 0.27


@dataclass(frozen=True)
class Placement:
    """Centre and radius as fractions: centre of each side, radius of the shorter one."""

    x: float = 0.5
    y: float = 0.5
    radius: float = 0.38


def random_placement(scene: Scene, rng: random.Random) -> Placement:
    return Placement(
        0.5 + rng.uniform(-CENTRE_JITTER, CENTRE_JITTER),
        0.5 + rng.uniform(-CENTRE_JITTER, CENTRE_JITTER),
        rng.uniform(*RADII[scene.size]),
    )


@cache
def outline(shape: str) -> Array:
    """Corners of a polygonal shape of radius 1, ``[corners, 2]`` as x, y with y pointing down."""
    if shape == "square":
        points = [(-0.82, -0.82), (0.82, -0.82), (0.82, 0.82), (-0.82, 0.82)]
    elif shape == "triangle":
        points = [(0.0, -0.98), (0.98, 0.76), (-0.98, 0.76)]
    elif shape == "diamond":
        points = [(0.0, -1.08), (0.62, 0.0), (0.0, 1.08), (-0.62, 0.0)]
    elif shape == "star":
        turns = [(math.pi / 5 * corner, 1.08 if corner % 2 == 0 else 0.52) for corner in range(10)]
        points = [(radius * math.sin(turn), -radius * math.cos(turn)) for turn, radius in turns]
    elif shape == "cross":  # a Latin cross: the bar sits above the middle
        w, top, bottom, side, bar = 0.31, -1.02, 1.02, 0.8, -0.32
        right = [(w, top), (w, bar - w), (side, bar - w), (side, bar + w), (w, bar + w), (w, bottom)]
        points = right + [(-x, y) for x, y in reversed(right)]
    elif shape == "heart":
        steps = [2 * math.pi * step / 48 for step in range(48)]
        curve = [13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t) for t in steps]
        points = [(0.06 * 16 * math.sin(t) ** 3, -0.06 * y - 0.1) for t, y in zip(steps, curve, strict=True)]
    else:
        raise ValueError(f"no outline for {shape!r}")
    return np.array(points, dtype=np.float32)


def polygon_distance(corners: Array, x: Array, y: Array) -> Array:
    """Signed distance to a polygon, negative inside (even-odd crossings; distance to the nearest edge)."""
    squared = np.full(x.shape, np.inf, dtype=np.float32)
    inside = np.zeros(x.shape, dtype=bool)
    for (ax, ay), (bx, by) in zip(corners, np.roll(corners, -1, axis=0), strict=True):
        ex, ey = bx - ax, by - ay
        along = np.clip(((x - ax) * ex + (y - ay) * ey) / (ex * ex + ey * ey), 0.0, 1.0)
        squared = np.minimum(squared, (x - ax - along * ex) ** 2 + (y - ay - along * ey) ** 2)
        if ey != 0:
            inside ^= ((ay > y) != (by > y)) & (x < ax + ex * (y - ay) / ey)
    return np.where(inside, -1.0, 1.0).astype(np.float32) * np.sqrt(squared)


def signed_distance(shape: str, placement: Placement, height: int, width: int) -> Array:
    """Distance of each pixel centre to the shape's edge, in units of the shorter side, ``[height, width]``."""
    shorter = min(height, width)
    columns = (np.arange(width, dtype=np.float32) + 0.5 - placement.x * width) / (shorter * placement.radius)
    rows = (np.arange(height, dtype=np.float32) + 0.5 - placement.y * height) / (shorter * placement.radius)
    x, y = np.broadcast_arrays(columns[None, :], rows[:, None])
    if shape == "circle":
        distance = np.hypot(x, y) - CIRCLE_RADIUS
    elif shape == "ring":
        distance = np.abs(np.hypot(x, y) - RING_RADIUS) - RING_HALF_WIDTH
    else:
        distance = polygon_distance(outline(shape), x, y)
    return (distance * placement.radius).astype(np.float32)


def ideal_mask(shape: str, placement: Placement, height: int, width: int) -> NDArray[np.bool_]:
    return signed_distance(shape, placement, height, width) < 0


@cache
def unit_area(shape: str) -> float:
    """Area of the shape at radius 1."""
    mask = ideal_mask(shape, Placement(radius=0.4), 512, 512)
    return float(mask.mean()) / 0.4**2


@cache
def unit_centroid(shape: str) -> tuple[float, float]:
    """Centroid of the shape at radius 1, relative to its placement."""
    rows, columns = np.nonzero(ideal_mask(shape, Placement(radius=0.4), 512, 512))
    return float((columns.mean() + 0.5) / 512 - 0.5) / 0.4, float((rows.mean() + 0.5) / 512 - 0.5) / 0.4


def smooth_step(x: Array, low: float, high: float) -> Array:
    t = np.clip((x - low) / (high - low), 0.0, 1.0)
    return t * t * (3 - 2 * t)


def shape_colour(scene: Scene) -> Array:
    """RGB of the shape in 0..255 as it should be seen: glass in front of a colour shows half of that colour."""
    colour = np.array(COLOURS[scene.colour], dtype=np.float32)
    if scene.glass and scene.background is not None:
        return GLASS_ALPHA * colour + (1 - GLASS_ALPHA) * np.array(COLOURS[scene.background], dtype=np.float32)
    return colour


def draw(scene: Scene, placement: Placement, height: int, width: int) -> NDArray[np.uint8]:
    """The picture, straight RGBA ``[height, width, 4]``.

    Under alpha 0 the shape's colour bleeds outwards a little and turns white, so that resampling
    leaves no dark seam and a viewer that ignores alpha shows the shape on white.
    """
    distance = signed_distance(scene.shape, placement, height, width)
    if scene.glass:
        cover = GLASS_ALPHA * (1 - smooth_step(distance, -GLASS_SOFTNESS / 2, GLASS_SOFTNESS / 2))
    else:
        cover = np.clip(0.5 - distance * min(height, width), 0.0, 1.0)
    cover = cover[..., None]
    colour = np.array(COLOURS[scene.colour], dtype=np.float32)
    if scene.background is None:
        rgb = colour + (255.0 - colour) * smooth_step(distance, *BLEED)[..., None]
        alpha = cover * 255.0
    else:
        rgb = cover * colour + (1 - cover) * np.array(COLOURS[scene.background], dtype=np.float32)
        alpha = np.full_like(cover, 255.0)
    return np.rint(np.concatenate((rgb, alpha), axis=-1)).astype(np.uint8)


def on_checkerboard(rgba: NDArray[np.uint8], tile: int = 16) -> NDArray[np.uint8]:
    """The picture in front of a grey checkerboard, RGB, to look at."""
    rows, columns = np.indices(rgba.shape[:2]) // tile
    board = np.where((rows + columns) % 2 == 0, 255.0, 205.0)[..., None]
    alpha = rgba[..., 3:].astype(np.float32) / 255.0
    return np.rint(rgba[..., :3] * alpha + board * (1 - alpha)).astype(np.uint8)
