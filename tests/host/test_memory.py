"""What a stage takes, what is refused, and when a run is stopped; the machine's memory is made up but for one test."""

import pytest

from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.memory import (
    FREE_VARIABLE,
    SWAP_VARIABLE,
    Memory,
    MemoryGuard,
    MemoryLimits,
    NotEnoughMemoryError,
    check_fits,
    gigabytes,
    weight_bytes,
    working_bytes,
)
from coreai_rgba_image.host.model_set import EMBEDDED_FOLDER, ModelSet

from .test_runtime import result_of

GB = 1_000_000_000
LIMITS = MemoryLimits(min_free=1 * GB, max_swapped=4 * GB)


@pytest.fixture(scope="module")
def model() -> ModelSet:
    return ModelSet(EMBEDDED_FOLDER)


def test_memory_is_the_machines() -> None:
    now = Memory.now()
    assert 0 < now.available < 2**50
    assert 0 <= now.swapped < 2**50


@pytest.mark.parametrize(
    ("free", "swap", "limits"),
    [
        (None, None, MemoryLimits()),
        ("2.5", "0", MemoryLimits(2_500_000_000, 0)),
        ("off", "off", MemoryLimits(None, None)),
        ("0", "", MemoryLimits(min_free=0)),
    ],
)
def test_limits_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, free: str | None, swap: str | None, limits: MemoryLimits
) -> None:
    for variable, value in ((FREE_VARIABLE, free), (SWAP_VARIABLE, swap)):
        monkeypatch.delenv(variable, raising=False)
        if value is not None:
            monkeypatch.setenv(variable, value)
    assert MemoryLimits.configured() == limits


@pytest.mark.parametrize("value", ["-1", "much", "nan", "inf"])
def test_a_limit_that_is_no_size_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(SWAP_VARIABLE, value)
    with pytest.raises(ContractError, match=rf"{SWAP_VARIABLE} is '{value}': set it to a number of gigabytes"):
        MemoryLimits.configured()


def test_what_does_not_fit_is_refused_with_what_it_needs_and_what_there_is(model: ModelSet) -> None:
    check_fits(model.dit, 11 * GB, 12 * GB, LIMITS)
    check_fits(model.dit, 27 * GB, 12 * GB, MemoryLimits(min_free=None))
    with pytest.raises(NotEnoughMemoryError) as refused:
        check_fits(model.dit, 27_300_000_000, 12_100_000_000, LIMITS)
    message = str(refused.value)
    assert "the DiT needs 27.3 GB, 12.1 GB are available and 1.0 GB of them must stay free" in message
    assert "Close other applications" in message
    assert f"{FREE_VARIABLE}=off" in message


def test_what_a_stage_takes_grows_with_the_picture_and_the_text(model: ModelSet) -> None:
    assert model.dit.size <= weight_bytes(model.dit) <= 2 * model.dit.size
    sizes = [working_bytes(decoder) for decoder in model.vae_decoders.values()]
    assert sizes == sorted(sizes)
    assert sizes[-1] == 4 * sizes[0]  # 512 x 512 to 256 x 256
    for bundle in (model.dit, model.text_encoder):
        assert 0 < working_bytes(bundle, 100) < working_bytes(bundle, 1000) / 9


def guarded(*readings: Memory, limits: MemoryLimits = LIMITS) -> MemoryGuard:
    """A guard that was started at the first of the readings and will see the others."""
    return MemoryGuard(limits, iter(readings).__next__)


def test_a_guard_lets_a_run_go_on_within_its_limits() -> None:
    guard = guarded(Memory(9 * GB, 7 * GB), Memory(1 * GB, 11 * GB), Memory(5 * GB, 0))
    guard.check()
    guard.check()


def test_a_guard_stops_a_run_when_memory_runs_out() -> None:
    guard = guarded(Memory(9 * GB, 0), Memory(999_000_000, 0))
    with pytest.raises(NotEnoughMemoryError, match=r"between two steps: 1\.0 GB of memory are left, at least 1\.0 GB"):
        guard.check()


def test_a_guard_stops_a_run_that_swaps_and_counts_from_its_start() -> None:
    guard = guarded(Memory(9 * GB, 3 * GB), Memory(9 * GB, 7 * GB), Memory(9 * GB, 7_200_000_000))
    guard.check()
    with pytest.raises(NotEnoughMemoryError, match=r"4\.2 GB were swapped out .*, at most 4\.0 GB may be") as stopped:
        guard.check()
    for advice in ("Close other applications", "keep_loaded to 'stage'", "smaller picture", f"{SWAP_VARIABLE} sets"):
        assert advice in str(stopped.value)


def test_a_guard_without_limits_stops_nothing() -> None:
    guarded(Memory(9 * GB, 0), Memory(0, 90 * GB), limits=MemoryLimits(None, None)).check()


@pytest.mark.slow
def test_a_run_is_stopped_by_the_real_memory_of_this_machine() -> None:
    """The process takes memory between two steps; the steps that were done are there."""
    result = result_of("memory.py", "starved_sampling", EMBEDDED_FOLDER)
    assert result["steps"] == 2
    assert "the run was stopped between two steps" in result["message"]
    assert result["loaded"] == 0
    assert result["after"] == 4


def test_gigabytes_are_written_as_people_read_them() -> None:
    assert [gigabytes(count) for count in (27_340_000_000, 100_000_000, 4_000_000, 0)] == [
        "27.3", "0.1", "0.004", "0.000"
    ]  # fmt: skip
