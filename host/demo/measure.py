"""Does a picture show what its caption asks for? The demo grammar makes that a computation.

Nothing here knows how the picture was made: it takes 8-bit RGBA and a caption. What is found in
the picture comes first (a mask, colours, sizes), independent of the caption, and is then compared.
"""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from .captions import COLOURS, SHAPES, Scene, parse_caption
from .pictures import SIZE_LIMIT, Placement, ideal_mask, shape_colour, unit_area, unit_centroid

COLOUR_TOLERANCE = 40
OVERLAP = 0.7
TRANSPARENT_LIMIT = 8
OPAQUE_LIMIT = 247
GLASS_RANGE = (64, 192)
FAINT = 20
"""Below this difference from the background, of 255, there is no shape to see."""

Mask = NDArray[np.bool_]
Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Verdict:
    """One answer per property, and the overlap with the ideal mask of the shape asked for."""

    colour: bool
    shape: bool
    corners: bool
    size: bool
    glass: bool
    overlap: float

    @property
    def right(self) -> bool:
        return all(getattr(self, name) for name in PROPERTIES)


PROPERTIES = tuple(field.name for field in fields(Verdict) if field.name != "overlap")


def judge(rgba: Pixels, caption: str | Scene) -> Verdict:
    """Compare ``rgba`` ``[H, W, 4]``, straight alpha, with a caption of the grammar.

    ``colour``: the shape's and, where one is asked for, the background's median colour within
    40/255 in every channel. ``shape``: the asked shape overlaps best of all, by 0.7 or more.
    ``corners``: mean alpha of the corners at most 8, or at least 247 on a colour. ``size``: the
    class. ``glass``: mean alpha inside 64 .. 192 for glass on nothing, above that for anything else.
    """
    scene = parse_caption(caption) if isinstance(caption, str) else caption
    if rgba.ndim != 3 or rgba.shape[2] != 4 or rgba.dtype != np.uint8:
        raise ValueError(f"the picture is {rgba.dtype} {list(rgba.shape)}: pass uint8 [H, W, 4]")
    corners = corner_alpha(rgba)
    transparent = scene.background is None
    corners_right = corners <= TRANSPARENT_LIMIT if transparent else corners >= OPAQUE_LIMIT
    mask = mask_of_alpha(rgba) if transparent else mask_of_colour(rgba)
    if not mask.any():
        return Verdict(False, False, corners_right, False, False, 0.0)
    colour_right = close(np.median(rgba[mask][:, :3], axis=0), shape_colour(scene))
    if scene.background is not None:
        colour_right &= close(border_colour(rgba), np.array(COLOURS[scene.background], dtype=np.float32))
    overlaps = {shape: aligned_overlap(mask, shape) for shape in SHAPES}
    best = max(overlaps, key=lambda shape: overlaps[shape])
    return Verdict(
        colour=bool(colour_right),
        shape=best == scene.shape and overlaps[scene.shape] >= OVERLAP,
        corners=bool(corners_right),
        size=size_class(mask, scene.shape) == scene.size,
        glass=glass_right(float(rgba[mask][:, 3].mean()), scene),
        overlap=overlaps[scene.shape],
    )


def close(found: NDArray[np.floating], wanted: NDArray[np.floating]) -> bool:
    return bool(np.abs(found - wanted).max() <= COLOUR_TOLERANCE)


def glass_right(alpha: float, scene: Scene) -> bool:
    if scene.glass and scene.background is None:
        return GLASS_RANGE[0] <= alpha <= GLASS_RANGE[1]
    return alpha > GLASS_RANGE[1]


def corner_alpha(rgba: Pixels) -> float:
    """Mean alpha of the four corners, each a sixteenth of the shorter side."""
    side = max(1, min(rgba.shape[:2]) // 16)
    alpha = rgba[..., 3].astype(np.float32)
    ends = (slice(None, side), slice(-side, None))
    return float(np.mean([alpha[rows, columns] for rows in ends for columns in ends]))


def mask_of_alpha(rgba: Pixels) -> Mask:
    """Where alpha is above half of what the picture's most opaque parts have."""
    alpha = rgba[..., 3].astype(np.float32)
    level = np.percentile(alpha, 98)
    return alpha > level / 2 if level >= FAINT else np.zeros(alpha.shape, dtype=bool)


def border_colour(rgba: Pixels) -> NDArray[np.floating]:
    """Median RGB of the outermost thirtieth of the picture."""
    width = max(1, min(rgba.shape[:2]) // 30)
    border = np.ones(rgba.shape[:2], dtype=bool)
    border[width:-width, width:-width] = False
    return np.median(rgba[border][:, :3], axis=0)


def mask_of_colour(rgba: Pixels) -> Mask:
    """Where a pixel is nearer to the shape's colour than to the border's, along the line between the two."""
    rgb, background = rgba[..., :3].astype(np.float32), border_colour(rgba)
    difference = np.abs(rgb - background).max(axis=-1)
    level = np.percentile(difference, 98)
    if level < FAINT:
        return np.zeros(difference.shape, dtype=bool)
    direction = np.median(rgb[difference >= 0.7 * level], axis=0) - background
    return (rgb - background) @ direction > 0.5 * (direction @ direction)


def fitted_placement(mask: Mask, shape: str) -> Placement:
    """The placement at which the ideal shape has the mask's centroid and area."""
    height, width = mask.shape
    shorter = min(height, width)
    radius = float(np.sqrt(mask.sum() / shorter**2 / unit_area(shape)))
    rows, columns = np.nonzero(mask)
    x, y = unit_centroid(shape)
    return Placement(
        float((columns.mean() + 0.5 - x * radius * shorter) / width),
        float((rows.mean() + 0.5 - y * radius * shorter) / height),
        radius,
    )


def aligned_overlap(mask: Mask, shape: str) -> float:
    """Intersection over union with the ideal shape at the mask's centroid and area; it is never turned."""
    ideal = ideal_mask(shape, fitted_placement(mask, shape), *mask.shape)
    return float((mask & ideal).sum() / (mask | ideal).sum())


def size_class(mask: Mask, shape: str) -> str:
    return "large" if fitted_placement(mask, shape).radius > SIZE_LIMIT else "small"


@dataclass(frozen=True)
class Scores:
    """Share of pictures, 0 .. 1, that have each property right, and all of them; NaN where none asked for it."""

    pictures: int
    colour: float
    shape: float
    transparent: float
    opaque: float
    size: float
    glass: float
    all_right: float


def score(verdicts: list[tuple[Scene, Verdict]]) -> Scores:
    def share(values: list[bool]) -> float:
        return float(np.mean(values)) if values else float("nan")

    return Scores(
        pictures=len(verdicts),
        colour=share([verdict.colour for _, verdict in verdicts]),
        shape=share([verdict.shape for _, verdict in verdicts]),
        transparent=share([verdict.corners for scene, verdict in verdicts if scene.background is None]),
        opaque=share([verdict.corners for scene, verdict in verdicts if scene.background is not None]),
        size=share([verdict.size for _, verdict in verdicts]),
        glass=share([verdict.glass for scene, verdict in verdicts if scene.glass and scene.background is None]),
        all_right=share([verdict.right for _, verdict in verdicts]),
    )


BARS = {"colour": 0.95, "shape": 0.90, "transparent": 0.98, "opaque": 0.98, "size": 0.95, "glass": 0.95}
"""Least share of pictures for each property over held-out captions and seeds."""
