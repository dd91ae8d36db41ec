"""One torch graph to one bundle: whole or not at all, and only what the contract knows."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from coreai_rgba_image.host import runtime
from coreai_rgba_image.host.bundle import Bundle, read_bundle
from coreai_rgba_image.host.contract import DIT, TEXT_ENCODER, VAE_DECODER, ContractError, GraphSpec, TensorSpec
from coreai_rgba_image.host.export.convert import convert

SPEC = VAE_DECODER.bind({"N": 64, "H": 128, "W": 128})


class Mosaic(nn.Module):
    """Stands in for a decoder: the first four channels of each token as a 16 x 16 tile, times ``gain``."""

    def __init__(self, gain: float = 1.0):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([gain]), requires_grad=False)

    def forward(self, latents_packed: Tensor) -> Tensor:
        tiles = (latents_packed[..., :4] * self.gain).transpose(1, 2).unflatten(2, (8, 8))
        return nn.functional.interpolate(tiles, scale_factor=16.0, mode="nearest-exact")


class Untraceable(nn.Module):
    def forward(self, latents_packed: Tensor) -> Tensor:
        raise RuntimeError("this cannot be traced")


class Doubler(nn.Module):
    def forward(self, input_ids: Tensor) -> Tensor:
        return torch.stack((input_ids.float(), input_ids.float() * 2), dim=-1)


def names_in(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()]


def call(bundle: Bundle) -> np.ndarray:
    tokens = np.random.default_rng(0).standard_normal((1, 64, 64), dtype=np.float32)
    with runtime.load(bundle) as graph:
        image = graph(latents_packed=tokens)["image"]
    return image[0, :, ::16, ::16].reshape(4, 64).T / tokens[0, :, :4]


def test_a_bundle_computes_what_the_module_does(tmp_path: Path) -> None:
    bundle = convert(Mosaic(3.0), SPEC, tmp_path / "mosaic.aimodel", {"note": "mosaïque"})
    assert bundle == read_bundle(tmp_path / "mosaic.aimodel")
    assert bundle.spec == SPEC
    assert bundle.metadata == {"kind": "VAE decoder", "limits": {}, "note": "mosaïque"}
    assert np.allclose(call(bundle), 3.0, rtol=1e-6)


def test_a_second_export_replaces_the_first(tmp_path: Path) -> None:
    path = tmp_path / "mosaic.aimodel"
    first = convert(Mosaic(1.0), SPEC, path, {})
    second = convert(Mosaic(2.0), SPEC, path, {})
    assert first.sha256 != second.sha256
    assert np.allclose(call(second), 2.0, rtol=1e-6)
    assert names_in(tmp_path) == [path.name]


def test_a_failed_export_leaves_the_old_bundle_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "mosaic.aimodel"
    before = convert(Mosaic(), SPEC, path, {})
    with pytest.raises(Exception, match="cannot be traced"):
        convert(Untraceable(), SPEC, path, {})
    assert read_bundle(path) == before
    assert names_in(tmp_path) == [path.name]


def test_the_same_module_gives_the_same_program(tmp_path: Path) -> None:
    bundles = [
        convert(Mosaic(), SPEC, tmp_path / name / "mosaic.aimodel", {}) for name in ("one", "another, longer one")
    ]
    assert bundles[0].sha256 == bundles[1].sha256


def test_inference_mode_is_no_hindrance(tmp_path: Path) -> None:
    """ComfyUI runs nodes in it."""
    with torch.inference_mode():
        bundle = convert(Mosaic(2.0), SPEC, tmp_path / "mosaic.aimodel", {})
    assert np.allclose(call(bundle), 2.0, rtol=1e-6)


@pytest.mark.parametrize("length", [16, 77, 512])
def test_a_named_axis_stays_dynamic(tmp_path: Path, length: int) -> None:
    bundle = convert(Doubler(), TEXT_ENCODER.bind({"D": 2}), tmp_path / "doubler.aimodel", {})
    ids = np.arange(length, dtype=np.int32)[None]
    with runtime.load(bundle) as graph:
        hidden = graph(input_ids=ids)["hidden"]
    assert np.array_equal(hidden, np.stack((ids, ids * 2), axis=-1).astype(np.float32))


def test_narrower_limits_are_kept_in_the_bundle(tmp_path: Path) -> None:
    narrow = GraphSpec("text encoder", TEXT_ENCODER.inputs, TEXT_ENCODER.outputs, {"Lfull": (16, 64)}).bind({"D": 2})
    bundle = convert(Doubler(), narrow, tmp_path / "doubler.aimodel", {})
    assert bundle.spec.limits == {"Lfull": (16, 64)}
    with runtime.load(bundle) as graph, pytest.raises(ContractError, match=r"Lfull = 65: this graph takes 16\.\.64"):
        graph(input_ids=np.zeros((1, 65), dtype=np.int32))


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r"must end in \.aimodel"):
        convert(Mosaic(), SPEC, tmp_path / "mosaic.mlpackage", {})
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(("spec", "axis"), [(VAE_DECODER, "N"), (DIT, "D")])
def test_an_axis_that_is_neither_fixed_nor_dynamic_is_refused(tmp_path: Path, spec: GraphSpec, axis: str) -> None:
    with pytest.raises(ContractError, match=f"the size of axis {axis} is not known"):
        convert(Mosaic(), spec, tmp_path / "mosaic.aimodel", {})
    assert names_in(tmp_path) == []


def test_a_graph_outside_the_contract_is_refused(tmp_path: Path) -> None:
    stranger = GraphSpec("stranger", (TensorSpec("latents_packed", "float32", (1, 64, 32)),), SPEC.outputs)
    with pytest.raises(ContractError, match=r"latents_packed is .*, the contract says"):
        convert(Mosaic(), stranger, tmp_path / "stranger.aimodel", {})
