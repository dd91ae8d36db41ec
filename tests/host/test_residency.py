"""What stays loaded, and what goes, on the real runtime; how much memory the machine has is made up."""

import random
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from coreai_rgba_image.host import residency, runtime
from coreai_rgba_image.host.bundle import Bundle, read_bundle
from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.memory import Memory, MemoryLimits, NotEnoughMemoryError, weight_bytes
from coreai_rgba_image.host.model_set import EMBEDDED_FOLDER, ModelSet
from coreai_rgba_image.host.residency import using

from .test_runtime import start

FREE = MemoryLimits().min_free or 0


@pytest.fixture(scope="module")
def model() -> ModelSet:
    return ModelSet(EMBEDDED_FOLDER)


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    residency.release_all()
    yield
    assert not any(resident.users for resident in residency.loaded())
    residency.release_all()


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Bundle]:
    """The bundles that are loaded from disk, in order."""
    bundles: list[Bundle] = []
    load = runtime.load

    def noting(bundle: Bundle) -> runtime.LoadedGraph:
        bundles.append(bundle)
        return load(bundle)

    monkeypatch.setattr(runtime, "load", noting)
    return bundles


@dataclass
class Machine:
    """Has ``free`` bytes beside what must stay free and what our bundles take."""

    free: int = 1 << 40
    asked_of_neighbours: list[int] = field(default_factory=list)
    neighbours_have: int = 0

    def now(self) -> Memory:
        return Memory(FREE + self.free - residency.resident_bytes(), 0)

    def make_room(self, needed: int) -> None:
        self.asked_of_neighbours.append(needed)
        self.free += self.neighbours_have

    def loaded(self) -> None: ...

    def released(self) -> None: ...


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(Memory, "now", machine.now)
    monkeypatch.setattr(residency, "neighbours", machine)
    return machine


def names() -> list[str]:
    """The kinds of what is loaded, the least recently used first."""
    return [resident.bundle.spec.kind for resident in residency.loaded()]


def test_stage_releases_when_the_block_ends(model: ModelSet, loads: list[Bundle]) -> None:
    with using(model.dit, "stage") as first:
        assert names() == ["DiT"]
        assert residency.resident_bytes() == weight_bytes(model.dit)
    assert names() == []
    with pytest.raises(RuntimeError, match="load it again"):
        first["main"]
    with using(model.dit):
        pass
    assert loads == [model.dit, model.dit]


def test_all_keeps_and_uses_again(model: ModelSet, loads: list[Bundle]) -> None:
    for _ in range(2):
        for bundle in (model.text_encoder, model.dit):
            with using(bundle, "all"):
                pass
    assert loads == [model.text_encoder, model.dit]
    with using(model.text_encoder, "all"):
        assert names() == ["DiT", "text encoder"]
    assert residency.resident_bytes() == weight_bytes(model.text_encoder) + weight_bytes(model.dit)
    residency.release_all()
    assert residency.resident_bytes() == 0


def test_stage_is_alone_in_memory(model: ModelSet) -> None:
    for bundle in (model.text_encoder, model.dit):
        with using(bundle, "all"):
            pass
    with using(model.vae_decoder(16, 16), "stage"):
        assert names() == ["VAE decoder"]


def test_stage_inside_another_leaves_the_outer_one(model: ModelSet) -> None:
    with using(model.dit, "all"):
        with using(model.vae_decoder(16, 16), "stage"):
            assert names() == ["DiT", "VAE decoder"]
        assert names() == ["DiT"]
    assert names() == ["DiT"]


def test_auto_keeps_while_the_largest_other_would_fit(model: ModelSet, machine: Machine) -> None:
    encoder, dit = model.text_encoder, model.dit
    for free, kept in ((weight_bytes(dit) - 1, []), (weight_bytes(dit), ["text encoder"])):
        machine.free = weight_bytes(encoder) + free
        with using(encoder, "auto", others=model.bundles):
            pass
        assert names() == kept


def test_auto_needs_no_room_for_what_is_in_memory(model: ModelSet, machine: Machine) -> None:
    decoder = max(model.vae_decoders.values(), key=weight_bytes)
    machine.free = weight_bytes(model.dit) + weight_bytes(model.text_encoder) + weight_bytes(decoder)
    for bundle in (model.dit, model.text_encoder):
        with using(bundle, "auto", others=[model.dit, model.text_encoder, decoder]):
            pass
    assert names() == ["DiT", "text encoder"]


def test_what_is_kept_makes_room_the_oldest_first(model: ModelSet, machine: Machine) -> None:
    decoders = list(model.vae_decoders.values())
    for bundle in (model.text_encoder, *decoders[:2], model.text_encoder):
        with using(bundle, "all"):
            pass
    machine.free = residency.resident_bytes() + 1000  # the decoders differ by a few bytes
    with using(decoders[2], "all", working=100):
        pass
    assert [resident.bundle for resident in residency.loaded()] == [decoders[1], model.text_encoder, decoders[2]]
    assert machine.asked_of_neighbours == []


def test_neighbours_make_room_when_nothing_is_kept(model: ModelSet, machine: Machine) -> None:
    machine.free, machine.neighbours_have = weight_bytes(model.dit), 5
    with using(model.dit, working=5):
        pass
    assert machine.asked_of_neighbours == [FREE + weight_bytes(model.dit) + 5]


