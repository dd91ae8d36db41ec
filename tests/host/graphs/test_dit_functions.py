"""The DiT in parts gives what the DiT as a whole gives."""

from collections.abc import Callable

import pytest
import torch
from diffusers import QwenImage21Transformer2DModel
from torch import Tensor, nn

from coreai_rgba_image.host.contract import DIT_FUNCTIONS
from coreai_rgba_image.host.export.model_set import dit_parts
from coreai_rgba_image.host.graphs.dit import DiT, DiTConfig
from coreai_rgba_image.host.graphs.dit_functions import Finish, Head, Step, Tail, TextKeysValues
from coreai_rgba_image.host.rope import rope_tables

IMAGE = ("img_tokens", "timestep", "img_cos", "img_sin")
TEXT = ("txt_feats", "txt_cos", "txt_sin")
BLOCKS = 3


@pytest.fixture(scope="module", params=[BLOCKS, 1], ids=lambda blocks: f"{blocks} blocks")
def dit(request: pytest.FixtureRequest, randomize: Callable[[nn.Module], nn.Module]) -> DiT:
    config = {"num_layers": request.param, "num_attention_heads": 2, "attention_head_dim": 128, "context_in_dim": 96}
    dit = DiT(DiTConfig(**config)).eval()
    dit.load_state_dict(randomize(QwenImage21Transformer2DModel(**config)).state_dict(), strict=True)
    return dit


def inputs_for(text: int = 9, height: int = 6, width: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    rope = {name: torch.from_numpy(table) for name, table in vars(rope_tables(text, height, width)).items()}
    return {
        "img_tokens": torch.randn((1, height * width, 64), generator=generator),
        "txt_feats": torch.randn((1, text, 96), generator=generator) * 3,
        "timestep": torch.tensor([0.7]),
        **rope,
    }


def some(inputs: dict[str, Tensor], names: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: inputs[name] for name in names}


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("size", [(9, 6, 4), (8, 8, 8), (512, 5, 7)])
@torch.no_grad()
def test_a_step_with_the_texts_keys_and_values_is_the_whole_dit(dit: DiT, size: tuple[int, int, int]) -> None:
    inputs = inputs_for(*size)
    keys, values = TextKeysValues(dit)(**some(inputs, TEXT))
    assert keys.shape == values.shape == (dit.config.num_layers, 2, size[0], 128)
    velocity = Step(dit)(**some(inputs, IMAGE), txt_keys=keys, txt_values=values)
    assert difference(velocity, dit(**inputs)) < 1e-5


@torch.no_grad()
def test_head_tail_and_finish_make_a_step(dit: DiT) -> None:
    inputs = inputs_for()
    keys, values = TextKeysValues(dit)(**some(inputs, TEXT))
    common = {**some(inputs, IMAGE[1:]), "txt_keys": keys, "txt_values": values}
    hidden, change = Head(dit)(img_tokens=inputs["img_tokens"], **common)
    assert torch.allclose(hidden - change, dit.project_image(inputs["img_tokens"]), atol=1e-5)
    added = Tail(dit)(hidden=hidden, **common)
    assert bool(added.abs().max() > 0) == (dit.config.num_layers > 1)
    velocity = Finish(dit)(hidden=hidden, added=added, timestep=inputs["timestep"])
    assert difference(velocity, dit(**inputs)) < 1e-5


@pytest.mark.parametrize("other", ["text", "positions", "time"])
@torch.no_grad()
def test_keys_and_values_of_something_else_give_another_velocity(dit: DiT, other: str) -> None:
    """Else the agreement above would show nothing; of the time they do not depend."""
    inputs = inputs_for()
    changed = dict(inputs)
    if other == "text":
        changed["txt_feats"] = inputs["txt_feats"].flip(1)
    elif other == "positions":
        changed["txt_cos"], changed["txt_sin"] = inputs["txt_sin"], inputs["txt_cos"]
    keys, values = TextKeysValues(dit)(**some(changed, TEXT))
    time = torch.tensor([0.3]) if other == "time" else inputs["timestep"]
    velocity = Step(dit)(**{**some(inputs, IMAGE), "timestep": time}, txt_keys=keys, txt_values=values)
    assert difference(velocity, dit(**inputs)) > 1e-3
    if other == "time":
        assert difference(velocity, dit(**{**inputs, "timestep": time})) < 1e-5


def test_every_function_of_the_contract_has_its_module(dit: DiT) -> None:
    parts = dit_parts(dit)
    assert [spec.function for _, spec in parts] == ["main", *(spec.function for spec in DIT_FUNCTIONS)]
    shared = {id(parameter) for parameter in dit.parameters()}
    for module, spec in parts:
        assert {id(parameter) for parameter in module.parameters()} == shared
        dynamic = set(spec.limits)
        named = {size for tensor in (*spec.inputs, *spec.outputs) for size in tensor.shape if isinstance(size, str)}
        assert named == dynamic
        assert spec.computed == set()
