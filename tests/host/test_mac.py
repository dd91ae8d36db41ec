"""What only a Mac has, asked of programs that stand in for a Mac's."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from coreai_rgba_image.host import mac
from coreai_rgba_image.host.contract import ContractError

from .stand_in import Play, player


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    return player(monkeypatch, tmp_path / "mac")


@pytest.mark.parametrize(
    ("chip", "architecture"),
    [
        ("Apple M4 Max", "h16c"),  # the one that is verified
        ("Apple M1", "h13g"),
        ("Apple M2 Pro", "h14s"),
        ("Apple M3 Ultra", "h15d"),
        ("Apple M5", "h17g"),
    ],
)
def test_the_architecture_follows_from_the_chip(play: Play, chip: str, architecture: str) -> None:
    play(chip)
    assert (mac.chip(), mac.architecture()) == (chip, architecture)


def test_the_twenty_chips_have_twenty_architectures(play: Play) -> None:
    """As many as ``coreai-build`` compiles for without being told which."""
    found = set()
    for generation in range(1, 6):
        for variant in ("", " Pro", " Max", " Ultra"):
            play(f"Apple M{generation}{variant}")
            found.add(mac.architecture())
    assert found == {f"h{number}{letter}" for number in range(13, 18) for letter in "gscd"}


@pytest.mark.parametrize("chip", ["Apple M6", "Apple M0", "Apple A18 Pro", "VirtualApple @ 2.50GHz processor", ""])
def test_an_unknown_chip_is_asked_for_its_architecture(play: Play, chip: str) -> None:
    play(chip)
    with pytest.raises(ContractError, match="--architecture"):
        mac.architecture()


def test_the_build_of_macos_and_the_version_of_the_compiler_are_told(play: Play) -> None:
    play(os_build="26A5001x")
    assert mac.os_build() == "26A5001x"
    first = mac.tool_version()
    play(tool="another")
    assert mac.tool_version() != first
    play()
    assert mac.tool_version() == first


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        ("no xcrun", "needs a Mac with Xcode 27"),
        ("no xcode", "needs a Mac with Xcode 27"),
        ("licence", "sudo xcodebuild -license accept"),
        ("no tool", "xcodebuild -downloadComponent MetalToolchain"),
    ],
)
def test_a_missing_compiler_is_named_with_what_to_do(play: Play, fail: str, message: str) -> None:
    play(fail=fail)
    with pytest.raises(ContractError, match=message):
        mac.tool_version()


def test_a_program_that_does_not_answer_is_given_up(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play()
    monkeypatch.setattr(mac, "SECONDS_TO_ANSWER", 0.2)
    (tmp_path / "mac" / "programs" / "sw_vers").write_text("#!/bin/sh\nexec sleep 10\n")
    with pytest.raises(ContractError, match="sw_vers -buildVersion cannot be run"):
        mac.os_build()


def test_it_compiles_for_the_gpu_of_one_architecture_with_frequent_reshapes() -> None:
    assert mac.compile_command(Path("a set/dit.aimodel"), Path("out"), "h16c") == [
        "xcrun", "coreai-build", "compile", "a set/dit.aimodel", "--output", "out", "--platform", "macOS",
        "--architecture", "h16c", "--preferred-compute", "gpu", "--expect-frequent-reshapes",
    ]  # fmt: skip


@pytest.mark.parametrize(("status", "said"), [(1, "error: one\n\n error: two \n"), (-9, "error: two")])
def test_an_unknown_failure_is_told_as_it_is(status: int, said: str) -> None:
    message = mac.explain(status, said)
    assert "error: two" in message
    assert ("SIGKILL" if status < 0 else "status 1") in message


def test_only_a_mac_gives_options_to_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(SpecializationOptions=SimpleNamespace(default=lambda: "default options"))
    monkeypatch.setattr(mac, "on_mac", lambda: False)
    assert mac.load_options(runtime) is None
    monkeypatch.setattr(mac, "on_mac", lambda: True)
    assert mac.load_options(runtime) == "default options"
