"""Trying compiled copies: the process that tries them really dies, ours does not."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from coreai_rgba_image.host import child, probe, process
from coreai_rgba_image.host.bundle import read_bundle
from coreai_rgba_image.host.contract import DIT, ContractError
from coreai_rgba_image.host.files import CACHE_VARIABLE
from coreai_rgba_image.host.model_set import EMBEDDED_FOLDER

from .stand_in import Play, player

SOURCE = EMBEDDED_FOLDER / "qi21_encoder_dynL_w16a32_ids_iofp32.aimodel"


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    play = player(monkeypatch, tmp_path / "mac")
    play()
    return play


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy that loads."""
    from coreai.authoring import AIModelAsset

    copy = tmp_path_factory.mktemp("made") / "encoder.h16c.aimodelc"
    copy.mkdir()
    AIModelAsset.load(SOURCE)._write_odix(copy)
    return copy


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / made.name, copy_function=shutil.copyfile))


def refuse_to_start(*_: object, **__: object) -> None:
    pytest.fail("it was tried again")


def test_a_copy_that_loads_is_tried_once(play: Play, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe.known(copy) is None
    assert probe.problem_of(SOURCE, copy) == ""
    monkeypatch.setattr(process, "run", refuse_to_start)
    assert probe.problem_of(SOURCE, copy) == probe.known(copy) == ""
    elsewhere = copy.rename(copy.parent / "moved").rename(copy.parent / copy.name)
    assert probe.known(elsewhere) == ""
    # What came out holds for these files on this chip and this macOS.
    play(os_build="27A1")
    assert probe.known(copy) is None
    play("Apple M1")
    assert probe.known(copy) is None
    play()
    assert probe.known(copy) == ""
    (copy / "._main").touch()
    assert probe.known(copy) == ""
    os.utime(copy / "main-universal.odix", (1, 1))
    assert probe.known(copy) is None


def test_a_truncated_copy_kills_only_the_process_that_tries_it(play: Play, copy: Path) -> None:
    program = copy / "main-universal.odix"
    whole = program.read_bytes()
    os.truncate(program, len(whole) // 2)
    problem = probe.problem_of(SOURCE, copy)
    assert "the process dies by SIG" in problem
    assert probe.known(copy) == problem
    program.write_bytes(whole)
    assert probe.problem_of(SOURCE, copy) == ""


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGBUS, signal.SIGTRAP])
def test_a_crash_is_told_and_remembered(
    play: Play, copy: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"import os; print('ANERegion.mm:414 failed assertion', flush=True); os.kill(os.getpid(), {number:d})"
    monkeypatch.setattr(child, "START", code)
    problem = probe.problem_of(SOURCE, copy)
    assert problem == f"the process dies by {number.name}, its last words: ANERegion.mm:414 failed assertion"
    monkeypatch.setattr(process, "run", refuse_to_start)
    assert probe.problem_of(SOURCE, copy) == problem


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os; os.kill(os.getpid(), 9)", "killed, perhaps because memory ran out"),
        ("import os; os.kill(os.getpid(), 15)", "try again"),
        ("import time; time.sleep(60)", "did not load within"),
    ],
)
def test_what_says_nothing_about_the_copy_is_not_remembered(
    play: Play, copy: Path, code: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(child, "START", code)
        patch.setattr(probe, "TIME_LIMIT", 1 if "sleep" in code else 60)
        with pytest.raises(ContractError, match=message):
            probe.problem_of(SOURCE, copy)
    assert probe.known(copy) is None


def test_an_error_is_told_in_its_own_words_and_not_remembered(play: Play, copy: Path) -> None:
    shutil.rmtree(copy)
    copy.mkdir()
    assert probe.problem_of(SOURCE, copy).startswith("with RuntimeError: ")
    assert probe.known(copy) is None


def test_a_copy_of_another_graph_is_found_out_by_the_call(play: Play, copy: Path) -> None:
    """Every function is there, so it loads; only a call tells."""
    [vae] = EMBEDDED_FOLDER.glob("*vae_256*")
    assert probe.problem_of(vae, copy) != ""


def test_it_can_be_cancelled(play: Play, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SECONDS_BETWEEN_REPORTS", 0.01)
    with pytest.raises(process.CancelledError):
        probe.problem_of(SOURCE, copy, cancelled=lambda: True)
    assert probe.known(copy) is None


def test_a_memory_that_cannot_be_kept_costs_time_only(
    play: Play, copy: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(copy / "main-universal.odix" / "below-a-file"))
    assert probe.problem_of(SOURCE, copy) == ""
    assert "it is tried each time" in caplog.text


def test_it_calls_with_the_smallest_arrays_that_the_graph_takes() -> None:
    spec = DIT.bind({"D": 128})
    arrays = probe.smallest_inputs(spec)
    spec.check(arrays)
    assert (arrays["txt_feats"].shape, arrays["img_tokens"].shape) == ((1, 8, 128), (1, 64, 64))
    read_bundle(SOURCE).spec.check(probe.smallest_inputs(read_bundle(SOURCE).spec))
