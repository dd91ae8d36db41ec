"""Prompt to picture on the real runtime: what is checked, what repeats exactly, what each setting means."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coreai_rgba_image.host import runtime
from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.latents import initial_noise, pack
from coreai_rgba_image.host.model_set import ModelSet
from coreai_rgba_image.host.pipeline import Event, decode, encode_prompt, generate, generate_batch, grid_of
from coreai_rgba_image.host.pixels import to_rgba8
from coreai_rgba_image.host.prompt_cache import DISK_VARIABLE
from coreai_rgba_image.host.sampler import add_noise
from coreai_rgba_image.host.sampling import Sampling, Settings

GRID = (8, 12)
PROMPT = "a red apple on a wooden table"


@pytest.fixture(scope="module")
def model(tiny_set: Path) -> ModelSet:
    return ModelSet(tiny_set)


@pytest.fixture(scope="module")
def positive(model: ModelSet) -> np.ndarray:
    return encode_prompt(model, PROMPT)


@pytest.fixture(scope="module")
def negative(model: ModelSet) -> np.ndarray:
    return encode_prompt(model, "blurry")


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of the bundles that are loaded, in order; no prompt is remembered."""
    monkeypatch.setenv(DISK_VARIABLE, "0")
    kinds: list[str] = []
    load = runtime.load

    def noting(bundle: Any) -> Any:
        kinds.append(bundle.spec.kind)
        return load(bundle)

    monkeypatch.setattr(runtime, "load", noting)
    return kinds


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of the graphs that are called, in order, text_kv left out; no prompt is remembered."""
    monkeypatch.setenv(DISK_VARIABLE, "0")
    kinds: list[str] = []
    call = runtime.LoadedFunction._call

    def noting(function: runtime.LoadedFunction, *arguments: Any) -> Any:
        if function.spec.function != "text_kv":
            kinds.append(function.spec.kind)
        return call(function, *arguments)

    monkeypatch.setattr(runtime.LoadedFunction, "_call", noting)
    return kinds


def sampled(
    model: ModelSet, positive: np.ndarray, noise: np.ndarray, steps: int = 3, cfg: float = 1.0, **others: Any
) -> np.ndarray:
    sampling = Sampling(model, positive, noise, Settings(steps, cfg), **others)
    for _ in sampling.run():
        pass
    return sampling.tokens


def latents(batch: int = 1) -> np.ndarray:
    return np.random.default_rng(5).standard_normal((batch, 64, *GRID), dtype=np.float32)


def test_embeddings_are_those_of_the_prompts_own_tokens(model: ModelSet, positive: np.ndarray) -> None:
    tokens = model.tokenizer.encode(PROMPT)
    assert positive.shape == (1, tokens.text_length, 64)
    with runtime.load(model.text_encoder) as encoder:
        hidden = encoder(input_ids=tokens.ids)["hidden"]
    assert np.array_equal(positive, hidden[:, tokens.drop_idx :])


def test_a_picture_is_the_same_every_time_and_another_for_another_seed(model: ModelSet) -> None:
    told: list[Event] = []
    first = generate(model, PROMPT, 192, 128, Settings(3), seed=7, report=told.append)
    assert (first.dtype, first.shape) == (np.uint8, (128, 192, 4))
    assert told == [
        *(Event("encode", done, 1) for done in range(2)),
        *(Event("sample", done, 3) for done in range(4)),
        Event("decode", 1, 1),
    ]
    assert np.array_equal(generate(model, PROMPT, 192, 128, Settings(3), seed=7), first)
    assert not np.array_equal(generate(model, PROMPT, 192, 128, Settings(3), seed=8), first)


def test_generate_is_its_stages_one_after_another(model: ModelSet, positive: np.ndarray, loaded: list[str]) -> None:
    picture = generate(model, PROMPT, 176, 144, Settings(2), seed=1)
    assert loaded == ["text encoder", "DiT", "VAE decoder"]
    [image] = decode(model, sampled(model, positive, initial_noise(1, 9, 11), steps=2), 9, 11)
    assert image.shape == (1, 4, 144, 176)
    assert np.array_equal(to_rgba8(image)[0], picture)


def test_a_negative_prompt_is_not_computed_at_cfg_1(model: ModelSet, loaded: list[str], called: list[str]) -> None:
    plain = generate(model, PROMPT, 192, 128, Settings(2))
    once = ["text encoder", "DiT", "DiT", "VAE decoder"]
    assert called == once
    assert np.array_equal(generate(model, PROMPT, 192, 128, Settings(2), negative_prompt="blurry"), plain)
    assert called == once * 2
    called.clear()
    loaded.clear()
    guided = generate(model, PROMPT, 192, 128, Settings(2, 3.0), negative_prompt="blurry")
    assert called == ["text encoder"] * 2 + ["DiT"] * 4 + ["VAE decoder"]
    assert loaded == ["text encoder", "DiT", "VAE decoder"]
    assert not np.array_equal(guided, plain)


def test_a_batch_is_its_pictures_one_by_one(model: ModelSet, positive: np.ndarray, negative: np.ndarray) -> None:
    noise = initial_noise(3, *GRID, batch_size=2)
    batch = sampled(model, positive, noise, cfg=2.0, negative=negative)
    singles = [sampled(model, positive, noise[index : index + 1], cfg=2.0, negative=negative) for index in (0, 1)]
    assert np.array_equal(batch, np.concatenate(singles))


def test_each_picture_of_a_batch_may_have_its_own_prompt(model: ModelSet) -> None:
    prompts = [encode_prompt(model, prompt) for prompt in ("a 1", "a 2")]
    noise = initial_noise(3, *GRID, batch_size=2)
    batch = sampled(model, np.concatenate(prompts), noise)
    singles = [sampled(model, prompt, noise[index : index + 1]) for index, prompt in enumerate(prompts)]
    assert np.array_equal(batch, np.concatenate(singles))


def test_steps_are_counted_over_the_batch_and_can_be_left_at_any(model: ModelSet, positive: np.ndarray) -> None:
    sampling = Sampling(model, positive, initial_noise(0, *GRID, batch_size=2), Settings(2))
    assert sampling.total_steps == 4
    run = sampling.run()
    first = next(run)
    assert np.array_equal(sampling.tokens[:1], first.x)
    run.close()
    assert len(list(Sampling(model, positive, initial_noise(0, *GRID, batch_size=2), Settings(2)).run())) == 4


def test_sampling_starts_from_the_latents_below_denoise_1(model: ModelSet, positive: np.ndarray) -> None:
    noise = initial_noise(0, *GRID)
    sampling = Sampling(model, positive, noise, Settings(4), latents=latents(), denoise=0.5)
    start = add_noise(pack(latents()), pack(noise), sampling.schedule.sigmas[0])
    assert sampling.schedule.steps == 4
    assert 0 < sampling.schedule.sigmas[0] < 1
    assert np.array_equal(sampling.tokens, start)


def test_latents_do_not_matter_at_denoise_1_and_are_all_there_is_at_0(model: ModelSet, positive: np.ndarray) -> None:
    noise = initial_noise(0, *GRID)
    assert np.array_equal(sampled(model, positive, noise, latents=latents()), sampled(model, positive, noise))
    assert np.array_equal(sampled(model, positive, noise, latents=latents(), denoise=0.0), pack(latents()))


def test_a_mask_keeps_what_it_excludes(model: ModelSet, positive: np.ndarray) -> None:
    noise, mask = initial_noise(0, *GRID), np.zeros((1, 1, *GRID), dtype=np.float32)
    mask[..., :6] = 1
    tokens = sampled(model, positive, noise, latents=latents(), mask=mask)
    kept = mask.reshape(-1) == 0
    assert np.array_equal(tokens[:, kept], pack(latents())[:, kept])
    assert (tokens[:, ~kept] != pack(latents())[:, ~kept]).mean() > 0.99


def test_a_sets_own_scheduler_settings_are_followed(model: ModelSet, positive: np.ndarray, tmp_path: Path) -> None:
    for entry in model.path.iterdir():
        if entry.name != "host":
            (tmp_path / entry.name).symlink_to(entry)
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "scheduler.json").write_text('{"shift_terminal": 0.2}', encoding="utf-8")
    other = Sampling(ModelSet(tmp_path), positive, initial_noise(0, *GRID), Settings(3))
    assert other.schedule.sigmas[-2] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps is 0: it must be from 1 to 10000"),
        ({"steps": 10_001}, "steps is 10001"),
        ({"cfg": float("nan")}, "cfg is nan: it must be a finite number"),
        ({"sampler": "ddim"}, "there is no sampler 'ddim': choose one of euler, adams_bashforth_2m, dpmpp_2m"),
        ({"schedule": "karras"}, "there is no schedule 'karras': choose one of model"),
        ({"sigmas": np.linspace(1, 0, 10_002)}, "steps is 10001"),
        ({"sigmas": [0.5, 0.8]}, "number 2 of sigmas is 0.8 after 0.5"),
    ],
)
def test_settings_that_no_model_could_follow_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        Settings(**settings)


def test_sigmas_take_the_place_of_schedule_and_steps(model: ModelSet, positive: np.ndarray) -> None:
    sampling = Sampling(model, positive, initial_noise(0, *GRID), Settings(sigmas=[1.0, 0.7, 0.3]))
    assert sampling.schedule.sigmas.tolist() == pytest.approx([1.0, 0.7, 0.3, 0.0])
    assert sampling.total_steps == 3


def test_steps_that_are_not_given_are_the_schedules_own(model: ModelSet, positive: np.ndarray) -> None:
    noise = initial_noise(0, *GRID)
    assert Sampling(model, positive, noise).total_steps == 40
    assert Sampling(model, positive, noise, Settings(schedule="viggle-turbo-6")).total_steps == 6


def test_another_sampler_follows_the_same_flow(model: ModelSet, positive: np.ndarray) -> None:
    noise = initial_noise(0, *GRID)
    euler, multistep = (
        list(Sampling(model, positive, noise, Settings(4, sampler=name)).run()) for name in ("euler", "dpmpp_2m")
    )
    assert np.array_equal(euler[0].x, multistep[0].x)
    assert not np.array_equal(euler[-1].x, multistep[-1].x)


def test_seeds_of_one_prompt_give_the_pictures_of_single_runs(
    model: ModelSet, loaded: list[str], called: list[str]
) -> None:
    settings = Settings(3, 2.0)
    batch = list(generate_batch(model, PROMPT, 192, 128, settings, seeds=[4, 9, 2, 7], negative_prompt="blurry"))
    assert called == ["text encoder"] * 2 + (["DiT"] * 6 + ["VAE decoder"]) * 4
    assert loaded == ["text encoder", "DiT", *["VAE decoder"] * 4]
    for seed, picture in zip([4, 9, 2, 7], batch, strict=True):
        single = generate(model, PROMPT, 192, 128, settings, seed=seed, negative_prompt="blurry")
        assert np.array_equal(picture, single)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"settings": Settings(cfg=2.0)}, "no negative prompt to guide away from"),
        ({"settings": Settings(9, schedule="viggle-turbo-6")}, "9"),
        ({"settings": Settings(sigmas=[1.0, 0.5]), "denoise": 0.5}, "denoise is 0.5, but the first of the sigmas"),
        ({"denoise": 1.5}, "denoise is 1.5"),
        (
            {"positive": np.zeros((1, 9, 63), np.float32)},
            r"positive conditioning has shape \[1, 9, 63\].* \[1, L, 64\]",
        ),
        ({"positive": np.zeros((9, 64), np.float32)}, "positive conditioning has shape"),
        ({"positive": np.zeros((2, 9, 64), np.float32)}, "positive conditioning has shape"),
        ({"positive": np.zeros((1, 7, 64), np.float32)}, r"positive conditioning has 7 tokens, the DiT takes 8\.\.512"),
        ({"positive": np.zeros((1, 513, 64), np.float32)}, "has 513 tokens"),
        (
            {"settings": Settings(cfg=2.0), "negative": np.zeros((1, 9, 32), np.float32)},
            "negative conditioning has shape",
        ),
        ({"latents": np.zeros((1, 64, 8, 8), np.float32)}, "latents are"),
        ({"mask": np.zeros((1, 1, 4, 4), np.float32)}, "mask"),
        ({"mask": np.zeros((2, 1, *GRID), np.float32)}, "mask"),
        ({"noise": np.zeros((1, 64, 1, 8, 12), np.float32)}, r"pass \[B, 64, h, w\]"),
        ({"noise": np.zeros((1, 16, 8, 12), np.float32)}, r"pass \[B, 64, h, w\]"),
        (
            {"noise": np.zeros((1, 64, 7, 9), np.float32)},
            r"144x112 pixels has 63 image tokens: the DiT takes 64\.\.4096",
        ),
        ({"noise": np.zeros((1, 64, 65, 64), np.float32)}, "4160 image tokens"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_is_loaded(
    model: ModelSet, positive: np.ndarray, loaded: list[str], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ContractError, match=message):
        Sampling(**{"model": model, "positive": positive, "noise": initial_noise(0, *GRID), **settings})
    assert loaded == []


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (lambda model: generate(model, PROMPT, 128, 192), "no VAE decoder for 128x192 pixels"),
        (lambda model: generate(model, PROMPT, 200, 128), "the width is 200 pixels: .* 192 or 208 for instance"),
        (lambda model: generate(model, PROMPT, 192, 8), "the height is 8 pixels: .* 16 or 32 for instance"),
        (lambda model: generate(model, PROMPT, 2048, 2048), "16384 image tokens"),
        (lambda model: generate(model, PROMPT, 192, 128, seed=-1), "the seed is -1"),
        (lambda model: generate(model, "7" * 600, 192, 128), "cut .* tokens"),
        (
            lambda model: generate(model, PROMPT, 192, 128, Settings(cfg=2.0), negative_prompt="7" * 600),
            "limit is 512: cut",
        ),
        (lambda model: generate(model, PROMPT, 192, 128, Settings(cfg=2.0)), "no negative prompt to guide away from"),
        (lambda model: generate(model, PROMPT, 192, 128, Settings(9, schedule="viggle-turbo-6")), "9"),
    ],
)
def test_generate_finds_what_is_wrong_before_it_loads_anything(
    model: ModelSet, loaded: list[str], request_: Callable[[ModelSet], np.ndarray], message: str
) -> None:
    with pytest.raises(ContractError, match=message):
        request_(model)
    assert loaded == []


def test_generate_misses_a_bundle_before_it_loads_another(model: ModelSet, loaded: list[str], tmp_path: Path) -> None:
    for entry in model.path.iterdir():
        if "dit" not in entry.name:
            (tmp_path / entry.name).symlink_to(entry)
    with pytest.raises(ContractError, match="holds no DiT bundle"):
        generate(ModelSet(tmp_path), PROMPT, 192, 128)
    assert loaded == []


@pytest.mark.parametrize("tiled", [False, True])
def test_a_set_without_a_decoder_is_refused_with_and_without_tiles(
    model: ModelSet, loaded: list[str], tmp_path: Path, tiled: bool
) -> None:
    for entry in model.path.iterdir():
        if "vae" not in entry.name:
            (tmp_path / entry.name).symlink_to(entry)
    with pytest.raises(ContractError, match=r"no VAE decoder for 192x128 pixels.*it has: none"):
        generate(ModelSet(tmp_path), PROMPT, 192, 128, tiled=tiled)
    assert loaded == []


def test_a_grid_is_height_before_width() -> None:
    assert grid_of(width=192, height=128) == (8, 12)
