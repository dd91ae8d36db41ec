"""The denoising loop, bit for bit diffusers' scheduler, and its promises to the caller."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.sampler import Denoiser, Inpainting, add_noise, sample_euler, with_guidance
from coreai_rgba_image.host.schedule import flow_match_schedule, partial_schedule

TOKENS = 96


def random_tokens(seed: int, batch: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((batch, TOKENS, 64), dtype=np.float32)


def recorded(velocities: Iterator[np.ndarray]) -> Denoiser:
    return lambda x, timestep: next(velocities)


def rotating(x: np.ndarray, timestep: np.ndarray) -> np.ndarray:
    """A velocity that depends on the tokens and the time."""
    return np.tanh(np.roll(x, 1, axis=2)) * (1 + timestep)


@pytest.mark.parametrize("steps", [1, 2, 7, 40])
def test_steps_equal_the_references_bit_for_bit(steps: int) -> None:
    schedule = flow_match_schedule(steps, TOKENS)
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=np.ones(steps))
    scheduler.sigmas, scheduler.timesteps = torch.from_numpy(schedule.sigmas), torch.from_numpy(schedule.timesteps)
    scheduler.set_begin_index(0)
    velocities = [random_tokens(seed) * (1 + seed) for seed in range(1, steps + 1)]

    expected = torch.from_numpy(random_tokens(0))
    sampled = sample_euler(recorded(iter(velocities)), random_tokens(0), schedule)
    for velocity, timestep, step in zip(velocities, scheduler.timesteps, sampled, strict=True):
        expected = scheduler.step(torch.from_numpy(velocity), timestep, expected, return_dict=False)[0]
        assert step.x.dtype == np.float32
        assert np.array_equal(step.x, expected.numpy())


def test_40_steps_under_the_published_schedule_equal_the_references_end_to_end() -> None:
    from diffusers.pipelines.qwenimage21.pipeline_qwenimage21 import calculate_shift

    scheduler = FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256, max_image_seq_len=8192, base_shift=0.5, max_shift=0.9, shift_terminal=0.02,
        use_dynamic_shifting=True,
    )  # fmt: skip
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / 40, 40), mu=calculate_shift(TOKENS, 256, 8192, 0.5, 0.9))
    expected, seen = torch.from_numpy(random_tokens(0)), []
    for timestep in scheduler.timesteps:
        seen.append((timestep.expand(1) / 1000).numpy())
        velocity = torch.from_numpy(rotating(expected.numpy(), seen[-1]))
        expected = scheduler.step(velocity, timestep, expected, return_dict=False)[0]

    times: list[np.ndarray] = []

    def denoise(x: np.ndarray, timestep: np.ndarray) -> np.ndarray:
        times.append(timestep)
        return rotating(x, timestep)

    *_, last = sample_euler(denoise, random_tokens(0), flow_match_schedule(40, TOKENS))
    assert np.array_equal(last.x, expected.numpy())
    assert (times[0].shape, times[0].dtype) == ((1,), np.float32)
    assert np.array_equal(times, seen)


def test_every_step_points_at_the_picture_it_heads_for() -> None:
    schedule = flow_match_schedule(4, TOKENS)
    data, noise = random_tokens(1), random_tokens(2)
    steps = list(sample_euler(lambda x, t: noise - data, noise, schedule))
    assert [(step.index, step.total) for step in steps] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    for step in steps:
        assert np.allclose(step.denoised, data, atol=1e-5)
    assert np.allclose(steps[-1].x, data, atol=1e-5)


def test_the_first_step_of_one_lands_on_noise_minus_velocity() -> None:
    [step] = sample_euler(lambda x, t: random_tokens(1), random_tokens(0), flow_match_schedule(1, TOKENS))
    assert np.array_equal(step.x, random_tokens(0) - random_tokens(1))
    assert np.array_equal(step.x, step.denoised)


def test_the_denoiser_is_called_once_for_each_step_asked_for() -> None:
    calls: list[float] = []

    def denoise(x: np.ndarray, timestep: np.ndarray) -> np.ndarray:
        calls.append(timestep.item())
        return x

    loop = sample_euler(denoise, random_tokens(0), flow_match_schedule(5, TOKENS))
    assert calls == []
    for expected in range(1, 6):
        next(loop)
        assert len(calls) == expected
    assert next(loop, None) is None
    assert len(calls) == 5


def test_the_callers_arrays_stay_as_they_are() -> None:
    start = random_tokens(0)
    list(sample_euler(rotating, start, flow_match_schedule(3, TOKENS), None))
    assert np.array_equal(start, random_tokens(0))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("bad", [1, 3, 5])
def test_a_velocity_that_is_not_finite_stops_the_loop_and_names_the_step(value: float, bad: int) -> None:
    velocities = [random_tokens(seed) for seed in range(5)]
    velocities[bad - 1][0, 3, :2] = value
    loop = sample_euler(recorded(iter(velocities)), random_tokens(9), flow_match_schedule(5, TOKENS))
    for _ in range(bad - 1):
        next(loop)
    with pytest.raises(ContractError, match=rf"step {bad} of 5 is not finite \(2 of {TOKENS * 64} values\)"):
        next(loop)


@settings(deadline=None, max_examples=30)
@given(st.floats(-20, 20, width=32))
def test_guidance_is_the_references_formula_bit_for_bit(cfg: float) -> None:
    positive, negative = random_tokens(1), random_tokens(2)
    there, away = torch.from_numpy(positive), torch.from_numpy(negative)
    guided = with_guidance(lambda x, t: positive, lambda x, t: negative, cfg)
    velocity = guided(random_tokens(0), np.array([0.5], dtype=np.float32))
    assert velocity.dtype == np.float32
    assert np.array_equal(velocity, (away + cfg * (there - away)).numpy())


def test_guidance_shows_both_denoisers_the_same_tokens_and_time() -> None:
    seen = []

    def denoise(x: np.ndarray, timestep: np.ndarray) -> np.ndarray:
        seen.append((x, timestep))
        return x

    with_guidance(denoise, denoise, 4.0)(random_tokens(0), np.array([0.5], dtype=np.float32))
    assert len(seen) == 2
    assert seen[0][0] is seen[1][0]
    assert seen[0][1] is seen[1][1]


def test_noise_level_1_is_the_noise_and_0_the_latents() -> None:
    latents, noise = random_tokens(1), random_tokens(2)
    assert np.array_equal(add_noise(latents, noise, np.float32(1)), noise)
    assert np.array_equal(add_noise(latents, noise, np.float32(0)), latents)
    halfway = add_noise(latents, noise, np.float32(0.5))
    assert halfway.dtype == np.float32
    assert np.array_equal(halfway, np.float32(0.5) * noise + np.float32(0.5) * latents)


def test_inpainting_keeps_what_the_mask_excludes_exactly() -> None:
    latents, noise, schedule = random_tokens(1), random_tokens(2), partial_schedule(6, 0.5, TOKENS)
    mask = np.zeros((1, TOKENS, 1), dtype=np.float32)
    mask[:, TOKENS // 2 :] = 1
    start = add_noise(latents, noise, schedule.sigmas[0])
    steps = list(sample_euler(rotating, start, schedule, Inpainting(mask, latents, noise)))
    for step, sigma in zip(steps, schedule.sigmas[1:], strict=True):
        kept = add_noise(latents, noise, sigma)[:, : TOKENS // 2]
        assert np.array_equal(step.x[:, : TOKENS // 2], kept)
    assert np.array_equal(steps[-1].x[:, : TOKENS // 2], latents[:, : TOKENS // 2])
    changed = steps[-1].x[:, TOKENS // 2 :] != latents[:, TOKENS // 2 :]
    assert changed.mean() > 0.99


def test_inpainting_everything_is_no_inpainting_and_nothing_gives_the_latents_back() -> None:
    latents, noise, schedule = random_tokens(1), random_tokens(2), flow_match_schedule(5, TOKENS)
    *_, plain = sample_euler(rotating, noise, schedule)
    for value, expected in ((1, plain.x), (0, latents)):
        mask = np.full((1, TOKENS, 1), value, dtype=np.float32)
        *_, last = sample_euler(rotating, noise, schedule, Inpainting(mask, latents, noise))
        assert np.array_equal(last.x, expected)
