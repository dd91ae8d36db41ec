"""Loads of compiled copies in a process that takes itself for a Mac, where each fault would end it.

``python mac_loads.py SET WORK`` copies SET, one compiled bundle, into WORK for each case, does harm to it, loads and
calls it, follows the advice, loads and calls it again, and prints as JSON how both ended:
``{case: [[error class, message], [error class, message]]}``. It needs the environment and the folder of the stand-ins.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from as_a_mac import become_a_mac
from engine import inputs_for

from coreai_rgba_image.host import child, compiler, probe, runtime
from coreai_rgba_image.host.bundle import read_bundle


def copy_in(folder: Path) -> Path:
    [copy] = folder.glob("aot/*/*.aimodelc")
    return copy


def record_in(folder: Path) -> Path:
    [record] = folder.glob("aot/*/*.json")
    return record


def truncate(folder: Path) -> None:
    program = copy_in(folder) / "main-universal.odix"
    os.truncate(program, program.stat().st_size // 2)


def truncate_without_a_record(folder: Path) -> None:
    record_in(folder).unlink()
    truncate(folder)


def of_another_source(folder: Path) -> None:
    record = json.loads(record_in(folder).read_text())
    record_in(folder).write_text(json.dumps(record | {"source_sha256": "0" * 64}))


def of_another_chip(folder: Path) -> None:
    """As if the disk came from a Mac with another chip; here such a copy holds nothing that can be loaded."""
    record_in(folder).unlink()
    copy = copy_in(folder)
    shutil.rmtree(copy)
    other = copy.with_name(copy.name.replace("h16c", "h13g"))
    other.mkdir()
    (other / "main-h13g.mlirb").write_bytes(b"marker")


def of_two_other_chips(folder: Path) -> None:
    of_another_chip(folder)
    copy = copy_in(folder)
    shutil.copytree(copy, copy.with_name(copy.name.replace("h13g", "h14s")))


def by_hand(folder: Path) -> None:
    record_in(folder).unlink()


def damage_source(folder: Path) -> None:
    [program] = folder.glob("*.aimodel/main.mlirb")
    os.truncate(program, program.stat().st_size - 1)


def new_time(folder: Path) -> None:
    """So that it is tried again."""
    os.utime(copy_in(folder) / "main-universal.odix", (1, 1))


def new_macos(folder: Path) -> None:
    program = Path(os.environ["STAND_IN_FOLDER"]) / "programs" / "sw_vers"
    program.write_text("#!/bin/sh\necho 27B1\n")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "none": (lambda folder: None, ""),
    "by hand": (by_hand, ""),
    "not compiled": (lambda folder: shutil.rmtree(folder / "aot"), ""),
    "of another chip": (of_another_chip, ""),
    "of two other chips": (of_two_other_chips, ""),
    "truncated": (truncate, ""),
    "truncated, by hand": (truncate_without_a_record, ""),
    "of another source": (of_another_source, ""),
    "record damaged": (lambda folder: record_in(folder).write_text("{"), ""),
    "source damaged": (damage_source, ""),
    "dies under a new macOS": (new_macos, f"import os; os.kill(os.getpid(), {signal.SIGABRT:d})"),
    "hangs": (new_time, "import time; time.sleep(60)"),
}
"""What is done to a set, and what the process that tries its copy does instead, if it is not the real one."""


def outcome(bundle: Path) -> list[str]:
    try:
        with runtime.load(read_bundle(bundle)) as graph:
            graph(**inputs_for(graph.spec))
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["no error", ""]


def mend(case: str, bundle: Path, source: Path) -> None:
    """Do what the message says."""
    if case == "source damaged":
        shutil.rmtree(bundle)
        shutil.copytree(source / bundle.name, bundle)
    elif case != "hangs":  # then it is only to be tried again
        compiler.compile_set([read_bundle(bundle)])


def main(source: Path, work: Path) -> None:
    become_a_mac()
    results = {}
    for case, (damage, code) in DAMAGES.items():
        folder = Path(shutil.copytree(source, work / case))
        [bundle] = folder.glob("*.aimodel")
        damage(folder)
        with patch.object(child, "START", code or child.START), patch.object(probe, "TIME_LIMIT", 1 if code else 60):
            first = outcome(bundle)
        mend(case, bundle, source)
        results[case] = [first, outcome(bundle)]
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
