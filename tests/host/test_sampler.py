"""The denoising loop, bit for bit diffusers' scheduler, and its promises to the caller."""

import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.sampler import (
    SAMPLERS,
    AdamsBashforth,
    Denoiser,
    Inpainting,
    add_noise,
    check_sampler,
    sample,
    with_guidance,
)
from coreai_rgba_image.host.schedule import (
    Schedule,
    SchedulerConfig,
    flow_match_schedule,
    named_config,
    partial_schedule,
    schedule_from_sigmas,
)

TOKENS = 96

SHORT = flow_match_schedule(5, TOKENS)


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
    sampled = sample(recorded(iter(velocities)), random_tokens(0), schedule)
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

    *_, last = sample(denoise, random_tokens(0), flow_match_schedule(40, TOKENS))
    assert np.array_equal(last.x, expected.numpy())
    assert (times[0].shape, times[0].dtype) == ((1,), np.float32)
    assert np.array_equal(times, seen)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_step_points_at_the_picture_it_heads_for(sampler: str) -> None:
    schedule = flow_match_schedule(4, TOKENS)
    data, noise = random_tokens(1), random_tokens(2)
    steps = list(sample(lambda x, t: noise - data, noise, schedule, sampler=sampler))
    assert [(step.index, step.total) for step in steps] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    for step in steps:
        assert np.allclose(step.denoised, data, atol=1e-5)
    assert np.allclose(steps[-1].x, data, atol=1e-5)


def test_the_first_step_of_one_lands_on_noise_minus_velocity() -> None:
    [step] = sample(lambda x, t: random_tokens(1), random_tokens(0), flow_match_schedule(1, TOKENS))
    assert np.array_equal(step.x, random_tokens(0) - random_tokens(1))
    assert np.array_equal(step.x, step.denoised)


def test_the_denoiser_is_called_once_for_each_step_asked_for() -> None:
    calls: list[float] = []

    def denoise(x: np.ndarray, timestep: np.ndarray) -> np.ndarray:
        calls.append(timestep.item())
        return x

    loop = sample(denoise, random_tokens(0), flow_match_schedule(5, TOKENS))
    assert calls == []
    for expected in range(1, 6):
        next(loop)
        assert len(calls) == expected
    assert next(loop, None) is None
    assert len(calls) == 5


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_callers_arrays_stay_as_they_are(sampler: str) -> None:
    start = random_tokens(0)
    list(sample(rotating, start, SHORT, sampler=sampler))
    assert np.array_equal(start, random_tokens(0))


def exact(sigma: float, mean: float, std: float) -> np.ndarray:
    """Where the flow from noise to data ~ N(mean, std²) takes the tokens ``random_tokens(0)``.

    At sigma it is N((1 - sigma) mean, (1 - sigma)² std² + sigma²), and a path keeps its place in it.
    """
    return np.float32((1 - sigma) * mean + np.hypot((1 - sigma) * std, sigma) * random_tokens(0))


def gaussian_flow(mean: float, std: float) -> Denoiser:
    """The velocity of that flow, ``E[noise - data | x]``."""

    def velocity(x: np.ndarray, timestep: np.ndarray) -> np.ndarray:
        sigma = timestep.item()
        variance = ((1 - sigma) * std) ** 2 + sigma**2
        return (sigma - (1 - sigma) * std**2) / variance * (x - (1 - sigma) * mean) - mean

    return velocity


def errors(schedule: Schedule, mean: float, std: float) -> dict[str, np.ndarray]:
    """RMS distance from the exact solution after each step, by sampler, ``[steps]``."""
    start = exact(float(schedule.sigmas[0]), mean, std)
    expected = [exact(float(sigma), mean, std) for sigma in schedule.sigmas[1:]]
    results = {}
    for name in SAMPLERS:
        made = [step.x for step in sample(gaussian_flow(mean, std), start, schedule, sampler=name)]
        assert all(x.dtype == np.float32 for x in made)
        results[name] = np.sqrt(np.mean(np.square(np.subtract(made, expected, dtype=np.float64)), axis=(1, 2, 3)))
    return results


UNSTRETCHED = named_config("unstretched")


