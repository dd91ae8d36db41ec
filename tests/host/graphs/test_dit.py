"""The DiT against diffusers' ``QwenImage21Transformer2DModel`` on random weights, in fp32."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from diffusers import QwenImage21Transformer2DModel
from torch import Tensor, nn
from torch.nn import functional as F

from coreai_rgba_image.host.graphs.dit import DiT, DiTConfig
from coreai_rgba_image.host.rope import rope_tables

SMALL = {"num_layers": 2, "num_attention_heads": 2, "context_in_dim": 96}
CONFIGS = [
    {**SMALL},
    {"num_layers": 4, "num_attention_heads": 1, "context_in_dim": 64, "mlp_ratio": 2},
    {"num_layers": 1, "num_attention_heads": 3, "context_in_dim": 160, "mlp_ratio": 4, "eps": 1e-5},
]
SIZES = [(8, 8, 8), (9, 6, 4), (33, 16, 16), (512, 5, 8), (18, 9, 4)]
"""Text length, grid height and width. The reference takes grids of a multiple of four tokens."""


class Case(NamedTuple):
    ours: DiT
    inputs: dict[str, Tensor]
    reference: Tensor


Pair = tuple[QwenImage21Transformer2DModel, DiT]


def make_pair(randomize: Callable[[nn.Module], nn.Module], config: dict[str, Any]) -> Pair:
    """The reference and our graph with the same random weights."""
    reference = QwenImage21Transformer2DModel(attention_head_dim=128, **config)
    randomize(reference)
    ours = DiT(DiTConfig.from_json(dict(reference.config))).eval()
    ours.load_state_dict(reference.state_dict(), strict=True)
    return reference, ours


def make_case(pair: Pair, size: tuple[int, int, int], time: float = 0.7) -> Case:
    """The same random inputs for both, and what the reference makes of them."""
    reference, ours = pair
    text, height, width = size
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn((1, height * width, 64), generator=generator)
    features = torch.randn((1, text, reference.config.context_in_dim), generator=generator) * 3
    timestep = torch.tensor([time])
    slots = torch.arange(text + height * width // 4)[None] >= text
    with torch.no_grad():
        expected = reference(tokens, features, timestep, [[(1, height, width)]], slots, return_dict=False)[0]
    rope = {name: torch.from_numpy(table) for name, table in vars(rope_tables(text, height, width)).items()}
    inputs = {"img_tokens": tokens, "txt_feats": features, "timestep": timestep, **rope}
    return Case(ours, inputs, expected[:, -height * width :])


def agrees(velocity: Tensor, reference: Tensor) -> bool:
    difference = (velocity - reference).abs().max() / reference.abs().max()
    correlation = torch.corrcoef(torch.stack((velocity.double().flatten(), reference.double().flatten())))[0, 1]
    return bool(difference <= 1e-4 and correlation >= 0.999999)


@torch.no_grad()
def run(ours: DiT, inputs: dict[str, Tensor]) -> Tensor:
    return ours(**inputs)


@pytest.fixture(scope="module", params=CONFIGS, ids=str)
def pair(request: pytest.FixtureRequest, randomize: Callable[[nn.Module], nn.Module]) -> Pair:
    return make_pair(randomize, request.param)


@pytest.fixture(scope="module")
def case(randomize: Callable[[nn.Module], nn.Module]) -> Case:
    return make_case(make_pair(randomize, SMALL), (9, 6, 4))


@pytest.mark.parametrize("size", SIZES)
def test_velocities_equal_the_references(pair: Pair, size: tuple[int, int, int]) -> None:
    ours, inputs, reference = make_case(pair, size)
    velocity = run(ours, inputs)
    assert velocity.dtype == torch.float32
    assert velocity.shape == (1, size[1] * size[2], 64)
    assert reference.std() > 0.1
    assert agrees(velocity, reference)


@pytest.mark.parametrize("time", [0.0, 0.02, 0.3, 1.0])
def test_velocities_equal_the_references_at_any_time(pair: Pair, time: float) -> None:
    ours, inputs, reference = make_case(pair, (9, 6, 4), time)
    assert agrees(run(ours, inputs), reference)


def modulate_at(timestep: Tensor, ours: DiT, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modulate text and image alike, from the same time."""
    modulate, embedding = ours.modulate, ours.embed_timestep(timestep)
    monkeypatch.setattr(ours, "modulate", lambda _: modulate(embedding))


