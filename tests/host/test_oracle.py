"""End to end: diffusers' own pipeline against ours, same checkpoint, prompt and seed, everything in fp32.

The reference runs the checkpoint; ours runs bundles exported from it, on the real runtime. The
reference takes multiples of 32 pixels only, so its latent grids are always even; odd grids are
compared part by part in the other tests.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coreai_rgba_image.host.latents import initial_noise, to_vae_space
from coreai_rgba_image.host.model_set import ModelSet
from coreai_rgba_image.host.pipeline import decode, encode_prompt
from coreai_rgba_image.host.pixels import composite, to_rgba8
from coreai_rgba_image.host.prompt import PromptTokenizer, PromptTokens
from coreai_rgba_image.host.sampling import Sampling, Settings

pytestmark = pytest.mark.slow

STICKER = "A cute cartoon dragon sticker with a transparent background, {thick} outline"


@dataclass(frozen=True)
class Setting:
    width: int
    height: int
    steps: int
    seed: int = 1234
    prompt: str = "a red apple on a wooden table, studio lighting"
    negative: str | None = None
    cfg: float = 1.0


SETTINGS = {
    "square": Setting(256, 256, 12),
    "not square, 40 steps": Setting(192, 128, 40, seed=42, prompt=STICKER),
    "guided, not square": Setting(
        192, 128, 10, seed=2**64 - 1, prompt=STICKER, negative="blurry, low quality", cfg=4.0
    ),
    "guided by an empty negative": Setting(192, 128, 6, seed=0, negative="", cfg=2.5),
}


@dataclass(frozen=True)
class Result:
    """What a run made: tokens ``[1, N, 64]`` after the last step, bytes ``[1, H, W, 4]``, and its sigmas."""

    tokens: np.ndarray
    rgba8: np.ndarray
    sigmas: np.ndarray

    def correlation(self, other: "Result") -> float:
        return float(np.corrcoef(self.tokens.ravel(), other.tokens.ravel())[0, 1])

    def decibels(self, other: "Result") -> float:
        """PSNR of RGB on white; infinite where both are the same."""
        error = composite(self.rgba8).astype(np.float64) - composite(other.rgba8)
        return float(10 * np.log10(255**2 / max((error**2).mean(), 1e-12)))

    def alpha_levels(self, other: "Result") -> int:
        return int(np.abs(self.rgba8[..., 3].astype(int) - other.rgba8[..., 3]).max())

    def passes(self, other: "Result") -> bool:
        return self.correlation(other) >= 0.99999 and self.decibels(other) >= 60 and self.alpha_levels(other) <= 1


def reference(pipeline: Any, setting: Setting) -> Result:
    final: dict[str, torch.Tensor] = {}

    def keep(pipe: Any, step: int, time: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        final.update(tensors)
        return tensors

    [image] = pipeline(
        setting.prompt, negative_prompt=setting.negative, true_cfg_scale=setting.cfg,
        width=setting.width, height=setting.height, num_inference_steps=setting.steps,
        generator=torch.Generator("cpu").manual_seed(setting.seed), callback_on_step_end=keep,
    ).images  # fmt: skip
    assert image.mode == "RGBA"
    return Result(final["latents"].numpy(), np.asarray(image)[None], pipeline.scheduler.sigmas.numpy())


def ours(path: Path, setting: Setting) -> Result:
    model, grid = ModelSet(path), (setting.height // 16, setting.width // 16)
    positive = encode_prompt(model, setting.prompt)
    negative = None if setting.negative is None else encode_prompt(model, setting.negative)
    noise = initial_noise(setting.seed, *grid)
    sampling = Sampling(model, positive, noise, Settings(setting.steps, setting.cfg), negative=negative)
    list(sampling.run())
    [image] = decode(model, sampling.tokens, *grid)
    return Result(sampling.tokens, to_rgba8(image), sampling.schedule.sigmas)


@pytest.fixture(scope="module", params=SETTINGS.values(), ids=SETTINGS.keys())
def setting(request: pytest.FixtureRequest) -> Setting:
    return request.param


@pytest.fixture(scope="module")
def expected(reference_pipeline: Any, setting: Setting) -> Result:
    return reference(reference_pipeline, setting)


@pytest.fixture(scope="module")
def found(tiny_set: Path, setting: Setting) -> Result:
    return ours(tiny_set, setting)


def test_sigmas_are_equal(found: Result, expected: Result, setting: Setting) -> None:
    assert len(expected.sigmas) == setting.steps + 1
    assert np.array_equal(found.sigmas, expected.sigmas)


def test_latents_and_pictures_agree(found: Result, expected: Result, setting: Setting) -> None:
    assert expected.rgba8.shape == found.rgba8.shape == (1, setting.height, setting.width, 4)
    assert expected.rgba8[..., 3].std() > 10
    assert composite(expected.rgba8).std() > 10
    assert found.correlation(expected) >= 0.99999
    assert found.decibels(expected) >= 60
    assert found.alpha_levels(expected) <= 1


def test_latents_agree_much_closer_than_the_bar(found: Result, expected: Result) -> None:
    """A tiny model hardly hears its prompt, so correlation alone would overlook a small mistake."""
    difference = np.abs(found.tokens - expected.tokens).max()
    assert difference <= 1e-5 * np.abs(expected.tokens).max()


@pytest.mark.parametrize("prompt", [setting.prompt for setting in SETTINGS.values()] + ["", "🍎\r\n一只 {}"])
def test_ids_and_embeddings_are_equal(tiny_set: Path, reference_pipeline: Any, prompt: str) -> None:
    model = ModelSet(tiny_set)
    tokens = model.tokenizer.encode(prompt)
    text = reference_pipeline.prompt_template_t2i.format(prompt or " ")
    assert tokens.ids.tolist() == reference_pipeline.processor(text=[text]).input_ids
    assert tokens.drop_idx == reference_pipeline._drop_idx
    with torch.no_grad():
        embeddings = reference_pipeline.encode_prompt(prompt)[0].numpy()
    difference = np.abs(encode_prompt(model, prompt) - embeddings).max()
    assert difference <= 1e-4 * np.abs(embeddings).max()


CONTROL = SETTINGS["guided, not square"]


@pytest.fixture(scope="module")
def control(reference_pipeline: Any) -> Result:
    return reference(reference_pipeline, CONTROL)


@pytest.mark.parametrize(
    "changed", [{"seed": 43}, {"cfg": 6.0}, {"cfg": 1.0}, {"steps": 11}, {"negative": "blurry"}, {"prompt": "an apple"}]
)
def test_another_setting_misses_the_bar(tiny_set: Path, control: Result, changed: dict[str, Any]) -> None:
    assert not ours(tiny_set, replace(CONTROL, **changed)).passes(control)


def test_one_token_dropped_too_many_misses_the_bar(
    tiny_set: Path, control: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = PromptTokenizer.encode

    def shifted(tokenizer: PromptTokenizer, prompt: str) -> PromptTokens:
        tokens = encode(tokenizer, prompt)
        return replace(tokens, drop_idx=tokens.drop_idx + 1)

    monkeypatch.setattr(PromptTokenizer, "encode", shifted)
    assert not ours(tiny_set, CONTROL).passes(control)


def test_latents_un_normalised_twice_miss_the_bar(tiny_set: Path, control: Result) -> None:
    good = ours(tiny_set, CONTROL)
    [image] = decode(ModelSet(tiny_set), to_vae_space(good.tokens), CONTROL.height // 16, CONTROL.width // 16)
    assert good.passes(control)
    assert not replace(good, rgba8=to_rgba8(image)).passes(control)
