"""The text encoder against transformers' ``Qwen3VLTextModel`` on random weights, in fp32."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3VLTextConfig, Qwen3VLTextModel

from coreai_rgba_image.host.graphs.text_encoder import PRECISIONS, TextEncoder, TextEncoderConfig

VOCABULARY = 300
CONFIGS = [
    {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128, "head_dim": 32},
    {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64, "head_dim": 16},
    {"num_hidden_layers": 5, "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 96, "head_dim": 64},
]
SECTIONS = {32: [6, 5, 5], 16: [4, 2, 2], 64: [12, 10, 10]}
"""How M-RoPE shares the pairs of a head among its three axes; with text alone they hold the same positions."""
LENGTHS = [16, 37, 512]


class Case(NamedTuple):
    ours: TextEncoder
    ids: Tensor
    residual: Tensor
    normed: Tensor


def make_case(randomize: Callable[[nn.Module], nn.Module], shape: dict[str, Any], length: int) -> Case:
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True}
    config = Qwen3VLTextConfig(
        vocab_size=VOCABULARY, intermediate_size=192, **shape,
        rope_parameters={**rope, "mrope_section": SECTIONS[shape["head_dim"]]},
    )  # fmt: skip
    reference = Qwen3VLTextModel(config)
    randomize(reference)
    ours = TextEncoder(TextEncoderConfig.from_json({"text_config": config.to_dict()})).eval()
    ours.load_state_dict(
        {name: value for name, value in reference.state_dict().items() if name != "norm.weight"}, strict=True
    )
    ids = torch.randint(0, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(1))
    seen: list[Tensor] = []
    reference.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        normed = reference(input_ids=ids).last_hidden_state
    return Case(ours, ids.int(), seen[0], normed)


def agrees(hidden: Tensor, residual: Tensor) -> bool:
    return bool((hidden - residual).abs().max() <= 1e-6 * residual.abs().max())


@torch.no_grad()
def run(case: Case) -> Tensor:
    return case.ours(case.ids)


@pytest.fixture(scope="module")
def case(randomize: Callable[[nn.Module], nn.Module]) -> Case:
    return make_case(randomize, CONFIGS[0], 37)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("shape", CONFIGS)
def test_the_residual_stream_before_the_norm_equals_the_references(
    randomize: Callable[[nn.Module], nn.Module], shape: dict[str, Any], length: int
) -> None:
    case = make_case(randomize, shape, length)
    hidden = run(case)
    assert hidden.shape == (1, length, shape["hidden_size"])
    assert case.residual.std() > 0.1
    assert agrees(hidden, case.residual)


def test_the_final_norm_applied_misses_the_bar(case: Case) -> None:
    assert not agrees(case.normed, case.residual)


def test_attention_that_is_not_causal_misses_the_bar(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, is_causal=False: attention(q, k, v))
    assert not agrees(run(case), case.residual)


def test_another_rope_theta_misses_the_bar(case: Case) -> None:
    ours = TextEncoder(replace(case.ours.config, rope_theta=1e4)).eval()
    ours.load_state_dict(case.ours.state_dict())
    assert not agrees(run(case._replace(ours=ours)), case.residual)


def in_precision(case: Case, compute: str) -> Case:
    ours = TextEncoder(case.ours.config, PRECISIONS[compute]).eval()
    ours.load_state_dict(case.ours.state_dict())
    return case._replace(ours=ours)


@pytest.mark.parametrize("compute", ["r32", "bf16"])
def test_bf16_computing_misses_the_bar(case: Case, compute: str) -> None:
    """The reason why the graph computes in fp32 unless told otherwise, whatever its weights are stored in."""
    hidden = run(in_precision(case, compute))
    assert hidden.dtype == torch.float32
    assert not agrees(hidden, case.residual)
    assert (hidden - case.residual).abs().max() <= 0.05 * case.residual.abs().max()


def test_fp32_is_the_default(case: Case) -> None:
    assert torch.equal(run(in_precision(case, "fp32")), run(case))


@pytest.mark.parametrize(
    ("compute", "residual", "branch"),
    [
        ("fp32", torch.float32, torch.float32),
        ("r32", torch.float32, torch.bfloat16),
        ("bf16", torch.bfloat16, torch.bfloat16),
    ],
)
def test_the_residual_stream_and_what_is_beside_it_have_the_dtypes_of_the_precision(
    case: Case, compute: str, residual: torch.dtype, branch: torch.dtype
) -> None:
    case = in_precision(case, compute)
    seen: dict[str, set[torch.dtype]] = {"residual": set(), "branch": set()}
    for layer in case.ours.layers:
        layer.register_forward_hook(
            lambda module, inputs, output: seen["residual"].update({inputs[0].dtype, output.dtype})
        )
        for part in (layer.self_attn, layer.self_attn.o_proj, layer.mlp, layer.mlp.down_proj):
            part.register_forward_hook(
                lambda module, inputs, output: seen["branch"].update({inputs[0].dtype, output.dtype})
            )
    run(case)
    assert seen == {"residual": {residual}, "branch": {branch}}


def test_bf16_weights_compute_in_fp32(randomize: Callable[[nn.Module], nn.Module]) -> None:
    """Weights that bf16 holds exactly give exactly what they give as fp32."""
    wide = make_case(randomize, CONFIGS[0], 37)
    rounded = {name: value.bfloat16() for name, value in wide.ours.state_dict().items()}
    wide.ours.load_state_dict({name: value.float() for name, value in rounded.items()})
    narrow = TextEncoder(wide.ours.config).eval()
    narrow.load_state_dict(rounded, assign=True)
    assert narrow.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert torch.equal(run(wide._replace(ours=narrow)), run(wide))


def test_both_generations_of_config_mean_the_same() -> None:
    shape = {"vocab_size": 9, "intermediate_size": 8, **CONFIGS[0]}
    new = {**shape, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}
    old = {**shape, "rope_theta": 5e6, "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5]}}
    assert TextEncoderConfig.from_json(new) == TextEncoderConfig.from_json({"text_config": old})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_type is 'yarn'"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
    ],
)
def test_a_config_that_is_not_supported_is_refused(changed: dict[str, Any], message: str) -> None:
    shape = {"vocab_size": 9, "intermediate_size": 8, **CONFIGS[0], "rope_parameters": {"rope_theta": 5e6}}
    with pytest.raises(ValueError, match=message):
        TextEncoderConfig.from_json({**shape, **changed})
