"""Sigmas, timesteps and mu, bit for bit those of diffusers' ``FlowMatchEulerDiscreteScheduler``."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage21.pipeline_qwenimage21 import calculate_shift
from hypothesis import given, settings
from hypothesis import strategies as st

from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.schedule import Schedule, SchedulerConfig, flow_match_schedule, partial_schedule

CUSTOM = SchedulerConfig(
    base_image_seq_len=128, max_image_seq_len=4096, base_shift=0.4, max_shift=1.15, shift_terminal=0.1,
    num_train_timesteps=500, steps=12,
)  # fmt: skip


def reference_schedule(steps: int, image_tokens: int, config: SchedulerConfig = SchedulerConfig()) -> Schedule:
    settings_ = {name: value for name, value in asdict(config).items() if name != "steps"}
    scheduler = FlowMatchEulerDiscreteScheduler(**settings_, use_dynamic_shifting=True)
    mu = calculate_shift(
        image_tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
    )
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    return Schedule(scheduler.sigmas.numpy(), scheduler.timesteps.numpy(), mu)


def assert_equal(ours: Schedule, reference: Schedule) -> None:
    assert ours.mu == reference.mu
    for name in ("sigmas", "timesteps"):
        assert getattr(ours, name).dtype == np.float32
        assert np.array_equal(getattr(ours, name), getattr(reference, name)), name


@pytest.mark.parametrize("image_tokens", [64, 77, 96, 255, 256, 1024, 2304, 4095, 4096])
def test_steps_2_to_100_equal_the_references_bit_for_bit(image_tokens: int) -> None:
    for steps in range(2, 101):
        assert_equal(flow_match_schedule(steps, image_tokens), reference_schedule(steps, image_tokens))


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 100), st.integers(64, 4096))
def test_any_setting_equals_the_references(steps: int, image_tokens: int) -> None:
    assert_equal(flow_match_schedule(steps, image_tokens), reference_schedule(steps, image_tokens))


@pytest.mark.parametrize(("pixels", "mu"), [(256, 0.5), (512, 0.5387), (1024, 0.6935)])
def test_mu_is_the_published_value(pixels: int, mu: float) -> None:
    assert flow_match_schedule(40, (pixels // 16) ** 2).mu == pytest.approx(mu, abs=5e-5)


def test_the_second_sigma_at_256_is_the_published_value() -> None:
    assert flow_match_schedule(40, 256).sigmas[1] == pytest.approx(0.98436, abs=5e-6)


def test_one_step_goes_from_noise_to_nothing_where_the_formula_is_0_over_0() -> None:
    with np.errstate(invalid="ignore"):
        assert np.isnan(reference_schedule(1, 256).sigmas[0])
    one = flow_match_schedule(1, 256)
    assert (one.sigmas.tolist(), one.timesteps.tolist(), one.steps) == ([1.0, 0.0], [1000.0], 1)
    assert one.sigmas.dtype == one.timesteps.dtype == np.float32


def test_sigmas_fall_from_1_through_the_terminal_to_0() -> None:
    schedule = flow_match_schedule(40, 1024)
    assert schedule.steps == 40
    assert (np.diff(schedule.sigmas) < 0).all()
    assert (schedule.sigmas[0], schedule.sigmas[-1]) == (1, 0)
    assert schedule.sigmas[-2] == pytest.approx(0.02)


def test_the_defaults_are_the_published_ones() -> None:
    assert asdict(SchedulerConfig()) == {
        "base_image_seq_len": 256,
        "max_image_seq_len": 8192,
        "base_shift": 0.5,
        "max_shift": 0.9,
        "shift_terminal": 0.02,
        "time_shift_type": "exponential",
        "num_train_timesteps": 1000,
        "steps": 40,
    }


@pytest.mark.parametrize("steps", [2, 7, 40])
def test_a_scheduler_json_overrides_the_defaults(tmp_path: Path, steps: int) -> None:
    path = tmp_path / "scheduler.json"
    path.write_text(json.dumps({**asdict(CUSTOM), "invert_sigmas": False}), encoding="utf-8")
    config = SchedulerConfig.from_file(path)
    assert config == CUSTOM
    assert_equal(flow_match_schedule(steps, 300, config), reference_schedule(steps, 300, CUSTOM))


def test_keys_that_a_file_leaves_out_keep_their_defaults() -> None:
    assert SchedulerConfig.from_json({"max_shift": 1.15, "base_shift": None}) == SchedulerConfig(max_shift=1.15)


def test_a_terminal_of_0_stretches_nothing() -> None:
    config = SchedulerConfig(shift_terminal=0.0)
    assert_equal(flow_match_schedule(9, 256, config), reference_schedule(9, 256, config))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"null", b"\xff", b'{"max_shift": "high"}', b'{"base_shift": [1]}']
)
def test_an_unreadable_scheduler_json_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "scheduler.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="cannot read the scheduler's settings"):
        SchedulerConfig.from_file(path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"time_shift_type": "linear"}, "only 'exponential'"),
        ({"max_image_seq_len": 256}, "the shift is undefined"),
        ({"shift_terminal": 1.0}, "from 0 to below 1"),
    ],
)
def test_settings_that_are_not_supported_are_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        SchedulerConfig.from_json(changed)


@pytest.mark.parametrize(("steps", "image_tokens"), [(0, 256), (-1, 256), (40, 0)])
def test_nothing_to_do_is_refused(steps: int, image_tokens: int) -> None:
    with pytest.raises(ContractError, match="at least 1"):
        flow_match_schedule(steps, image_tokens)


@pytest.mark.parametrize(
    ("steps", "denoise", "of"), [(40, 1.0, 40), (20, 0.5, 40), (10, 0.3, 33), (1, 0.5, 2), (8, 0.99995, 8)]
)
def test_denoise_takes_the_last_steps_of_a_longer_schedule(steps: int, denoise: float, of: int) -> None:
    """As ComfyUI's ``KSampler.set_steps``: ``int(steps / denoise)`` steps, of which the last ``steps + 1`` sigmas."""
    partial, full = partial_schedule(steps, denoise, 256), reference_schedule(of, 256)
    assert_equal(partial, Schedule(full.sigmas[-steps - 1 :], full.timesteps[-steps:], full.mu))


def test_denoise_0_leaves_nothing_to_do() -> None:
    schedule = partial_schedule(20, 0.0, 256)
    assert (schedule.steps, schedule.sigmas.tolist()) == (0, [0.0])


@pytest.mark.parametrize("denoise", [1e-9, 1e-300])
def test_a_denoise_too_small_for_any_schedule_is_refused(denoise: float) -> None:
    with pytest.raises(ContractError, match="denoise is 1e-"):
        partial_schedule(20, denoise, 256)


@pytest.mark.parametrize("denoise", [-0.1, 1.1, float("nan")])
def test_denoise_outside_0_to_1_is_refused(denoise: float) -> None:
    with pytest.raises(ContractError, match="from 0 to 1"):
        partial_schedule(20, denoise, 256)
