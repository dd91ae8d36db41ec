"""Compiling with a stand-in for Apple's tool that makes what the Linux runtime really loads, or fails as it would."""

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from coreai_rgba_image.host import compiled, compiler, mac, process
from coreai_rgba_image.host.bundle import Bundle, read_bundle
from coreai_rgba_image.host.cli.compile import add_compile
from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.model_set import EMBEDDED_FOLDER

from .stand_in import Play, calls, environment, player

CHILD = Path(__file__).parent / "children" / "compile_set.py"
ENCODER = "qi21_encoder_dynL_w16a32_ids_iofp32"


@pytest.fixture(scope="session")
def mac_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mac")


@pytest.fixture
def play(mac_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    play = player(monkeypatch, mac_folder)
    play()
    (mac_folder / "calls").unlink(missing_ok=True)
    return play


@pytest.fixture(scope="session")
def compiled_before(mac_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of one bundle, compiled."""
    folder = tmp_path_factory.mktemp("sets") / "set"
    path = Path(shutil.copytree(EMBEDDED_FOLDER / f"{ENCODER}.aimodel", folder / f"{ENCODER}.aimodel"))
    with pytest.MonkeyPatch.context() as patch:
        player(patch, mac_folder)()
        compiler.compile_bundle(read_bundle(path))
    return folder


@pytest.fixture
def bundle(compiled_before: Path, tmp_path: Path) -> Bundle:
    """One that was compiled before."""
    return read_bundle(Path(shutil.copytree(compiled_before, tmp_path / "set")) / f"{ENCODER}.aimodel")


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file and folder, hidden ones too, with its size and time."""
    return {
        path.relative_to(folder).as_posix(): (path.stat().st_size, path.stat().st_mtime_ns)
        if path.is_file()
        else (0, 0)
        for path in folder.rglob("*")
    }


def problem_on_a_mac(bundle: Bundle) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mac, "on_mac", lambda: True)
        return compiled.state(bundle).problem


FAULTS = {
    "no Xcode at all": ({"fail": "no xcrun"}, "no xcrun on PATH.*needs a Mac with Xcode 27"),
    "command line tools alone": ({"fail": "no xcode"}, "sudo xcode-select -s"),
    "licence not accepted": ({"fail": "licence"}, "sudo xcodebuild -license accept"),
    "tool missing": ({"fail": "no tool"}, "xcodebuild -downloadComponent MetalToolchain"),
    "toolchain of an older Xcode": ({"fail": "old toolchain"}, "xcodebuild -showComponent MetalToolchain"),
    "disk full meanwhile": ({"fail": "full"}, "disk became full.*make room"),
    "no output": ({"fail": "nothing"}, "made no copy.*Try again.*xcrun coreai-build compile"),
    "no output and a line": ({"fail": "anec"}, r"ANECCompileOffline\(\) failed.*xcrun coreai-build compile"),
    "an error of the tool": ({"fail": "error"}, "was not compiled.*MPSMemrefAllocFusion"),
    "a copy that crashes": ({"fail": "truncated"}, "dies by SIG.*Nothing was kept"),
    "unknown chip": ({"chip": "Apple M9 Max"}, "'Apple M9 Max' is not known here.*--architecture"),
    "architecture of another chip": ({"architecture": "h13g"}, "compiled for h13g, does not load here.*--architecture"),
    "no architecture": ({"architecture": "../h16c"}, "it is a name like h16c"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_in_a_message_and_the_next_run_is_good(bundle: Bundle, play: Play, fault: str) -> None:
    how, message = FAULTS[fault]
    before = files_of(bundle.path.parent)
    play(**{name: value for name, value in how.items() if name != "architecture"})
    with pytest.raises(ContractError, match=message):
        compiler.compile_bundle(bundle, how.get("architecture"))
    assert files_of(bundle.path.parent) == before
    play()
    compiler.compile_bundle(bundle)
    assert problem_on_a_mac(bundle) == ""
    assert files_of(bundle.path.parent).keys() == before.keys()


def test_nothing_is_left_of_a_first_compile_that_fails(bundle: Bundle, play: Play) -> None:
    shutil.rmtree(bundle.path.parent / "aot")
    before = files_of(bundle.path.parent)
    play(fail="full")
    with pytest.raises(ContractError):
        compiler.compile_bundle(bundle)
    assert files_of(bundle.path.parent) == before


def test_a_full_disk_is_found_before_the_tool_is_called(
    bundle: Bundle, play: Play, mac_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files_of(bundle.path.parent)
    with monkeypatch.context() as patch:
        free = compiled.expected_size(bundle) - 1
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - free, free))
        with pytest.raises(ContractError, match=r"needs about.*are free: make room"):
            compiler.compile_bundle(bundle)
    assert (calls(mac_folder), files_of(bundle.path.parent)) == ([], before)
    compiler.compile_bundle(bundle)


def test_the_old_copy_comes_back_if_the_new_one_cannot_take_its_place(
    bundle: Bundle, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files_of(bundle.path.parent)
    rename = Path.rename

    def fail_once(path: Path, target: Path) -> Path:
        if compiler.TEMPORARY_PREFIX in str(path) and path.name.endswith(compiled.SUFFIX):
            raise OSError(28, "No space left on device")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail_once)
        with pytest.raises(ContractError, match=r"No space left on device.*make room"):
            compiler.compile_bundle(bundle)
    assert files_of(bundle.path.parent) == before


def test_it_can_be_cancelled(bundle: Bundle, play: Play, mac_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (mac_folder / "compiling").unlink(missing_ok=True)
    before = files_of(bundle.path.parent)
    play(fail="hang")
    with pytest.raises(process.CancelledError):
        compiler.compile_bundle(bundle, cancelled=(mac_folder / "compiling").exists)
    assert files_of(bundle.path.parent) == before
    assert not psutil.pid_exists(int((mac_folder / "compiling").read_text()))
    play()
    compiler.compile_bundle(bundle)


@pytest.fixture
def compiling(bundle: Bundle, mac_folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process, in the midst of compiling the bundle."""
    started = mac_folder / "compiling"
    started.unlink(missing_ok=True)
    env = environment(mac_folder, fail="hang")
    with subprocess.Popen([sys.executable, str(CHILD), str(bundle.path)], env=env, stderr=subprocess.PIPE) as child:
        while not started.exists() or not started.read_text():
            assert child.poll() is None
            time.sleep(0.05)
        yield child
        child.kill()
    tool = int(started.read_text())
    if psutil.pid_exists(tool):
        os.kill(tool, signal.SIGKILL)


def test_control_c_leaves_nothing(
    bundle: Bundle, play: Play, compiling: subprocess.Popen[bytes], compiled_before: Path, mac_folder: Path
) -> None:
    assert len(list(bundle.path.parent.glob(f"{compiler.TEMPORARY_PREFIX}*"))) == 1
    compiling.send_signal(signal.SIGINT)
    _, said = compiling.communicate(timeout=20)
    assert b"KeyboardInterrupt" in said
    assert files_of(bundle.path.parent) == files_of(compiled_before)
    assert not psutil.pid_exists(int((mac_folder / "compiling").read_text()))
    play()
    compiler.compile_bundle(bundle)


def test_after_a_kill_the_next_run_waits_for_the_tool_and_cleans_up(
    bundle: Bundle, play: Play, compiling: subprocess.Popen[bytes], compiled_before: Path, mac_folder: Path
) -> None:
    with pytest.raises(ContractError, match=f"process {compiling.pid} compiles {bundle.path.name}.*wait until"):
        compiler.compile_bundle(bundle)
    compiling.kill()
    compiling.wait()
    with pytest.raises(ContractError, match="wait until it has ended"):  # the tool goes on by itself
        compiler.compile_bundle(bundle)
    tool = int((mac_folder / "compiling").read_text())
    os.kill(tool, signal.SIGKILL)
    while psutil.pid_exists(tool) and psutil.Process(tool).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.05)
    assert problem_on_a_mac(bundle) == ""  # the old copy was not touched
    play()
    compiler.compile_bundle(bundle)
    assert files_of(bundle.path.parent).keys() == files_of(compiled_before).keys()


def is_compiled_again(bundle: Bundle, play: Play, mac_folder: Path, **more: str) -> bool:
    """Whether ``compile_set`` calls the tool, which fails."""
    play(fail="error", **more)
    before = len(calls(mac_folder))
    with contextlib.suppress(ContractError):
        compiler.compile_set([bundle])
    return len(calls(mac_folder)) > before


def test_what_is_up_to_date_is_not_compiled_again(bundle: Bundle, play: Play, mac_folder: Path) -> None:
    assert not is_compiled_again(bundle, play, mac_folder)
    assert is_compiled_again(bundle, play, mac_folder, os_build="27A1")
    assert is_compiled_again(bundle, play, mac_folder, tool="2")
    assert is_compiled_again(replace(bundle, sha256="0" * 64), play, mac_folder)
    assert is_compiled_again(bundle, play, mac_folder, chip="Apple M1")
    [record] = bundle.path.parent.glob("aot/*/*.json")
    text = record.read_text()
    for damage in ("", "[]", "{}", text.replace("26A428", "")):
        record.write_text(damage)
        assert is_compiled_again(bundle, play, mac_folder)
    record.write_text(text)
    assert not is_compiled_again(bundle, play, mac_folder)
    [program] = bundle.path.parent.glob("aot/*/*/*.odix")
    os.truncate(program, program.stat().st_size - 1)
    assert is_compiled_again(bundle, play, mac_folder)
    record.unlink()
    assert is_compiled_again(bundle, play, mac_folder)


def test_a_set_is_compiled_bundle_by_bundle_until_one_fails(
    bundle: Bundle, play: Play, mac_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = read_bundle(Path(shutil.copytree(bundle.path, bundle.path.with_name("other.aimodel"))))
    made: list[tuple[str, str]] = []
    copies = compiler.compile_set([bundle, other], report=lambda now: made.append((now.bundle.path.stem, now.stage)))
    stages = list(dict.fromkeys(made))
    assert stages == [(ENCODER, "up to date"), *((other.path.stem, name) for name in ("compile", "load check", "done"))]
    assert [copy.name for copy in copies] == [f"{item.path.stem}.h16c.aimodelc" for item in (bundle, other)]
    [arguments] = calls(mac_folder)
    assert arguments[:3] == ["coreai-build", "compile", str(other.path)]
    assert re.search("--architecture h16c --preferred-compute gpu --expect-frequent-reshapes$", " ".join(arguments))
    play(fail="error")
    with pytest.raises(ContractError, match="was not compiled"):
        compiler.compile_set([bundle, other], force=True)
    assert len(calls(mac_folder)) == 2


def run_command(*arguments: str) -> None:
    parser = argparse.ArgumentParser()
    add_compile(parser.add_subparsers())
    options = parser.parse_args(["compile", *arguments])
    options.run(options)


def test_the_command_says_what_it_does(bundle: Bundle, play: Play, capsys: pytest.CaptureFixture[str]) -> None:
    folder = bundle.path.parent
    run_command(str(folder), "encoder")
    name, copy = bundle.path.name, compiled.copy_path(bundle, "h16c").resolve()
    assert capsys.readouterr().out.splitlines() == [f"{name}: up to date", str(copy)]
    run_command(str(folder), "--force")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [name, name, name, str(copy)]
    assert re.search(r"done in 0:\d\d$", lines[2])
    with pytest.raises(ContractError, match="no part decoder: a set has dit, encoder, vae"):
        run_command(str(folder), "decoder")
    with pytest.raises(ContractError, match="holds no DiT"):
        run_command(str(folder), "dit")


def test_the_advice_is_a_command_that_works(bundle: Bundle, play: Play, capsys: pytest.CaptureFixture[str]) -> None:
    moved = bundle.path.parent.rename(bundle.path.parent.parent / "a user's set")
    program, command, *arguments = shlex.split(compiled.compile_advice(read_bundle(moved / bundle.path.name)))
    assert (program, command) == ("coreai-rgba", "compile")
    run_command(*arguments)
    assert "up to date" in capsys.readouterr().out