@pytest.mark.parametrize("std", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("steps", [10, 20, 40])
def test_adams_bashforth_is_within_a_sixth_of_eulers_error(steps: int, std: float) -> None:
    """On the model's own schedule, whatever the width of the data: the one to take few steps with."""
    found = errors(flow_match_schedule(steps, 1024), 0.5, std)
    assert found["adams_bashforth_2m"][-1] < found["euler"][-1] / 6


@pytest.mark.parametrize("mean", [0.0, 0.3, 1.0])
def test_at_10_steps_the_error_of_dpmpp_2m_is_at_most_a_third_of_eulers(mean: float) -> None:
    """For data half as wide as the noise, unstretched; at other widths 10 steps are too few for it."""
    found = errors(flow_match_schedule(10, 1024, UNSTRETCHED), mean, std=0.5)
    assert found["dpmpp_2m"][-1] < found["euler"][-1] / 3


@pytest.mark.parametrize("terminal", [0.0, 0.02])
@pytest.mark.parametrize("std", [0.1, 0.3, 0.5, 1.0, 2.0])
def test_at_80_steps_it_is_at_most_a_quarter_whatever_the_data(std: float, terminal: float) -> None:
    found = errors(flow_match_schedule(80, 1024, SchedulerConfig(shift_terminal=terminal)), 0.5, std)
    assert found["dpmpp_2m"][-1] < found["euler"][-1] / 4


@pytest.mark.parametrize("std", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("sampler", ["dpmpp_2m", "adams_bashforth_2m"])
def test_twice_the_steps_halve_eulers_error_and_quarter_the_second_orders(sampler: str, std: float) -> None:
    """Equal steps in the time that each sampler counts in, from sigma 0.9 to 0.1; the one to 0 is not counted."""
    found = []
    for steps in (80, 160, 320):
        levels = np.geomspace(0.9, 0.1, steps + 1) if sampler == "dpmpp_2m" else np.linspace(0.9, 0.1, steps + 1)
        found.append(errors(schedule_from_sigmas(levels), 0.5, std))
    for coarse, fine in pairwise(found):
        assert coarse["euler"][-2] / fine["euler"][-2] == pytest.approx(2, rel=0.05)
        assert coarse[sampler][-2] / fine[sampler][-2] == pytest.approx(4, rel=0.15)


@pytest.mark.slow
def test_dpmpp_2m_equals_comfyuis(comfyui_dir: Path, tmp_path: Path) -> None:
    """To 1e-5 of the tokens' size: the same formula, in another order of fp32 operations."""
    schedules = {
        **{f"{steps} steps": flow_match_schedule(steps, 1024) for steps in (1, 2, 3, 10, 40)},
        "distilled": flow_match_schedule(6, 1024, named_config("viggle-turbo-6")),
        "unstretched": flow_match_schedule(20, 1024, UNSTRETCHED),
        "the end": partial_schedule(12, 0.6, 1024),
    }
    sigmas = {name: schedule.sigmas for name, schedule in schedules.items()}
    np.savez(tmp_path / "in.npz", x=random_tokens(0), **sigmas)
    child = Path(__file__).parent / "children" / "comfyui_sampler.py"
    files = tmp_path / "in.npz", tmp_path / "out.npz"
    subprocess.run([sys.executable, child, comfyui_dir, "sample_dpmpp_2m", *files], check=True)
    expected = np.load(tmp_path / "out.npz")
    assert set(expected) == set(schedules)
    for name, schedule in schedules.items():
        *_, last = sample(rotating, random_tokens(0), schedule, sampler="dpmpp_2m")
        assert np.abs(last.x - expected[name]).max() < 1e-5 * np.abs(expected[name]).max(), name


@pytest.mark.parametrize("steps", [1, 2, 5, 40])
def test_the_first_step_is_eulers_and_so_is_the_last_of_dpmpp_2m_to_the_last_bit(steps: int) -> None:
    schedule = flow_match_schedule(steps, TOKENS)
    for sampler, first_order in (("dpmpp_2m", {0, steps - 1}), ("adams_bashforth_2m", {0})):
        before = random_tokens(0)
        with np.errstate(all="raise"):
            made = list(sample(rotating, before, schedule, sampler=sampler))
        for index, step in enumerate(made):
            sigma, next_sigma = schedule.sigmas[index : index + 2]
            expected = before + (next_sigma - sigma) * rotating(before, schedule.timesteps[index : index + 1] / 1000)
            assert np.array_equal(step.x, expected) == (index in first_order)
            before = step.x


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 99), min_size=3, max_size=9, unique=True), st.floats(-1, 1), st.floats(-1, 1))
def test_adams_bashforth_integrates_a_line_over_sigma_exactly_on_any_schedule(
    percents: list[int], start: float, slope: float
) -> None:
    """From the second step on; the first is given the exact path."""
    velocity = np.polynomial.Polynomial([start, slope])
    path = velocity.integ()
    integrate = AdamsBashforth()
    for index, (sigma, next_sigma) in enumerate(pairwise(np.float32(sorted(percents, reverse=True)) / 100)):
        made = integrate(
            np.float32([path(float(sigma))]), np.float32([velocity(float(sigma))]), sigma, next_sigma
        )  # fmt: skip
        if index:
            assert made.item() == pytest.approx(path(float(next_sigma)), abs=1e-4)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_sigma_that_fp32_repeats_is_stepped_over(sampler: str) -> None:
    sigmas = np.float32([0.75, 0.5, 0.5, 0.25, 0])
    repeated = Schedule(sigmas, sigmas[:-1] * np.float32(1000), 0.0)
    with np.errstate(all="raise"):
        *_, last = sample(rotating, random_tokens(0), repeated, sampler=sampler)
    assert np.isfinite(last.x).all()


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_pictures_sampled_in_turn_do_not_see_each_others_steps(sampler: str) -> None:
    starts = [random_tokens(0), random_tokens(1)]
    alone = [list(sample(rotating, start, SHORT, sampler=sampler))[-1].x for start in starts]
    *_, together = zip(*(sample(rotating, start, SHORT, sampler=sampler) for start in starts), strict=True)
    assert np.array_equal([step.x for step in together], alone)