def test_image_tokens_modulated_from_0_miss_the_bar(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    modulate_at(torch.zeros(1), case.ours, monkeypatch)
    assert not agrees(run(case.ours, case.inputs), case.reference)


def test_text_tokens_modulated_from_t_miss_the_bar(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    modulate_at(case.inputs["timestep"], case.ours, monkeypatch)
    assert not agrees(run(case.ours, case.inputs), case.reference)


def test_text_attention_that_is_not_causal_misses_the_bar(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, is_causal=False: attention(q, k, v))
    assert not agrees(run(case.ours, case.inputs), case.reference)


def test_two_rope_axes_swapped_miss_the_bar(case: Case) -> None:
    def swapped(table: Tensor) -> Tensor:
        frame, height, width = table.split((8, 28, 28), dim=-1)
        return torch.cat((frame, width, height), dim=-1)

    inputs = {**case.inputs, **{name: swapped(case.inputs[name]) for name in ("img_cos", "img_sin")}}
    assert not agrees(run(case.ours, inputs), case.reference)


def test_rope_of_another_text_length_misses_the_bar(case: Case) -> None:
    longer = {name: torch.from_numpy(table) for name, table in vars(rope_tables(10, 6, 4)).items()}
    inputs = {**case.inputs, "img_cos": longer["img_cos"], "img_sin": longer["img_sin"]}
    assert not agrees(run(case.ours, inputs), case.reference)


def test_a_time_that_is_not_divided_by_1000_misses_the_bar(case: Case) -> None:
    assert not agrees(run(case.ours, {**case.inputs, "timestep": torch.tensor([700.0])}), case.reference)


def test_text_tokens_do_not_see_the_image_nor_later_text(case: Case) -> None:
    """A change of the last text token may change image tokens but no earlier text token."""
    hidden: list[Tensor] = []
    hook = case.ours.transformer_blocks[-1].register_forward_hook(lambda module, args, output: hidden.append(output))
    changed = case.inputs["txt_feats"].clone()
    changed[:, -1] += 1
    try:
        run(case.ours, case.inputs)
        run(case.ours, {**case.inputs, "img_tokens": case.inputs["img_tokens"] + 1})
        run(case.ours, {**case.inputs, "txt_feats": changed})
    finally:
        hook.remove()
    plain, other_image, other_text = hidden
    assert torch.equal(plain[:, :9], other_image[:, :9])
    assert torch.equal(plain[:, :8], other_text[:, :8])
    assert not torch.allclose(plain[:, 9:], other_text[:, 9:])


def test_bf16_computing_stays_near_the_reference(case: Case) -> None:
    ours = DiT(case.ours.config, torch.bfloat16)
    ours.load_state_dict({name: value.bfloat16() for name, value in case.ours.state_dict().items()}, assign=True)
    velocity = run(ours, case.inputs)
    assert velocity.dtype == torch.float32
    difference = (velocity - case.reference).abs().max() / case.reference.abs().max()
    assert 1e-4 < difference < 0.1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"causal_condition": False}, "causal_condition is false"),
        ({"patch_size": 2}, "patch_size is 2"),
        ({"axes_dims_rope": [16, 56, 48]}, "add up to 120, not to attention_head_dim 128"),
    ],
)
def test_a_config_that_is_not_supported_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DiTConfig.from_json({"attention_head_dim": 128, **SMALL, **changed})
