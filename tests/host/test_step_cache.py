"""Which steps re-use a velocity, what that saves, and what it costs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.graphs.dit import timestep_embedding
from coreai_rgba_image.host.sampler import SAMPLERS, Denoiser, sample, with_guidance
from coreai_rgba_image.host.schedule import (
    Schedule,
    SchedulerConfig,
    flow_match_schedule,
    partial_schedule,
    schedule_from_sigmas,
)
from coreai_rgba_image.host.step_cache import StepCache, embedding_distance, reused_steps

TOKENS = 96

schedules = (
    st.builds(flow_match_schedule, st.integers(1, 60), st.integers(64, 4096))
    | st.builds(partial_schedule, st.integers(1, 40), st.floats(0.1, 1), st.integers(64, 4096))
    | st.sets(st.integers(1, 1024), min_size=1, max_size=30).map(
        lambda levels: schedule_from_sigmas([level / 1024 for level in sorted(levels, reverse=True)])
    )
)


def random_tokens(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((1, TOKENS, 64), dtype=np.float32)


def smooth(x: np.ndarray, timestep: np.ndarray) -> np.ndarray:
    """The velocity of a flow to data ~ N(0.5, 0.5²)."""
    sigma = timestep.item()
    variance = ((1 - sigma) * 0.5) ** 2 + sigma**2
    return (sigma - (1 - sigma) * 0.25) / variance * (x - (1 - sigma) * 0.5) - 0.5


def last(denoise: Denoiser, schedule: Schedule, sampler: str = "euler") -> np.ndarray:
    *_, step = sample(denoise, random_tokens(0), schedule, sampler=sampler)
    return step.x


@settings(max_examples=200, deadline=None)
@given(st.floats(0, 1, width=32), st.floats(0, 1, width=32))
def test_the_distance_is_that_of_the_dits_own_embeddings(first: float, second: float) -> None:
    """The embedding is fp32 at angles up to 1000: to 2e-3 of a distance that can be 22."""
    one, other = timestep_embedding(torch.tensor([first, second])).double()
    distance = embedding_distance(np.array([1000 * (second - first)]))
    assert distance.shape == (1,)
    assert distance[0] == pytest.approx((one - other).norm().item(), abs=2e-3)


@settings(max_examples=300, deadline=None)
@given(schedules, st.floats(0, 0.5))
def test_never_in_the_outer_tenths_never_two_in_a_row_never_more_than_asked(schedule: Schedule, share: float) -> None:
    reused = reused_steps(schedule, share)
    tenth = schedule.steps / 10
    assert all(tenth <= index < schedule.steps - tenth for index in reused)
    assert not any(index + 1 in reused for index in reused)
    assert len(reused) <= share * schedule.steps
    assert 0 not in reused
    assert schedule.steps - 1 not in reused


@settings(max_examples=300, deadline=None)
@given(schedules, st.floats(0, 0.5))
def test_no_step_that_could_be_reused_moved_less_than_those_that_are(schedule: Schedule, share: float) -> None:
    reused = reused_steps(schedule, share)
    moved = embedding_distance(np.diff(schedule.timesteps, prepend=np.float32(0)))
    edge = -(-schedule.steps // 10)
    free = [index for index in range(edge, schedule.steps - edge) if not {index - 1, index, index + 1} & reused]
    if free and reused:
        assert max(moved[list(reused)]) <= min(moved[free])
    if free:
        assert len(reused) + 1 > share * schedule.steps


@pytest.mark.parametrize(("steps", "share", "count"), [(25, 0.25, 6), (25, 0.2, 5), (40, 0.25, 10), (20, 0.25, 5)])
def test_the_models_schedule_gets_the_share_it_was_asked_for(steps: int, share: float, count: int) -> None:
    for image_tokens in (64, 1024, 4096):
        assert len(reused_steps(flow_match_schedule(steps, image_tokens), share)) == count


@pytest.mark.parametrize("steps", [1, 2, 3, 6])
def test_a_share_of_0_and_a_schedule_that_is_too_short_reuse_nothing(steps: int) -> None:
    assert reused_steps(flow_match_schedule(40, 1024), 0) == frozenset()
    assert len(reused_steps(flow_match_schedule(steps, 1024), 0.5)) <= max(0, (steps - 1) // 2)


@pytest.mark.parametrize("share", [-0.1, 0.51, 1, float("nan"), float("inf")])
def test_a_share_outside_0_to_a_half_is_refused(share: float) -> None:
    with pytest.raises(ContractError, match=r"share of re-used steps is .*: it must be from 0 \(none\) to 0\.5"):
        StepCache(smooth, flow_match_schedule(10, 1024), share)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_off_it_changes_nothing(sampler: str) -> None:
    schedule = flow_match_schedule(12, 1024)
    cache = StepCache(smooth, schedule, 0)
    assert np.array_equal(last(cache, schedule, sampler), last(smooth, schedule, sampler))
    assert (cache.called, cache.reused) == (12, 0)


@pytest.mark.parametrize("config", [SchedulerConfig(), SchedulerConfig(num_train_timesteps=500)])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_reused_step_takes_the_velocity_of_the_step_before(sampler: str, config: SchedulerConfig) -> None:
    schedule = flow_match_schedule(25, 1024, config)
    given_: list[np.ndarray] = []
    cache = StepCache(lambda x, timestep: np.roll(x, 1) * timestep, schedule, 0.25)

    def recorded(x: np.ndarray, timestep: np.ndarray) -> np.ndarray:
        given_.append(cache(x, timestep))
        return given_[-1]

    last(recorded, schedule, sampler)
    same = {index for index in range(1, 25) if np.array_equal(given_[index], given_[index - 1])}
    assert same == reused_steps(schedule, 0.25)
    assert (cache.called, cache.reused) == (19, 6)


def test_around_guidance_it_saves_both_velocities() -> None:
    calls = []

    def counted(x: np.ndarray, timestep: np.ndarray) -> np.ndarray:
        calls.append(timestep.item())
        return smooth(x, timestep)

    schedule = flow_match_schedule(25, 1024)
    last(StepCache(with_guidance(counted, counted, 4.0), schedule, 0.25), schedule)
    assert len(calls) == 2 * 19


def test_a_second_picture_gets_none_of_the_firsts_velocities() -> None:
    schedule = flow_match_schedule(12, 1024)
    cache = StepCache(smooth, schedule, 0.25)
    first, second = last(cache, schedule), last(cache, schedule)
    assert np.array_equal(first, second)
    assert (cache.called, cache.reused) == (2 * 9, 2 * 3)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_picture_changes_but_little(sampler: str) -> None:
    """20 of 25 velocities: 1.25 times faster, and closer to 25 steps than 20 plain ones come.

    Not so with Adams-Bashforth, for which README.md advises fewer steps instead.
    """
    schedule = flow_match_schedule(25, 1024)
    whole = last(smooth, schedule, sampler)
    cached = last(StepCache(smooth, schedule, 0.2), schedule, sampler)
    distance = np.sqrt(np.mean((cached - whole) ** 2))
    assert 0 < distance < 0.01 * np.std(whole)
    fewer = last(smooth, flow_match_schedule(20, 1024), sampler)
    assert (distance < np.sqrt(np.mean((fewer - whole) ** 2))) == (sampler != "adams_bashforth_2m")