def test_an_unknown_sampler_is_answered_with_the_known_ones() -> None:
    assert list(SAMPLERS) == ["euler", "adams_bashforth_2m", "dpmpp_2m"]
    for name in SAMPLERS:
        check_sampler(name)
    for attempt in (
        lambda: check_sampler("heun"),
        lambda: next(sample(rotating, random_tokens(0), SHORT, None, "heun")),
    ):
        with pytest.raises(ContractError, match="no sampler 'heun': choose one of euler, adams_bashforth_2m, dpmpp_2m"):
            attempt()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("bad", [1, 3, 5])
def test_a_velocity_that_is_not_finite_stops_the_loop_and_names_the_step(value: float, bad: int) -> None:
    velocities = [random_tokens(seed) for seed in range(5)]
    velocities[bad - 1][0, 3, :2] = value
    loop = sample(recorded(iter(velocities)), random_tokens(9), flow_match_schedule(5, TOKENS))
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


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_inpainting_keeps_what_the_mask_excludes_exactly(sampler: str) -> None:
    latents, noise, schedule = random_tokens(1), random_tokens(2), partial_schedule(6, 0.5, TOKENS)
    mask = np.zeros((1, TOKENS, 1), dtype=np.float32)
    mask[:, TOKENS // 2 :] = 1
    start = add_noise(latents, noise, schedule.sigmas[0])
    steps = list(sample(rotating, start, schedule, Inpainting(mask, latents, noise), sampler))
    for step, sigma in zip(steps, schedule.sigmas[1:], strict=True):
        kept = add_noise(latents, noise, sigma)[:, : TOKENS // 2]
        assert np.array_equal(step.x[:, : TOKENS // 2], kept)
    assert np.array_equal(steps[-1].x[:, : TOKENS // 2], latents[:, : TOKENS // 2])
    changed = steps[-1].x[:, TOKENS // 2 :] != latents[:, TOKENS // 2 :]
    assert changed.mean() > 0.99


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_inpainting_everything_is_no_inpainting_and_nothing_gives_the_latents_back(sampler: str) -> None:
    latents, noise, schedule = random_tokens(1), random_tokens(2), flow_match_schedule(5, TOKENS)
    *_, plain = sample(rotating, noise, schedule, sampler=sampler)
    for value, expected in ((1, plain.x), (0, latents)):
        mask = np.full((1, TOKENS, 1), value, dtype=np.float32)
        *_, last = sample(rotating, noise, schedule, Inpainting(mask, latents, noise), sampler)
        assert np.array_equal(last.x, expected)
