"""Weights that stay on disk until they are needed, and their stand-ins."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.export.checkpoint import load_dit, load_text_encoder, load_vae_decoder
from coreai_rgba_image.host.export.stored import EmptyOnMeta, StandIns, StoredTensor

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def stored(tmp_path: Path) -> StoredTensor:
    tensor = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    save_file({"other": torch.ones(7), "weight": tensor}, tmp_path / WEIGHTS)
    return StoredTensor(tmp_path / WEIGHTS, "weight", tensor.shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_stored_tensor_is_read_in_the_dtype_asked_for(stored: StoredTensor, dtype: torch.dtype) -> None:
    read = stored.read(dtype)
    assert read.dtype == dtype
    assert read.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_a_file_that_is_gone_by_then_is_named(stored: StoredTensor) -> None:
    stored.path.unlink()
    with pytest.raises(ContractError, match=rf"cannot read .*{WEIGHTS} .*download it again"):
        stored.read(torch.float32)


def test_a_stand_in_is_found_through_the_parameter_made_of_it(stored: StoredTensor) -> None:
    stand_ins = StandIns()
    layer = nn.Linear(4, 3, bias=True)
    layer.weight = nn.Parameter(stand_ins.add(stored, torch.bfloat16), requires_grad=False)
    assert (layer.weight.shape, layer.weight.dtype) == ((3, 4), torch.bfloat16)
    assert stand_ins.find(layer.weight) == stand_ins.find(layer.weight.detach().cpu()) == stored
    assert stand_ins.find(layer.bias) is None
    assert len(stand_ins) == 1


def test_parameters_have_no_memory_and_buffers_have_their_values() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3)
            self.scale = nn.Parameter(torch.empty(1 << 40))
            self.register_buffer("table", torch.arange(3.0).cos())

    with EmptyOnMeta():
        both = Both()
    assert {parameter.device.type for parameter in both.parameters()} == {"meta"}
    assert torch.equal(both.get_buffer("table"), torch.arange(3.0).cos())
    assert torch.empty(1).device.type == "cpu"


@pytest.mark.parametrize("part", ["dit", "encoder", "vae"])
def test_a_model_of_stand_ins_is_the_loaded_model_but_for_the_values(tiny_checkpoint: Path, part: str) -> None:
    stand_ins = StandIns()
    outline: nn.Module
    loaded: nn.Module
    if part == "dit":
        outline, loaded = load_dit(tiny_checkpoint, stand_ins=stand_ins), load_dit(tiny_checkpoint)
    elif part == "encoder":
        outline, loaded = load_text_encoder(tiny_checkpoint, "fp32", stand_ins), load_text_encoder(tiny_checkpoint)
    else:
        outline, loaded = load_vae_decoder(tiny_checkpoint, 8, 12, stand_ins), load_vae_decoder(tiny_checkpoint, 8, 12)
    expected = dict(loaded.named_parameters())
    assert {name for name, _ in outline.named_parameters()} == expected.keys()
    assert len(stand_ins) == len(expected)
    for name, parameter in outline.named_parameters():
        found = stand_ins.find(parameter)
        assert found is not None
        assert torch.equal(found.read(parameter.dtype), expected[name])
        assert parameter.dtype == expected[name].dtype
    buffers = dict(loaded.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in outline.named_buffers())


def test_weights_of_another_dtype_are_converted_when_read(tiny_checkpoint: Path, tmp_path: Path) -> None:
    source = tiny_checkpoint / "transformer"
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_bytes((source / "config.json").read_bytes())
    wide = {name: tensor.float() * (1 + 2**-12) for name, tensor in load_file(source / WEIGHTS).items()}
    save_file(wide, tmp_path / "transformer" / WEIGHTS)
    stand_ins = StandIns()
    model = load_dit(tmp_path, stand_ins=stand_ins)
    for name, parameter in model.named_parameters():
        found = stand_ins.find(parameter)
        assert found is not None
        assert torch.equal(found.read(parameter.dtype), wide[name].to(torch.bfloat16))