def test_what_does_not_fit_is_refused_before_it_is_loaded(
    model: ModelSet, machine: Machine, loads: list[Bundle]
) -> None:
    with using(model.text_encoder, "all"):
        pass
    machine.free = weight_bytes(model.dit) - 1
    with pytest.raises(NotEnoughMemoryError, match=r"the DiT needs 0\.010 GB, 1\.0 GB are available"), using(model.dit):
        pass
    assert loads == [model.text_encoder]
    assert names() == []
    assert len(machine.asked_of_neighbours) == 1
    machine.free = weight_bytes(model.dit)
    with using(model.dit):
        assert names() == ["DiT"]


def test_whether_something_will_fit_counts_what_is_only_kept(model: ModelSet, machine: Machine) -> None:
    machine.free = weight_bytes(model.dit) + weight_bytes(model.text_encoder)
    with using(model.text_encoder, "all"):
        with pytest.raises(NotEnoughMemoryError):
            residency.check_will_fit(model.dit, 1)
        assert not residency.fits(model.dit, 1)
    residency.check_will_fit(model.dit, 1)
    assert residency.fits(model.dit, weight_bytes(model.text_encoder))
    assert not residency.fits(model.dit, weight_bytes(model.text_encoder) + 1)


def test_what_is_in_use_goes_when_it_no_longer_is(model: ModelSet) -> None:
    with using(model.dit, "all"), using(model.dit, "all"):
        assert residency.release(1) == 0
        residency.release_all()
        assert names() == ["DiT"]
    assert names() == []


def test_release_frees_no_more_than_it_must(model: ModelSet) -> None:
    for bundle in (model.text_encoder, model.dit):
        with using(bundle, "all"):
            pass
    assert residency.release(1) == weight_bytes(model.text_encoder)
    assert names() == ["DiT"]
    assert residency.release(1 << 60) == weight_bytes(model.dit)
    assert residency.release(1) == 0


def test_another_bundle_in_the_same_folder_replaces_the_one_that_was_kept(model: ModelSet, tmp_path: Path) -> None:
    small, large = (shutil.copytree(model.vae_decoder(size, size).path, tmp_path / f"{size}") for size in (16, 32))
    path = tmp_path / "vae.aimodel"
    small.rename(path)
    with using(read_bundle(path), "all"):
        pass
    shutil.rmtree(path)
    large.rename(path)
    with using(read_bundle(path), "all") as graph:
        assert graph.spec.output("image").shape == (1, 4, 512, 512)
    assert [resident.bundle.sha256 for resident in residency.loaded()] == [model.vae_decoder(32, 32).sha256]


def test_a_failed_load_leaves_nothing_and_the_next_one_works(model: ModelSet, monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(*_: object) -> None:
        raise RuntimeError("it cannot be loaded")

    with monkeypatch.context() as broken:
        broken.setattr(runtime, "_load", failing)
        with pytest.raises(RuntimeError, match="cannot be loaded"), using(model.dit, "all"):
            pass
    assert names() == []
    with using(model.dit, "all"):
        assert names() == ["DiT"]


def test_a_run_that_memory_stopped_keeps_nothing(model: ModelSet) -> None:
    with using(model.text_encoder, "all"):
        pass
    with pytest.raises(NotEnoughMemoryError), using(model.dit, "all"):
        raise NotEnoughMemoryError("stopped")
    assert names() == []


def test_an_unknown_choice_is_refused(model: ModelSet, loads: list[Bundle]) -> None:
    with (
        pytest.raises(ContractError, match="keep_loaded is 'always': choose one of auto, stage, all"),
        using(model.dit, "always"),
    ):
        pass
    assert loads == []


def test_threads_share_what_is_loaded_and_get_right_answers_while_it_comes_and_goes(
    model: ModelSet, loads: list[Bundle]
) -> None:
    """Some use the encoder, with one choice or another; meanwhile others have memory released."""
    ids = model.tokenizer.encode("a red star").ids
    with using(model.text_encoder) as encoder:
        expected = encoder(input_ids=ids)["hidden"]
    stop = threading.Event()

    def right_answers(seed: int) -> int:
        choose = random.Random(seed)
        right = 0
        for _ in range(25):
            with using(model.text_encoder, choose.choice(residency.KEEP), others=model.bundles) as encoder:
                right += np.array_equal(encoder(input_ids=ids)["hidden"], expected)
        return right

    def releaser() -> None:
        while not stop.is_set():
            residency.release(1)
            residency.release_all()
            residency.loaded()
            stop.wait(0.002)

    with ThreadPoolExecutor(7) as threads:
        releasing = threads.submit(releaser)
        right = list(threads.map(right_answers, range(6)))
        stop.set()
        releasing.result()
    assert right == [25] * 6
    assert len(loads) < 1 + 6 * 25


def test_threads_that_want_the_same_bundle_load_it_once(model: ModelSet, loads: list[Bundle]) -> None:
    together = threading.Barrier(4)

    def use() -> None:
        together.wait()
        with using(model.dit, "all"):
            together.wait()

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(use) for _ in range(4)]:
            done.result()
    assert loads == [model.dit]


@pytest.mark.slow
def test_processes_that_exit_with_everything_kept_exit_0() -> None:
    done = [start("memory.py", "kept_at_exit", EMBEDDED_FOLDER) for _ in range(3)]
    assert [process.returncode for process in done] == [0] * 3, done[-1].stderr
    assert [process.stdout.splitlines()[-1] for process in done] == ["5"] * 3
