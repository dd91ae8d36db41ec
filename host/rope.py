"""RoPE tables of the DiT: three axes (frame, height, width) over ``[text | image]``.

Computed with ``torch.polar`` because numpy's cosine differs in the last bit, and the tables are to
equal the reference's (diffusers' ``QwenImage21Rope``) exactly.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from .contract import DIT, ContractError

AXIS_WIDTHS = (16, 56, 56)
THETA = 10000
FIRST_POSITION = -1024
POSITIONS = 9216

AxisTables = tuple[tuple[np.ndarray, np.ndarray], ...]
"""Cosines and sines ``[9216, P]`` per axis, P = 8, 28, 28; row = position + 1024."""

Positions = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Frame, row and column of each token, ``[tokens]`` integers each."""


@dataclass(frozen=True)
class RopeTables:
    """Cosines and sines of the text and the image tokens, fp32, as the DiT takes them."""

    txt_cos: np.ndarray
    txt_sin: np.ndarray
    img_cos: np.ndarray
    img_sin: np.ndarray


@lru_cache(maxsize=1)
def axis_tables() -> AxisTables:
    """The tables for positions -1024 .. 8191, computed."""
    positions = torch.arange(FIRST_POSITION, FIRST_POSITION + POSITIONS)
    tables = []
    for width in AXIS_WIDTHS:
        exponents = torch.arange(0, width, 2).to(torch.float32).div(width)
        angles = torch.outer(positions, 1.0 / torch.pow(THETA, exponents))
        rotation = torch.polar(torch.ones_like(angles), angles)
        tables.append((rotation.real.contiguous().numpy(), rotation.imag.contiguous().numpy()))
    return tuple(tables)


def read_axis_tables(folder: str | Path) -> AxisTables | None:
    """The tables a model set carries as ``rope_axis{0,1,2}_{cos,sin}.f32``, or None if it has none.

    Raises ``ContractError`` when one is missing, has another size, or differs from the computed
    values: a model set whose tables are not this model's would draw nonsense.
    """
    folder = Path(folder)
    paths = [[folder / f"rope_axis{axis}_{part}.f32" for part in ("cos", "sin")] for axis in range(3)]
    if not any(path.exists() for pair in paths for path in pair):
        return None
    return tuple(
        (_read_table(cos_path, cos), _read_table(sin_path, sin))
        for (cos_path, sin_path), (cos, sin) in zip(paths, axis_tables(), strict=True)
    )


def _read_table(path: Path, computed: np.ndarray) -> np.ndarray:
    advice = "restore it from where the model set came from, or export host again"
    if not path.is_file():
        raise ContractError(f"{path} is missing beside the other RoPE tables: {advice}")
    if path.stat().st_size != computed.nbytes:
        raise ContractError(f"{path} has {path.stat().st_size} bytes, a table has {computed.nbytes}: {advice}")
    table = np.fromfile(path, dtype="<f4").reshape(computed.shape).astype(np.float32, copy=False)
    # One unit in the last place may differ between the maths libraries of two machines.
    if not np.allclose(table, computed, rtol=0, atol=1e-6):
        raise ContractError(f"{path} does not hold the RoPE table of this model: {advice}")
    return table


def write_axis_tables(folder: str | Path) -> None:
    """Write the computed tables in the published layout."""
    for axis, pair in enumerate(axis_tables()):
        for part, table in zip(("cos", "sin"), pair, strict=True):
            (Path(folder) / f"rope_axis{axis}_{part}.f32").write_bytes(table.astype("<f4").tobytes())


def rope_tables(text_len: int, height: int, width: int, tables: AxisTables | None = None) -> RopeTables:
    """Rows for ``text_len`` text tokens and a ``height`` x ``width`` grid of image tokens.

    Text token i is at (i, i, i). Image tokens follow in raster order at
    ``(text_len, y - (height - height//2), x - (width - width//2))``: a grid centred on zero.
    Returns ``[1, L, 64]`` and ``[1, N, 64]`` arrays; ``tables`` replaces the computed ones.
    """
    low, high = DIT.limits["L"]
    if not low <= text_len <= high:
        raise ContractError(f"{text_len} text tokens: the DiT takes {low}..{high}")
    if height < 1 or width < 1 or height * width > DIT.limits["N"][1]:
        raise ContractError(
            f"a {height} x {width} grid has {height * width} image tokens: the DiT takes up to {DIT.limits['N'][1]}"
        )
    tables = axis_tables() if tables is None else tables
    txt_cos, txt_sin = _rows(tables, text_positions(text_len))
    img_cos, img_sin = _rows(tables, image_positions(text_len, height, width))
    return RopeTables(txt_cos, txt_sin, img_cos, img_sin)


def text_positions(length: int) -> Positions:
    """(i, i, i) for each text token i."""
    text = np.arange(length)
    return text, text, text


def image_positions(text_len: int, height: int, width: int) -> Positions:
    """Those of image tokens in raster order: after the text, on a grid centred on zero."""
    rows = np.arange(height).repeat(width) - (height - height // 2)
    columns = np.tile(np.arange(width), height) - (width - width // 2)
    return np.full(height * width, text_len), rows, columns


def _rows(tables: AxisTables, positions: Positions) -> tuple[np.ndarray, np.ndarray]:
    cos, sin = (
        np.concatenate([axis[part][p - FIRST_POSITION] for axis, p in zip(tables, positions, strict=True)], axis=-1)
        for part in (0, 1)
    )
    return cos[None], sin[None]
