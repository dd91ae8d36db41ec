"""An export that streams weights gives what one with the weights in memory gives."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from coreai_rgba_image.host import runtime
from coreai_rgba_image.host.bundle import Bundle, import_coreai
from coreai_rgba_image.host.contract import TEXT_ENCODER, VAE_DECODER
from coreai_rgba_image.host.export.checkpoint import load_dit, load_vae_decoder
from coreai_rgba_image.host.export.convert import Part, convert
from coreai_rgba_image.host.export.model_set import dit, dit_parts, vae_decoder
from coreai_rgba_image.host.export.stored import StandIns, StoredTensor
from coreai_rgba_image.host.export.streaming import as_numpy, save
from coreai_rgba_image.host.graphs.dit import DiT

VAE_SPEC = VAE_DECODER.bind({"N": 96, "H": 128, "W": 192})


def two_functions(model: DiT) -> list[Part]:
    """Of six, which trace for a while."""
    main, *_, finish = dit_parts(model)
    return [main, finish]


def in_memory(part: str, checkpoint: Path) -> list[Part]:
    """What ``streamed`` exports, with the weights loaded."""
    if part == "dit":
        return two_functions(load_dit(checkpoint, torch.bfloat16))
    return [(load_vae_decoder(checkpoint, 8, 12), VAE_SPEC)]


def streamed(part: str, checkpoint: Path, out: Path) -> Bundle:
    """Without metadata, some of which is computed with the weights."""
    if part == "dit":
        return replace(dit(checkpoint, out, "bf16"), parts=two_functions, describe=lambda model: {}).export()
    return replace(vae_decoder(checkpoint, out, 8, 12), describe=lambda model: {}).export()


def program_of(bundle: Bundle) -> bytes:
    """Without the eight random letters that the converter appends to the names of composite operations."""
    return re.sub(rb"_[a-z]{8}\0", b"\0", (bundle.path / "main.mlirb").read_bytes())


@pytest.mark.parametrize("part", ["dit", "vae"])
def test_a_streamed_bundle_is_that_of_loaded_weights_and_reads_each_once(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    (main, spec), *others = in_memory(part, tiny_checkpoint)
    loaded = convert(main, spec, tmp_path / "loaded.aimodel", {}, others)
    reads: Counter[str] = Counter()
    read = StoredTensor.read

    def counted(stored: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
        reads[stored.name] += 1
        return read(stored, dtype)

    monkeypatch.setattr(StoredTensor, "read", counted)
    assert program_of(streamed(part, tiny_checkpoint, tmp_path)) == program_of(loaded)
    assert reads == Counter(name for name, _ in main.named_parameters())


def test_an_asset_is_saved_as_the_converters_own_is(tmp_path: Path) -> None:
    from coreai_torch import TorchConverter, get_decomp_table

    exported = torch.export.export(nn.Linear(4, 4), (torch.zeros(1, 4),)).run_decompositions(get_decomp_table())
    program = TorchConverter().add_exported_program(exported).to_coreai()
    ours, theirs = tmp_path / "ours.aimodel", tmp_path / "theirs.aimodel"
    save(program, ours)
    program.save_asset(theirs)
    assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()}
    for name in ("main.mlirb", "main.hash"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    metadata = [json.loads((folder / "metadata.json").read_text(encoding="utf-8")) for folder in (ours, theirs)]
    assert metadata[0].keys() == metadata[1].keys()
    assert import_coreai()[1].AIModelAsset.is_valid(ours)


class Scaled(nn.Module):
    """Stands in for a text encoder."""

    def __init__(self, scale: torch.Tensor):
        super().__init__()
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids.unsqueeze(-1) * self.scale


def test_a_stand_in_that_the_program_does_not_hold_is_an_error(tmp_path: Path) -> None:
    """Its place would hold whatever its memory held."""
    save_file({"scale": torch.arange(512.0)}, tmp_path / "x.safetensors")
    stored, stand_ins = StoredTensor(tmp_path / "x.safetensors", "scale", torch.Size([512])), StandIns()
    model, spec = Scaled(stand_ins.add(stored, torch.float32)), TEXT_ENCODER.bind({"D": 512})
    bundle = convert(model, spec, tmp_path / "x.aimodel", {}, stand_ins=stand_ins)
    with runtime.load(bundle) as graph:
        hidden = graph(input_ids=np.full((1, 16), 2, dtype=np.int32))["hidden"]
    assert hidden[0, 0].tolist() == [2.0 * channel for channel in range(512)]
    lost = Scaled(model.scale.clone())
    with pytest.raises(RuntimeError, match="1 weights of text encoder are not in the converted program"):
        convert(lost, spec, tmp_path / "y.aimodel", {}, stand_ins=stand_ins)
    assert {path.name for path in tmp_path.iterdir()} == {"x.safetensors", "x.aimodel"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_arrays_for_the_converter_are_the_tensors_memory(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[1.0, -2.5], [3e38, 0.0]], dtype=dtype)
    array = as_numpy(tensor)
    assert array.ctypes.data == tensor.data_ptr()
    assert array.astype("float32").tolist() == tensor.float().tolist()
    assert not array.flags.writeable
