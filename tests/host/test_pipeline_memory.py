"""What a run loads, keeps and gives back, what it refuses, and when it stops."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from coreai_rgba_image.host import residency, runtime, sampling
from coreai_rgba_image.host.bundle import Bundle
from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.latents import initial_noise
from coreai_rgba_image.host.memory import (
    Memory,
    MemoryGuard,
    MemoryLimits,
    NotEnoughMemoryError,
    weight_bytes,
    working_bytes,
)
from coreai_rgba_image.host.model_set import EMBEDDED_FOLDER, ModelSet
from coreai_rgba_image.host.pipeline import encode_prompt, generate, generate_batch
from coreai_rgba_image.host.prompt_cache import DISK_VARIABLE
from coreai_rgba_image.host.sampling import Sampling, Settings

from .test_runtime import result_of, start

GRID, SIZE = (8, 12), (192, 128)
PROMPT = "a red apple"
SETTINGS = Settings(1)
STAGES = ["text encoder", "DiT", "VAE decoder"]
FREE = MemoryLimits().min_free or 0


@pytest.fixture(scope="module")
def model(tiny_set: Path) -> ModelSet:
    return ModelSet(tiny_set)


@pytest.fixture(scope="module")
def positive(model: ModelSet) -> np.ndarray:
    return encode_prompt(model, PROMPT)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kinds of the bundles that are loaded, in order; no prompt is remembered, no bundle kept afterwards."""
    monkeypatch.setenv(DISK_VARIABLE, "0")
    kinds: list[str] = []
    load = runtime.load

    def noting(bundle: Bundle) -> runtime.LoadedGraph:
        kinds.append(bundle.spec.kind)
        return load(bundle)

    monkeypatch.setattr(runtime, "load", noting)
    yield kinds
    residency.release_all()


def with_memory_for(monkeypatch: pytest.MonkeyPatch, needed: int) -> None:
    """From here on the machine has ``needed`` bytes for weights and work, beside what must stay free."""
    monkeypatch.setattr(Memory, "now", lambda: Memory(FREE + needed - residency.resident_bytes(), 0))


def test_a_decoder_that_does_not_fit_beside_the_dit_waits_for_the_last_picture(
    model: ModelSet, loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    early = list(generate_batch(model, PROMPT, *SIZE, SETTINGS, seeds=[1, 2]))
    assert loaded == [*STAGES, "VAE decoder"]
    loaded.clear()
    decoder = model.vae_decoder(*GRID)
    with_memory_for(monkeypatch, weight_bytes(decoder) + working_bytes(decoder))
    late = list(generate_batch(model, PROMPT, *SIZE, SETTINGS, seeds=[1, 2]))
    assert loaded == STAGES
    assert np.array_equal(early, late)


@pytest.mark.parametrize("kind", ["DiT", "VAE decoder"])
def test_a_stage_that_will_not_fit_is_refused_before_the_first_is_loaded(
    model: ModelSet, loaded: list[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    [bundle] = [bundle for bundle in (model.dit, model.vae_decoder(*GRID)) if bundle.spec.kind == kind]
    with_memory_for(monkeypatch, weight_bytes(bundle) + working_bytes(bundle, GRID[0] * GRID[1]) - 1)
    with pytest.raises(NotEnoughMemoryError, match=rf"the {kind} needs 0\.\d+ GB, 1\.\d GB are available"):
        generate(model, PROMPT, *SIZE, SETTINGS)
    assert loaded == []


def test_bundles_that_are_kept_serve_the_next_picture_and_change_nothing(model: ModelSet, loaded: list[str]) -> None:
    pictures = [generate(model, PROMPT, *SIZE, SETTINGS, seed=1, keep_loaded="all") for _ in range(2)]
    assert loaded == STAGES
    pictures.append(generate(model, PROMPT, *SIZE, SETTINGS, seed=1))
    assert residency.loaded() == []
    loaded.clear()
    pictures += generate_batch(model, PROMPT, *SIZE, SETTINGS, seeds=[1, 2], keep_loaded="auto")
    assert loaded == STAGES
    assert all(np.array_equal(picture, pictures[0]) for picture in pictures[:-1])


def test_an_unknown_choice_of_what_to_keep_is_refused(model: ModelSet, positive: np.ndarray, loaded: list[str]) -> None:
    message = "keep_loaded is 'some': choose one of auto, stage, all"
    with pytest.raises(ContractError, match=message):
        Sampling(model, positive, initial_noise(0, *GRID), keep_loaded="some")
    with pytest.raises(ContractError, match=message):
        generate(model, PROMPT, *SIZE, keep_loaded="some")
    assert loaded == []


def test_a_run_is_stopped_between_two_steps_and_not_after_the_last(
    model: ModelSet, positive: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a guard that finds memory short when it looks for the second time."""
    readings = iter([Memory(2**40, 0), Memory(2**40, 0), Memory(0, 0)])
    monkeypatch.setattr(sampling, "MemoryGuard", lambda: MemoryGuard(MemoryLimits(), lambda: next(readings)))
    run = Sampling(model, positive, initial_noise(0, *GRID), Settings(4), keep_loaded="all").run()
    next(run), next(run)
    with pytest.raises(NotEnoughMemoryError, match="the run was stopped between two steps"):
        next(run)
    assert residency.loaded() == []
    readings = iter([Memory(2**40, 0), Memory(2**40, 0)])
    assert len(list(Sampling(model, positive, initial_noise(0, *GRID), Settings(2)).run())) == 2


@pytest.fixture(scope="module")
def heavy_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``children/make_heavy_set.py`` writes, with the tokenizer of the model that ships."""
    folder = tmp_path_factory.mktemp("heavy")
    process = start("make_heavy_set.py", folder)
    assert process.returncode == 0, process.stderr
    shutil.copytree(EMBEDDED_FOLDER / "tokenizer", folder / "tokenizer")
    return folder


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of a process from /proc")
def test_a_run_takes_no_more_than_its_largest_stage_and_a_quarter(
    heavy_set: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless all is kept, or the measurement would not tell."""
    monkeypatch.setenv(DISK_VARIABLE, "0")  # each run has to encode
    largest, run, run_that_keeps_all = (
        result_of("memory.py", case, heavy_set)
        for case in ("peak_of_sampling", "peak_of_a_run", "peak_of_a_run_that_keeps_all")
    )
    assert run < 1.25 * largest
    assert run_that_keeps_all > 1.25 * largest
