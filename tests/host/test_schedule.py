"""Sigmas, timesteps and mu, bit for bit those of diffusers' ``FlowMatchEulerDiscreteScheduler``."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage21.pipeline_qwenimage21 import calculate_shift
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.schedule import (
    NAMED_SCHEDULES,
    Schedule,
    SchedulerConfig,
    flow_match_schedule,
    named_config,
    partial_schedule,
    schedule_from_sigmas,
)

CUSTOM = SchedulerConfig(
    base_image_seq_len=128, max_image_seq_len=4096, base_shift=0.4, max_shift=1.15, shift_terminal=0.1,
    num_train_timesteps=500, steps=12, use_dynamic_shifting=False, shift=3.0,
)  # fmt: skip

TURBO = SchedulerConfig(sample_sigmas=(1.0, 0.8, 0.55, 0.3))

OURS_ALONE = {"steps", "sample_sigmas"}
"""What diffusers keeps outside of the scheduler."""


def reference_schedule(steps: int, image_tokens: int, config: SchedulerConfig = SchedulerConfig()) -> Schedule:
    """As ``QwenImage21Pipeline`` calls it; the ``mu`` that a static shift amounts to is ours."""
    scheduler = FlowMatchEulerDiscreteScheduler(**{k: v for k, v in asdict(config).items() if k not in OURS_ALONE})
    mu = calculate_shift(
        image_tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
    )
    sigmas = config.sample_sigmas or np.linspace(1.0, 1 / steps, steps)
    scheduler.set_timesteps(sigmas=sigmas, mu=mu)
    mu = mu if config.use_dynamic_shifting else math.log(config.shift)
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
        "use_dynamic_shifting": True,
        "shift": 1.0,
        "sample_sigmas": None,
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


@pytest.mark.parametrize("none", [0.0, 0, None])
def test_a_terminal_of_0_or_null_stretches_nothing(none: float | None) -> None:
    config = SchedulerConfig.from_json({"shift_terminal": none})
    assert config == SchedulerConfig(shift_terminal=0.0)
    assert_equal(flow_match_schedule(9, 256, config), reference_schedule(9, 256, config))


@pytest.mark.parametrize("terminal", [None, 0.05])
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_scheduler_config_of_diffusers_is_read_as_diffusers_reads_it(
    tmp_path: Path, terminal: float | None, dynamic: bool
) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, shift_terminal=terminal, use_dynamic_shifting=dynamic)
    scheduler.save_pretrained(tmp_path)
    config = SchedulerConfig.from_file(tmp_path / "scheduler_config.json")
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / 8, 8), mu=config.mu(1024))
    ours = flow_match_schedule(8, 1024, config)
    assert np.array_equal(ours.sigmas, scheduler.sigmas.numpy())
    assert np.array_equal(ours.timesteps, scheduler.timesteps.numpy())


@pytest.mark.parametrize("config", [SchedulerConfig(), CUSTOM, TURBO, named_config("viggle-turbo-6")])
def test_what_is_written_as_json_is_read_back(config: SchedulerConfig) -> None:
    assert SchedulerConfig.from_json(json.loads(json.dumps(asdict(config)))) == config


falling = st.sets(st.integers(1, 1024), min_size=1, max_size=12).map(
    lambda levels: tuple(level / 1024 for level in sorted(levels, reverse=True))
)


@settings(max_examples=300, deadline=None)
@given(
    steps=st.integers(2, 100),
    image_tokens=st.integers(64, 4096),
    dynamic=st.booleans(),
    shift=st.floats(0.1, 20),
    terminal=st.just(0.0) | st.floats(0.001, 0.5),
    sample_sigmas=st.none() | falling,
)
@example(steps=1, image_tokens=256, dynamic=True, shift=1.0, terminal=0.02, sample_sigmas=(0.95,))
def test_every_combination_of_settings_equals_the_references(
    steps: int, image_tokens: int, dynamic: bool, shift: float, terminal: float, sample_sigmas: tuple[float, ...] | None
) -> None:
    if sample_sigmas == (1.0,):
        terminal = 0.0  # 0/0 in the reference; see the test of one step
    config = SchedulerConfig(
        use_dynamic_shifting=dynamic, shift=shift, shift_terminal=terminal, sample_sigmas=sample_sigmas
    )
    steps = len(sample_sigmas) if sample_sigmas else steps
    assert_equal(flow_match_schedule(steps, image_tokens, config), reference_schedule(steps, image_tokens, config))


def test_the_pipeline_shifts_and_stretches_the_sigmas_of_a_checkpoint() -> None:
    ours = flow_match_schedule(4, 1024, TURBO)
    assert_equal(ours, reference_schedule(4, 1024, TURBO))
    assert not np.isin(ours.sigmas[1:-1], np.float32(TURBO.sample_sigmas)).any()
    still = SchedulerConfig(
        sample_sigmas=TURBO.sample_sigmas, use_dynamic_shifting=False, shift=1.0, shift_terminal=0.0
    )
    assert np.array_equal(flow_match_schedule(4, 1024, still).sigmas, np.float32([*TURBO.sample_sigmas, 0]))


@pytest.mark.parametrize("dynamic", [True, False])
def test_one_step_from_pure_noise_is_never_stretched(dynamic: bool) -> None:
    for fixed in (None, (1.0,)):
        config = SchedulerConfig(use_dynamic_shifting=dynamic, shift=3.0, sample_sigmas=fixed)
        assert flow_match_schedule(1, 256, config).sigmas.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("steps", [1, 3, 5, 40])
def test_fixed_steps_are_not_replaced_by_others(steps: int) -> None:
    assert TURBO.steps == 4
    with pytest.raises(ContractError, match=rf"steps is {steps}: .* 4 fixed steps, so set steps to 4"):
        flow_match_schedule(steps, 256, TURBO)


@pytest.mark.parametrize("changed", [{"shift": 1e5, "use_dynamic_shifting": False}, {"max_shift": 1e4}])
def test_a_shift_that_fp32_cannot_hold_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ContractError, match="it must be from -10 to 10"):
        flow_match_schedule(8, 1024, SchedulerConfig(**changed))


def test_the_schedule_of_the_six_step_lora_is_shifted_and_not_stretched() -> None:
    """Nodes and settings of the model card of Viggle/Qwen-Image-2.1-viggle-turbo."""
    config = named_config("viggle-turbo-6")
    assert config.steps == 6
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    mu = calculate_shift(1024, 256, 8192, 0.5, 0.9)
    scheduler.set_timesteps(sigmas=[1.0, 0.9375, 0.875, 0.75, 0.5, 0.25], mu=mu)
    ours = flow_match_schedule(6, 1024, config)
    assert_equal(ours, Schedule(scheduler.sigmas.numpy(), scheduler.timesteps.numpy(), mu))
    assert ours.sigmas[-2] > 0.25


def test_a_named_schedule_keeps_the_models_own_shift() -> None:
    own = SchedulerConfig(base_shift=0.3, max_shift=1.2)
    assert named_config("model", own) == own
    assert named_config("model", TURBO) == TURBO
    assert named_config("viggle-turbo-6", own).mu(1024) == own.mu(1024)
    assert list(NAMED_SCHEDULES) == ["model", "unstretched", "viggle-turbo-6"]


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ContractError, match="no schedule 'karras': choose one of model, unstretched, viggle-turbo-6"):
        named_config("karras")


@settings(max_examples=100, deadline=None)
@given(falling, st.booleans())
def test_sigmas_are_used_exactly_as_given(sigmas: tuple[float, ...], with_zero: bool) -> None:
    given_ = np.float32([*sigmas, 0] if with_zero else sigmas)
    schedule = schedule_from_sigmas(given_)
    assert (schedule.steps, schedule.mu) == (len(sigmas), 0)
    assert schedule.sigmas.dtype == schedule.timesteps.dtype == np.float32
    assert schedule.sigmas.tolist() == [*sigmas, 0]
    assert np.array_equal(schedule.timesteps, schedule.sigmas[:-1] * np.float32(1000))
    assert_equal(schedule_from_sigmas(list(sigmas)), schedule)
    assert_equal(schedule_from_sigmas(torch.tensor(given_)), schedule)


def test_sigmas_take_their_timesteps_from_the_model_set() -> None:
    assert schedule_from_sigmas([1.0, 0.5], CUSTOM).timesteps.tolist() == [500, 250]


def test_pure_noise_that_comfyui_rounds_above_1_is_accepted() -> None:
    shift, one = 1.57, torch.tensor(1.0)
    rounded = shift * one / (1 + (shift - 1) * one)
    assert rounded > 1
    assert schedule_from_sigmas(torch.stack((rounded, one / 2))).sigmas[0] == rounded


@pytest.mark.parametrize(
    ("sigmas", "message"),
    [
        ([], "sigmas holds no noise level above 0"),
        ([0.0], "sigmas holds no noise level above 0"),
        ([14.6, 1.0, 0.0], "number 1 of sigmas is 14.6: a noise level must be above 0 and at most 1"),
        ([1.0, float("nan")], "number 2 of sigmas is nan"),
        ([float("inf")], "number 1 of sigmas is inf"),
        ([1e300], "number 1 of sigmas is inf"),
        ([1.0, -0.5], "number 2 of sigmas is -0.5"),
        ([1.0, 0.5, 0.0, 0.0], "number 3 of sigmas is 0: .* only a last one may be 0"),
        ([0.5, 0.5, 0.0], "number 2 of sigmas is 0.5 after 0.5: each must be below the one before"),
        ([0.25, 0.5], "number 2 of sigmas is 0.5 after 0.25"),
        ([[1.0, 0.5]], r"sigmas have shape \[1, 2\]: pass one list"),
        (0.5, r"sigmas have shape \[\]: pass one list"),
        (["high"], r"sigmas are \['high'\]: pass a list of numbers"),
        ([[1.0], [0.5, 0.0]], "pass a list of numbers"),
    ],
)
def test_sigmas_that_no_flow_follows_are_refused(sigmas: Any, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        schedule_from_sigmas(sigmas)


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
        ({"shift_terminal": float("nan")}, "shift_terminal is nan: it must be a number"),
        ({"max_shift": 10**400}, "it must be a number"),
        ({"base_image_seq_len": True}, "base_image_seq_len is True: it must be a number"),
        ({"use_dynamic_shifting": "yes"}, "use_dynamic_shifting is 'yes': it must be true or false"),
        ({"use_dynamic_shifting": 1}, "it must be true or false"),
        ({"shift": 0}, "shift is 0: it must be above 0"),
        ({"num_train_timesteps": -1}, "num_train_timesteps is -1: it must be above 0"),
        ({"use_karras_sigmas": True}, "use_karras_sigmas is True: only a schedule without it"),
        ({"sample_sigmas": 0.5}, "sample_sigmas is 0.5: it must be a list of numbers"),
        ({"sample_sigmas": [1.0, "0.5"]}, "it must be a list of numbers"),
        ({"sample_sigmas": [1.0, None]}, "it must be a list of numbers"),
        ({"sample_sigmas": [1.0, float("nan")]}, "it must be a list of numbers"),
        ({"sample_sigmas": []}, "sample_sigmas holds no noise level above 0"),
        ({"sample_sigmas": [1.5, 1.0]}, "number 1 of sample_sigmas is 1.5: a noise level must be above 0 and at most"),
        ({"sample_sigmas": [1.0, 0.0]}, "number 2 of sample_sigmas is 0:"),
        ({"sample_sigmas": [1.0, 0.5, 0.5]}, "number 3 of sample_sigmas is 0.5 after 0.5: each must be below"),
        ({"sample_sigmas": [0.5, 0.75]}, "number 2 of sample_sigmas is 0.75 after 0.5"),
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


@pytest.mark.parametrize("config", [SchedulerConfig(), TURBO])
def test_denoise_0_leaves_nothing_to_do(config: SchedulerConfig) -> None:
    schedule = partial_schedule(config.steps, 0.0, 256, config)
    assert (schedule.steps, schedule.sigmas.tolist()) == (0, [0.0])


@pytest.mark.parametrize(
    ("denoise", "left"),
    [(1.0, 6), (0.99995, 6), (0.99, 5), (0.94, 5), (0.9375, 5), (0.93, 4), (0.8, 3), (0.5, 2), (0.3, 1), (0.25, 1)],
)
def test_denoise_takes_the_fixed_nodes_up_to_it(denoise: float, left: int) -> None:
    config = named_config("viggle-turbo-6")
    whole = flow_match_schedule(6, 1024, config)
    assert_equal(partial_schedule(6, denoise, 1024, config), whole.last(left))


@pytest.mark.parametrize("denoise", [0.24, 0.01, 1e-9])
def test_a_denoise_below_every_fixed_node_is_refused(denoise: float) -> None:
    with pytest.raises(ContractError, match=r"fixed steps starts at 0\.25, so set denoise to that or more, or to 0"):
        partial_schedule(6, denoise, 1024, named_config("viggle-turbo-6"))


@pytest.mark.parametrize("denoise", [1e-9, 1e-300])
def test_a_denoise_too_small_for_any_schedule_is_refused(denoise: float) -> None:
    with pytest.raises(ContractError, match="denoise is 1e-"):
        partial_schedule(20, denoise, 256)


@pytest.mark.parametrize("denoise", [-0.1, 1.1, float("nan")])
def test_denoise_outside_0_to_1_is_refused(denoise: float) -> None:
    with pytest.raises(ContractError, match="from 0 to 1"):
        partial_schedule(20, denoise, 256)
