"""The contract's numbers, and that nothing outside it gets through."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from coreai_rgba_image.host.contract import (
    DIT,
    GRAPHS,
    TEXT_ENCODER,
    VAE_DECODER,
    ContractError,
    GraphSpec,
    TensorSpec,
)

WIDTH = 32


def dit_inputs(text: int = 9, image: int = 96) -> dict[str, np.ndarray]:
    shapes = {
        "img_tokens": (1, image, 64),
        "txt_feats": (1, text, WIDTH),
        "timestep": (1,),
        "txt_cos": (1, text, 64),
        "txt_sin": (1, text, 64),
        "img_cos": (1, image, 64),
        "img_sin": (1, image, 64),
    }
    return {name: np.zeros(shape, dtype=np.float32) for name, shape in shapes.items()}


def test_the_published_names_dtypes_and_axes() -> None:
    def described(graph: GraphSpec) -> list[tuple[str, str, tuple[int | str, ...]]]:
        return [(tensor.name, tensor.dtype, tensor.shape) for tensor in (*graph.inputs, *graph.outputs)]

    assert described(TEXT_ENCODER) == [
        ("input_ids", "int32", (1, "Lfull")),
        ("hidden", "float32", (1, "Lfull", "D")),
    ]
    assert described(DIT) == [
        ("img_tokens", "float32", (1, "N", 64)),
        ("txt_feats", "float32", (1, "L", "D")),
        ("timestep", "float32", (1,)),
        ("txt_cos", "float32", (1, "L", 64)),
        ("txt_sin", "float32", (1, "L", 64)),
        ("img_cos", "float32", (1, "N", 64)),
        ("img_sin", "float32", (1, "N", 64)),
        ("vel", "float32", (1, "N", 64)),
    ]
    assert described(VAE_DECODER) == [
        ("latents_packed", "float32", (1, "N", 64)),
        ("image", "float32", (1, 4, "H", "W")),
    ]
    assert (TEXT_ENCODER.limits, DIT.limits) == ({"Lfull": (16, 512)}, {"L": (8, 512), "N": (64, 4096)})


@pytest.mark.parametrize(("text", "image"), [(8, 64), (512, 64), (8, 4096), (9, 96)])
def test_inputs_within_the_contract_pass(text: int, image: int) -> None:
    graph = DIT.bind({"D": WIDTH})
    graph.check(dit_inputs(text, image))
    assert graph.inputs[1].shape == (1, "L", WIDTH)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("timestep", np.zeros(1, dtype=np.float64), "timestep is float64: convert it to float32"),
        ("timestep", np.zeros(2, dtype=np.float32), r"timestep has shape \[2\]: it takes \[1\]"),
        ("timestep", [0.5], "timestep is a list: pass a numpy array"),
        ("img_tokens", np.zeros((1, 96, 63), dtype=np.float32), r"it takes \[1, N, 64\]"),
        ("img_tokens", np.zeros((2, 96, 64), dtype=np.float32), r"it takes \[1, N, 64\]"),
        ("img_tokens", np.zeros((96, 64), dtype=np.float32), r"it takes \[1, N, 64\]"),
        ("img_tokens", np.zeros((1, 63, 64), dtype=np.float32), r"N = 63: this graph takes 64\.\.4096"),
        ("img_tokens", np.zeros((1, 4097, 64), dtype=np.float32), r"N = 4097: this graph takes 64\.\.4096"),
        ("txt_feats", np.zeros((1, 7, WIDTH), dtype=np.float32), r"L = 7: this graph takes 8\.\.512"),
        ("txt_feats", np.zeros((1, 9, WIDTH + 1), dtype=np.float32), r"it takes \[1, L, 32\]"),
        ("txt_cos", np.zeros((1, 10, 64), dtype=np.float32), "L = 10, another input has 9"),
        ("img_sin", np.zeros((1, 97, 64), dtype=np.float32), "N = 97, another input has 96"),
    ],
)
def test_an_input_outside_the_contract_is_named(name: str, array: Any, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        DIT.bind({"D": WIDTH}).check({**dit_inputs(), name: array})


def test_missing_and_unknown_inputs_are_listed() -> None:
    inputs = dit_inputs()
    inputs["mask"] = inputs.pop("img_cos")
    with pytest.raises(ContractError, match=r"missing \['img_cos'\], unknown \['mask'\]"):
        DIT.check(inputs)


def test_specs_check_themselves_and_cannot_be_changed() -> None:
    with pytest.raises(ContractError, match="not a number type"):
        TensorSpec("x", "U8", (1,))
    with pytest.raises(ContractError, match="below 1"):
        TensorSpec("x", "float32", (1, 0))
    with pytest.raises(ContractError, match="used twice"):
        GraphSpec("g", (TensorSpec("x", "float32", (1,)),), (TensorSpec("x", "float32", (1,)),))
    with pytest.raises(ContractError, match=r"limits 9\.\.8"):
        GraphSpec("g", (), (), {"L": (9, 8)})
    with pytest.raises(dataclasses.FrozenInstanceError):
        DIT.__setattr__("kind", "other")
    assert issubclass(ContractError, ValueError)
    assert len({graph.kind for graph in GRAPHS}) == 3
