"""Checkpoints are read strictly: everything the graph needs, nothing it does not know."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.export.checkpoint import load_dit, load_text_encoder, load_vae_decoder

Tensors = dict[str, Tensor]
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint's transformer to damage."""
    shutil.copytree(tiny_checkpoint / "transformer", tmp_path / "transformer")
    return tmp_path


def rewrite(checkpoint: Path, change: Callable[[Tensors], object]) -> None:
    path = checkpoint / "transformer" / WEIGHTS
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def split_into_shards(folder: Path) -> list[Path]:
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    shards = {"model-1-of-2.safetensors": names[::2], "model-2-of-2.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / shard)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    (folder / WEIGHTS).unlink()
    return [folder / shard for shard in shards]


def test_the_dit_gets_every_tensor_in_bf16(tiny_checkpoint: Path) -> None:
    model = load_dit(tiny_checkpoint, torch.bfloat16)
    stored = load_file(tiny_checkpoint / "transformer" / WEIGHTS)
    loaded = dict(model.named_parameters())
    assert loaded.keys() == stored.keys()
    for name, tensor in stored.items():
        assert loaded[name].dtype == torch.bfloat16
        assert torch.equal(loaded[name], tensor)
    assert model.compute_dtype == torch.bfloat16
    assert not model.training


def test_the_text_encoder_leaves_out_vision_head_and_final_norm(tiny_checkpoint: Path) -> None:
    prefix = "model.language_model."
    stored = load_file(tiny_checkpoint / "text_encoder" / "model.safetensors")
    assert {f"{prefix}norm.weight", "lm_head.weight"} < stored.keys()
    assert any(name.startswith("model.visual.") for name in stored)
    loaded = dict(load_text_encoder(tiny_checkpoint).named_parameters())
    assert {prefix + name for name in loaded} == {name for name in stored if name.startswith(prefix)} - {
        f"{prefix}norm.weight"
    }
    assert all(torch.equal(tensor, stored[prefix + name]) for name, tensor in loaded.items())


def test_the_vae_decoder_gets_fp32(tiny_checkpoint: Path) -> None:
    stored = load_file(tiny_checkpoint / "vae" / WEIGHTS)
    loaded = dict(load_vae_decoder(tiny_checkpoint, 8, 12).named_parameters())
    assert loaded.keys() == {
        name for name in stored if name.startswith(("decoder.", "post_quant_conv.")) and ".time_conv." not in name
    }
    assert {tensor.dtype for tensor in loaded.values()} == {torch.float32}


def test_a_sharded_checkpoint_is_the_same(checkpoint: Path, tiny_checkpoint: Path) -> None:
    split_into_shards(checkpoint / "transformer")
    sharded, single = load_dit(checkpoint).state_dict(), load_dit(tiny_checkpoint).state_dict()
    assert sharded.keys() == single.keys()
    assert all(torch.equal(sharded[name], single[name]) for name in single)


def test_a_missing_shard_is_named(checkpoint: Path) -> None:
    _, second = split_into_shards(checkpoint / "transformer")
    second.unlink()
    with pytest.raises(ContractError, match=r"cannot read .*model-2-of-2\.safetensors .*download it again"):
        load_dit(checkpoint)


@pytest.mark.parametrize("keep", [0, 5, 100, -4])
def test_a_truncated_shard_is_named(checkpoint: Path, keep: int) -> None:
    first, _ = split_into_shards(checkpoint / "transformer")
    first.write_bytes(first.read_bytes()[:keep])
    with pytest.raises(ContractError, match=r"cannot read .*model-1-of-2\.safetensors .*download it again"):
        load_dit(checkpoint)


def test_an_incomplete_index_is_told_from_the_missing_tensors(checkpoint: Path) -> None:
    split_into_shards(checkpoint / "transformer")
    index = checkpoint / "transformer" / f"{WEIGHTS}.index.json"
    index.write_text(json.dumps({"weight_map": {"img_in.weight": "model-1-of-2.safetensors"}}), encoding="utf-8")
    with pytest.raises(ContractError, match=r"does not fit its config.json: missing .* and .* more"):
        load_dit(checkpoint)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 3}', b"\xff"])
def test_a_damaged_index_is_named(checkpoint: Path, content: str | bytes) -> None:
    split_into_shards(checkpoint / "transformer")
    index = checkpoint / "transformer" / f"{WEIGHTS}.index.json"
    index.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ContractError, match=r"index.json"):
        load_dit(checkpoint)


def test_a_missing_tensor_is_named(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.pop("proj_out.weight"))
    with pytest.raises(ContractError, match=r"missing proj_out.weight; unknown none; of another shape none"):
        load_dit(checkpoint)


def test_an_unknown_tensor_is_named(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.update({"proj_out.bias": torch.zeros(64)}))
    with pytest.raises(ContractError, match=r"missing none; unknown proj_out.bias; of another shape none"):
        load_dit(checkpoint)


def test_a_tensor_of_another_shape_is_named(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.update({"proj_out.weight": torch.zeros(32, 256)}))
    with pytest.raises(ContractError, match=r"of another shape proj_out.weight \[32, 256\], not \[64, 256\]"):
        load_dit(checkpoint)


def test_a_config_of_another_model_is_refused(checkpoint: Path) -> None:
    config = checkpoint / "transformer" / "config.json"
    shape = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({**shape, "num_layers": 3}), encoding="utf-8")
    with pytest.raises(ContractError, match=r"missing transformer_blocks\.2\.attn"):
        load_dit(checkpoint)
    del shape["num_attention_heads"]
    config.write_text(json.dumps(shape), encoding="utf-8")
    with pytest.raises(ContractError, match=r"config.json lacks what this graph needs: .*num_attention_heads"):
        load_dit(checkpoint)


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff"])
def test_an_unreadable_config_is_named(checkpoint: Path, content: bytes | None) -> None:
    config = checkpoint / "transformer" / "config.json"
    config.unlink()
    if content is not None:
        config.write_bytes(content)
    with pytest.raises(ContractError, match=r"config.json"):
        load_dit(checkpoint)


def test_two_files_without_an_index_are_ambiguous(checkpoint: Path) -> None:
    shutil.copyfile(checkpoint / "transformer" / WEIGHTS, checkpoint / "transformer" / "other.safetensors")
    with pytest.raises(ContractError, match="holds 2 safetensors files and no index"):
        load_dit(checkpoint)


def test_a_folder_without_weights_is_refused(checkpoint: Path) -> None:
    (checkpoint / "transformer" / WEIGHTS).unlink()
    with pytest.raises(ContractError, match="holds 0 safetensors files"):
        load_dit(checkpoint)


def test_hidden_files_beside_the_weights_are_no_weights(checkpoint: Path) -> None:
    (checkpoint / "transformer" / f"._{WEIGHTS}").write_bytes(b"left behind by macOS")
    assert load_dit(checkpoint).config.num_layers == 2
