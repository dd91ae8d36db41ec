"""LoRA files: every way to name keys means the same, and nothing is skipped."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_qwen_lora_to_diffusers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.export.checkpoint import load_dit
from coreai_rgba_image.host.export.lora import KEY, Lora, read_lora
from coreai_rgba_image.host.export.model_set import export_model_set
from coreai_rgba_image.host.graphs.layers import Linear

LAYERS = ("transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.to_out.0", "transformer_blocks.1.img_mlp.proj")
STYLES = {
    "PEFT": "base_model.model.{}.lora_{}.weight",
    "PEFT without prefix": "{}.lora_{}.weight",
    "PEFT in memory": "{}.lora_{}.default.weight",
    "diffusers": "transformer.{}.lora_{}.weight",
    "ComfyUI with A and B": "diffusion_model.{}.lora_{}.weight",
    "ComfyUI": "diffusion_model.{}.lora_{}.weight",
    "down and up without prefix": "{}.lora_{}.weight",
    "underscores": "lora_unet_{}.lora_{}.weight",
}
DOWN_AND_UP = ("ComfyUI", "down and up without prefix", "underscores")

Halves = dict[str, tuple[Tensor, Tensor]]


@pytest.fixture(scope="module")
def shapes(tiny_checkpoint: Path) -> dict[str, torch.Size]:
    modules = load_dit(tiny_checkpoint).named_modules()
    return {name: module.weight.shape for name, module in modules if isinstance(module, Linear)}


def new_halves(shapes: dict[str, torch.Size], rank: int) -> Halves:
    generator = torch.Generator().manual_seed(0)
    return {
        name: (
            torch.randn(rank, inner, generator=generator) * inner**-0.5,
            torch.randn(outer, rank, generator=generator) * rank**-0.5,
        )
        for name, (outer, inner) in shapes.items()
    }


def in_style(style: str, halves: Halves, alpha: float | None = None) -> dict[str, Tensor]:
    sides = ("down", "up") if style in DOWN_AND_UP else ("A", "B")
    tensors = {}
    for name, pair in halves.items():
        name = name.replace(".", "_") if style == "underscores" else name
        for side, tensor in zip(sides, pair, strict=True):
            key = STYLES[style].format(name, side)
            tensors[key] = tensor.contiguous()
        if alpha is not None:
            tensors[key[: key.index(".lora_")] + ".alpha"] = torch.tensor(alpha)
    return tensors


def write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> Path:
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, path, metadata)
    return path


def dense(updates: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    return {name: up @ down for name, (down, up) in updates.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("style", STYLES)
def test_every_style_of_keys_means_the_same(style: str, shapes: dict[str, torch.Size], tmp_path: Path) -> None:
    halves = new_halves(shapes, rank=4)
    path = write(tmp_path / "lora.safetensors", in_style(style, halves))
    assert_same(dense(read_lora(Lora(path), shapes)), dense(halves))


@pytest.mark.parametrize("style", STYLES)
def test_alpha_over_rank_and_the_strength_scale_the_update(
    style: str, shapes: dict[str, torch.Size], tmp_path: Path
) -> None:
    halves = new_halves(shapes, rank=4)
    path = write(tmp_path / "lora.safetensors", in_style(style, halves, alpha=2.0))
    found = dense(read_lora(Lora(path, -3.0), shapes))
    assert_same(found, {name: -1.5 * update for name, update in dense(halves).items()})


@pytest.mark.parametrize("style", ["PEFT in memory", "ComfyUI with A and B", "ComfyUI"])
def test_keys_and_alpha_mean_what_they_do_to_diffusers(
    style: str, shapes: dict[str, torch.Size], tmp_path: Path
) -> None:
    halves = {name: pair for name, pair in new_halves(shapes, rank=6).items() if name in LAYERS}
    tensors = in_style(style, halves, alpha=4.0)
    found = dense(read_lora(Lora(write(tmp_path / "lora.safetensors", tensors)), shapes))
    theirs = _convert_non_diffusers_qwen_lora_to_diffusers(tensors)
    names = {"A": "transformer.{}.lora_A.weight", "B": "transformer.{}.lora_B.weight"}
    assert_same(found, {n: theirs[names["B"].format(n)] @ theirs[names["A"].format(n)] for n in halves})


@pytest.mark.parametrize(
    ("settings", "scales"),
    [
        ({"lora_alpha": 8, "r": 4}, (2, 2, 2)),
        ({"lora_alpha": 8, "use_rslora": True}, (4, 4, 4)),
        ({"lora_alpha": 8, "alpha_pattern": {"to_q": 2, r"transformer_blocks\.1\..*proj": 1}}, (0.5, 2, 0.25)),
        ({"lora_alpha": 8, "alpha_pattern": {"o_q": 2}, "init_lora_weights": True}, (2, 2, 2)),
        ({"r": 4}, (1, 1, 1)),
    ],
)
@pytest.mark.parametrize("place", ["in the file, PEFT's names", "in the file, diffusers' names", "beside the file"])
def test_settings_of_peft_tell_alpha(
    settings: dict[str, Any], scales: tuple[float, ...], place: str, shapes: dict[str, torch.Size], tmp_path: Path
) -> None:
    halves = {name: pair for name, pair in new_halves(shapes, rank=4).items() if name in LAYERS}
    prefix = "transformer." if "diffusers" in place else ""
    text = json.dumps({prefix + name: value for name, value in settings.items()})
    path = tmp_path / "adapter_model.safetensors"
    write(path, in_style("diffusers", halves), {"lora_adapter_metadata": text} if "in the file" in place else None)
    if place == "beside the file":
        (tmp_path / "adapter_config.json").write_text(text, encoding="utf-8")
    found = dense(read_lora(Lora(path), shapes))
    expected = dense(halves)
    assert_same(found, {name: scale * expected[name] for name, scale in zip(LAYERS, scales, strict=True)})


def test_an_alpha_in_plain_metadata_counts_and_one_beside_the_weights_counts_more(
    shapes: dict[str, torch.Size], tmp_path: Path
) -> None:
    halves = new_halves(shapes, rank=4)
    path = tmp_path / "lora.safetensors"
    for alpha, scale in ((None, 3.0), (1.0, 0.25)):
        write(path, in_style("diffusers", halves, alpha), {"lora_alpha": "12"})
        found = dense(read_lora(Lora(path), shapes))
        assert_same(found, {name: scale * update for name, update in dense(halves).items()})


def test_a_config_beside_a_file_of_another_name_is_none_of_its_own(
    shapes: dict[str, torch.Size], tmp_path: Path
) -> None:
    halves = new_halves(shapes, rank=4)
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 8}', encoding="utf-8")
    path = write(tmp_path / "lora.safetensors", in_style("diffusers", halves))
    assert_same(dense(read_lora(Lora(path), shapes)), dense(halves))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_half_precision_files_are_read_exactly(
    dtype: torch.dtype, shapes: dict[str, torch.Size], tmp_path: Path
) -> None:
    stored = {key: tensor.to(dtype) for key, tensor in in_style("PEFT", new_halves(shapes, rank=4)).items()}
    found = read_lora(Lora(write(tmp_path / "lora.safetensors", stored)), shapes)
    down, up = found[LAYERS[0]]
    assert torch.equal(down, stored[STYLES["PEFT"].format(LAYERS[0], "A")].float())
    assert torch.equal(up, stored[STYLES["PEFT"].format(LAYERS[0], "B")].float())


# What is refused.


def lora_errors() -> list[Any]:
    name, other = LAYERS[0], LAYERS[1]
    down, up = torch.ones(4, 256), torch.ones(256, 4)
    good = {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    misfit = "of another shape: "
    cases: dict[str, tuple[dict[str, Tensor], str]] = {
        "nothing": ({}, "holds no LoRA but none"),
        "no LoRA": ({f"{name}.weight": down}, rf"holds no LoRA but {name}\.weight\. What fits"),
        "unknown layer": (
            {**good, "text_model.to_q.lora_A.weight": down, "text_model.to_q.lora_B.weight": up},
            r"2 unknown: text_model\.to_q\.lora_A\.weight, text_model\.to_q\.lora_B\.weight\. What fits",
        ),
        "many unknown": (
            {**good, **{f"x.{n}.lora_A.weight": down + n for n in range(20)}}, r"20 unknown: .* and 12 more"
        ),
        "a bias": ({**good, f"{name}.lora_B.bias": up[:, 0].clone()}, r"1 unknown: .*lora_B\.bias"),
        "DoRA": ({**good, f"{name}.lora_magnitude_vector": up[:, 0].clone()}, r"1 unknown: .*magnitude_vector"),
        "a norm": ({**good, "txt_in.text_norm.lora_A.weight": down}, r"1 unknown: txt_in\.text_norm"),
        "A alone": ({**good, f"{other}.lora_A.weight": down}, rf"1 without its other half: {other}\.lora_A"),
        "B alone": ({**good, f"{other}.lora_B.weight": up}, rf"1 without its other half: {other}\.lora_B"),
        "alpha alone": ({**good, f"{other}.alpha": torch.tensor(1.0)}, rf"without its other half: {other}\.alpha"),
        "twice": ({**good, f"transformer.{name}.lora_down.weight": down + 1}, "1 given twice: transformer"),
        "ranks": ({**good, f"{name}.lora_B.weight": torch.ones(256, 5)}, misfit + r"up .*256, 5\], not .*\[256, 4\]"),
        "inner": ({**good, f"{name}.lora_A.weight": torch.ones(4, 64)}, misfit + r"down .*4, 64\], not .*\[4, 256\]"),
        "turned": ({f"{name}.lora_A.weight": up, f"{name}.lora_B.weight": down}, "2 " + misfit),
        "a convolution": ({**good, f"{name}.lora_A.weight": torch.ones(4, 256, 1, 1)}, misfit + "down"),
        "a number": ({**good, f"{name}.lora_A.weight": torch.tensor(1.0)}, r"down .*\[\], not .*\[rank, 256\]"),
        "rank 0": (
            {f"{name}.lora_A.weight": torch.ones(0, 256), f"{name}.lora_B.weight": torch.ones(256, 0)},
            r"down .*\[0, 256\], not .*\[rank, 256\]",
        ),
        "integers": ({**good, f"{name}.lora_A.weight": down.int()}, r"down .*torch\.int32 .*, not floating-point"),
        "alphas": ({**good, f"{name}.alpha": torch.ones(4)}, r"alpha of .* has shape \[4\], not one number"),
        "not a number": ({**good, f"{name}.alpha": torch.tensor(math.nan)}, rf"numbers for {name} that are not finite"),
        "infinite": ({**good, f"{name}.lora_A.weight": down * math.inf}, rf"numbers for {name} that are not finite"),
    }  # fmt: skip
    return [pytest.param(*case, id=name) for name, case in cases.items()]


@pytest.mark.parametrize(("tensors", "message"), lora_errors())
def test_what_does_not_fit_is_listed(
    tensors: dict[str, Tensor], message: str, shapes: dict[str, torch.Size], tmp_path: Path
) -> None:
    path = write(tmp_path / "lora.safetensors", tensors)
    with pytest.raises(ContractError, match=message) as raised:
        read_lora(Lora(path), shapes)
    assert str(path) in str(raised.value)


def test_the_message_says_what_fits(shapes: dict[str, torch.Size], tmp_path: Path) -> None:
    with pytest.raises(ContractError) as raised:
        read_lora(Lora(write(tmp_path / "lora.safetensors", {"x.lora_A.weight": torch.ones(4, 4)})), shapes)
    for name in shapes:
        assert re.sub(r"\.\d+\.", ".N.", name) in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("", "cannot be read"),
        ("[]", "not a JSON object"),
        ('{"lora_alpha": "much"}', "settings .* cannot be read .*much"),
        ('{"lora_alpha": []}', "cannot be read"),
        ('{"alpha_pattern": 3}', "cannot be read"),
        ('{"alpha_pattern": {"(": 3}}', "cannot be read"),
        ('{"init_lora_weights": "pissa_niter_4"}', "started with pissa_niter_4, which changed the weights"),
    ],
)
def test_settings_that_mean_nothing_here_are_refused(
    settings: str, message: str, shapes: dict[str, torch.Size], tmp_path: Path
) -> None:
    tensors = in_style("diffusers", new_halves(shapes, rank=4))
    path = write(tmp_path / "lora.safetensors", tensors, {"lora_adapter_metadata": settings})
    with pytest.raises(ContractError, match=message) as raised:
        read_lora(Lora(path), shapes)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("keep", [0, 5, 100, -4])
def test_a_damaged_file_is_named(keep: int, shapes: dict[str, torch.Size], tmp_path: Path) -> None:
    path = write(tmp_path / "lora.safetensors", in_style("PEFT", new_halves(shapes, rank=4)))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ContractError, match=r"cannot read .*lora\.safetensors .*download it again"):
        read_lora(Lora(path), shapes)


def test_a_missing_file_and_a_folder_are_named(shapes: dict[str, torch.Size], tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.safetensors"):
        with pytest.raises(ContractError, match=f"there is no LoRA file {path}: pass FILE"):
            read_lora(Lora(path), shapes)


def test_nothing_is_written_before_the_loras_are_known_to_fit(tiny_checkpoint: Path, tmp_path: Path) -> None:
    lora = Lora(write(tmp_path / "lora.safetensors", {"x.lora_A.weight": torch.ones(4, 4)}))
    for parts, message in ((["all"], "1 unknown"), (["vae", "host"], r"not among the parts .*: add dit")):
        with pytest.raises(ContractError, match=message):
            export_model_set(tiny_checkpoint, tmp_path / "set", parts, ["256"], loras=[lora])
    assert not (tmp_path / "set").exists()


# Texts.


@pytest.mark.parametrize(
    ("text", "path", "strength"),
    [
        ("a.safetensors", "a.safetensors", 1.0),
        ("a.safetensors:0.5", "a.safetensors", 0.5),
        ("a.safetensors:-1", "a.safetensors", -1.0),
        ("a.safetensors:1e-1", "a.safetensors", 0.1),
        ("/x:y/a.safetensors", "/x:y/a.safetensors", 1.0),
        ("/x:2/a.safetensors", "/x:2/a.safetensors", 1.0),
        (r"C:\loras\a.safetensors", r"C:\loras\a.safetensors", 1.0),
        (r"C:\loras\a.safetensors:.8", r"C:\loras\a.safetensors", 0.8),
        ("a:0.5:1", "a:0.5", 1.0),
        ("a.safetensors:strong", "a.safetensors:strong", 1.0),
        ("a.safetensors:1_0", "a.safetensors:1_0", 1.0),
        ("a.safetensors:nan", "a.safetensors:nan", 1.0),
    ],
)
def test_a_strength_is_a_number_after_the_last_colon(text: str, path: str, strength: float) -> None:
    assert Lora.parse(text) == Lora(Path(path), strength)


@given(st.text(min_size=1).filter(lambda name: "\0" not in name), st.floats(allow_nan=False, allow_infinity=False))
def test_any_name_may_be_given_with_any_strength(name: str, strength: float) -> None:
    assert Lora.parse(f"{name}:{strength}") == Lora(Path(name), strength)


@pytest.mark.parametrize("text", ["a:1e999", "a:-1e999"])
def test_a_strength_must_be_finite(text: str) -> None:
    with pytest.raises(ContractError, match=r"the strength of a is -?inf: choose a finite number"):
        Lora.parse(text)


@given(st.sampled_from(["", "base_model.model.", "transformer.", "diffusion_model."]), st.data())
def test_a_key_is_taken_apart_into_layer_and_half(prefix: str, data: st.DataObject) -> None:
    words = st.from_regex(r"[a-z0-9_]+", fullmatch=True).filter(lambda word: word not in ("transformer", "alpha"))
    layer = ".".join(data.draw(st.lists(words, min_size=1, max_size=5)))
    half, default = data.draw(st.sampled_from(["A", "B", "down", "up"])), data.draw(st.sampled_from(["", ".default"]))
    found = KEY.fullmatch(f"{prefix}{layer}.lora_{half}{default}.weight")
    assert found is not None
    assert (found["layer"], found["half"]) == (layer, half)
    found = KEY.fullmatch(f"{prefix}{layer}.alpha")
    assert found is not None
    assert (found["layer"], found["half"]) == (layer, None)
