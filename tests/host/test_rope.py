"""RoPE tables, bit for bit those of diffusers' ``QwenImage21Rope``."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21Rope
from hypothesis import given, settings
from hypothesis import strategies as st

from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.rope import RopeTables, axis_tables, read_axis_tables, rope_tables, write_axis_tables

REFERENCE = QwenImage21Rope(theta=10000, axes_dim=[16, 56, 56])
GRIDS = [
    (8, 8),
    (16, 16),
    (32, 32),
    (64, 64),
    (12, 8),
    (8, 12),
    (9, 11),
    (7, 13),
    (1, 64),
    (64, 1),
    (63, 65),
    (2, 2048),
]
LENGTHS = [8, 9, 18, 33, 255, 498, 512]


def reference_tables(text_len: int, height: int, width: int) -> RopeTables:
    image = torch.arange(text_len + height * width) >= text_len
    rotation = REFERENCE([(1, height, width)], image, torch.device("cpu"))[None]
    cos, sin = rotation.real.numpy(), rotation.imag.numpy()
    return RopeTables(cos[:, :text_len], sin[:, :text_len], cos[:, text_len:], sin[:, text_len:])


def assert_equal(ours: RopeTables, reference: RopeTables) -> None:
    for name, table in vars(reference).items():
        found = getattr(ours, name)
        assert found.dtype == np.float32
        assert np.array_equal(found, table), name


@pytest.mark.parametrize(("text_len", "grid"), list(itertools.product(LENGTHS, GRIDS)))
def test_tables_equal_the_references_bit_for_bit(text_len: int, grid: tuple[int, int]) -> None:
    assert_equal(rope_tables(text_len, *grid), reference_tables(text_len, *grid))


@settings(max_examples=60, deadline=None)
@given(st.integers(8, 512), st.integers(1, 64), st.integers(1, 64))
def test_tables_equal_the_references_for_any_length_and_grid(text_len: int, height: int, width: int) -> None:
    assert_equal(rope_tables(text_len, height, width), reference_tables(text_len, height, width))


def test_positions_are_those_of_the_contract() -> None:
    """Text token i is at (i, i, i); image token (y, x) at (L, y - (h - h//2), x - (w - w//2))."""
    tables, text_len, height, width = axis_tables(), 10, 5, 4
    rope = rope_tables(text_len, height, width)

    def cosines(*positions: int) -> np.ndarray:
        return np.concatenate([tables[axis][0][position + 1024] for axis, position in enumerate(positions)])

    assert np.array_equal(rope.txt_cos[0, 7], cosines(7, 7, 7))
    assert np.array_equal(rope.img_cos[0, 0], cosines(text_len, -3, -2))
    assert np.array_equal(rope.img_cos[0, 3 * width + 1], cosines(text_len, 0, -1))
    assert np.array_equal(rope.img_cos[0, -1], cosines(text_len, 1, 1))


def test_axis_widths_are_16_56_56_over_9216_positions() -> None:
    assert [cos.shape for cos, _ in axis_tables()] == [(9216, 8), (9216, 28), (9216, 28)]


def test_written_tables_are_read_back_exactly(tmp_path: Path) -> None:
    write_axis_tables(tmp_path)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes == {
        f"rope_axis{axis}_{part}.f32": 9216 * pairs * 4
        for axis, pairs in enumerate((8, 28, 28))
        for part in ("cos", "sin")
    }
    sines = np.fromfile(tmp_path / "rope_axis0_sin.f32", "<f4").reshape(9216, 8)
    assert sines[1024 + 2, 0] == pytest.approx(math.sin(2), abs=1e-7)
    tables = read_axis_tables(tmp_path)
    assert tables is not None
    assert_equal(rope_tables(40, 9, 13, tables), reference_tables(40, 9, 13))


def test_given_tables_are_used() -> None:
    marked = tuple((np.full_like(cos, axis), sin) for axis, (cos, sin) in enumerate(axis_tables()))
    cosines = rope_tables(8, 8, 8, marked).img_cos[0, 0]
    assert cosines.tolist() == [0.0] * 8 + [1.0] * 28 + [2.0] * 28


def test_a_folder_without_tables_has_none(tmp_path: Path) -> None:
    assert read_axis_tables(tmp_path) is None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "missing beside the other RoPE tables"),
        (lambda path: path.write_bytes(path.read_bytes()[:-4]), "bytes, a table has 1032192"),
        (lambda path: path.write_bytes(bytes(9216 * 28 * 4)), "does not hold the RoPE table of this model"),
    ],
)
def test_damaged_tables_are_refused(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    write_axis_tables(tmp_path)
    damage(tmp_path / "rope_axis2_cos.f32")
    with pytest.raises(ContractError, match=message):
        read_axis_tables(tmp_path)


@pytest.mark.parametrize(("text_len", "height", "width"), [(7, 8, 8), (513, 8, 8), (8, 0, 8), (8, 8, -1), (8, 65, 64)])
def test_sizes_outside_the_contract_are_refused(text_len: int, height: int, width: int) -> None:
    with pytest.raises(ContractError, match="the DiT takes"):
        rope_tables(text_len, height, width)
