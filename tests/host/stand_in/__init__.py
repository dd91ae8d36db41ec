"""A Mac that is none: programs named ``xcrun``, ``sysctl`` and ``sw_vers`` that answer as the real ones are said to.

What ``xcrun coreai-build compile`` makes here is the runtime's compiled form for Linux, in the layout of a Mac's, so
it can really be loaded; an architecture that is not the chip's gives one that cannot. ``AS_A_MAC`` is the script
``coreai-rgba`` in a process that takes itself for a Mac, and so loads such copies.
"""

import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
AS_A_MAC = HERE / "as_a_mac.py"

Play = Callable[..., None]

AT_ONCE = ("no xcrun", "no xcode", "licence", "no tool")
FAILURES = (*AT_ONCE, "old toolchain", "full", "nothing", "anec", "error", "truncated", "hang")
"""What ``fail`` of ``environment`` may be."""


def environment(
    folder: Path, chip: str = "Apple M4 Max", fail: str = "", *, os_build: str = "26A428", tool: str = "1"
) -> dict[str, str]:
    """The environment of a process on such a Mac, which keeps its programs and what they were asked in ``folder``.

    ``tool`` stands for the version of ``coreai-build``.
    """
    if fail and fail not in FAILURES:
        raise ValueError(f"cannot play {fail!r}: {FAILURES}")
    programs = folder / "programs"
    programs.mkdir(parents=True, exist_ok=True)
    tool_path = folder / "coreai-build"
    tool_path.write_text(tool)
    _write_program(programs / "sysctl", f"echo {shlex.quote(chip)}")
    _write_program(programs / "sw_vers", f"echo {os_build}")
    xcrun = programs / "xcrun"
    found = "" if fail in AT_ONCE else f'[ "$*" = "--find coreai-build" ] && exec echo {shlex.quote(str(tool_path))}\n'
    _write_program(xcrun, f'{found}exec {shlex.quote(sys.executable)} {shlex.quote(str(HERE / "xcrun.py"))} "$@"')
    path = os.environ["PATH"]
    if fail == "no xcrun":
        xcrun.unlink()
    own = {"PATH": f"{programs}{os.pathsep}{path}", "STAND_IN_FOLDER": str(folder), "STAND_IN_FAIL": fail}
    return os.environ | own


def player(patch: pytest.MonkeyPatch, folder: Path) -> Play:
    """Lets this process be on the Mac that the arguments of ``environment`` describe."""

    def play(*arguments: str, **more: str) -> None:
        for name, value in environment(folder, *arguments, **more).items():
            patch.setenv(name, value)

    return play


def calls(folder: Path) -> list[list[str]]:
    """The arguments that ``xcrun coreai-build`` was called with, call by call."""
    log = folder / "calls"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def _write_program(path: Path, lines: str) -> None:
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)
