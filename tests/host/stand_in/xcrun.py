"""Stands in for ``xcrun``: plays ``coreai-build compile`` and its failures."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(os.environ["STAND_IN_FOLDER"])
FAIL = os.environ["STAND_IN_FAIL"]

AT_ONCE = {
    "no xcode": (1, "xcode-select: error: tool 'coreai-build' requires Xcode, but an instance of the command line "
                    "tools is the active developer directory"),
    "licence": (69, "You have not agreed to the Xcode license agreements."),
    "no tool": (72, 'xcrun: error: unable to find utility "coreai-build", not a developer tool or in PATH'),
}  # fmt: skip
"""Whatever is asked."""

WHILE_COMPILING = {
    "old toolchain": (1, "error: Core AI requires the Metal Toolchain"),
    "nothing": (0, ""),
    "anec": (0, "ANECCompileOffline() failed"),
    "error": (1, "error: Pass failed: MPSMemrefAllocFusion"),
}

VARIANTS = {None: "g", "Pro": "s", "Max": "c", "Ultra": "d"}


def end(status: int, said: str) -> None:
    print(said, file=sys.stderr)
    sys.exit(status)


def architecture_of_chip() -> str:
    """As Apple's GPUs are named, the M4 Max h16c."""
    name = subprocess.run(["sysctl"], capture_output=True, text=True, check=True).stdout.strip()
    found = re.fullmatch(r"Apple M(\d)(?: (\w+))?", name)
    return f"h{12 + int(found[1])}{VARIANTS[found[2]]}" if found else ""


def write_compiled(bundle: Path, output: Path) -> None:
    """What the Linux runtime loads, made once for each program."""
    made = FOLDER / "made" / hashlib.sha256((bundle / "main.mlirb").read_bytes()).hexdigest()
    if not made.exists():
        from coreai.authoring import AIModelAsset

        made.parent.mkdir(exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=made.parent))  # whoever cancels the compile kills this process
        AIModelAsset.load(bundle)._write_odix(unfinished)
        unfinished.rename(made)
    shutil.copytree(made, output, copy_function=shutil.copyfile)


def compile_bundle(bundle: Path, folder: Path, architecture: str) -> None:
    output = folder / f"{bundle.stem}.{architecture}.aimodelc"
    if FAIL in WHILE_COMPILING:
        end(*WHILE_COMPILING[FAIL])
    if FAIL in ("full", "hang"):
        output.mkdir()
        (output / f"main-{architecture}.mlirb").write_bytes(bytes(1000))
        (FOLDER / "compiling").write_text(str(os.getpid()))
        if FAIL == "hang":
            time.sleep(600)
        end(1, "error: write failed: No space left on device")
    if architecture == architecture_of_chip():
        write_compiled(bundle, output)
    else:
        output.mkdir()
    (output / f"main-{architecture}.mlirb").write_bytes(b"marker")
    if FAIL == "truncated":
        largest = max(output.iterdir(), key=lambda path: path.stat().st_size)
        os.truncate(largest, largest.stat().st_size // 2)
    print(f"compiled {bundle.name}")


def main(arguments: list[str]) -> None:
    if FAIL in AT_ONCE:
        end(*AT_ONCE[FAIL])
    with (FOLDER / "calls").open("a") as log:
        log.write(json.dumps(arguments) + "\n")
    tool, action, bundle, *options = arguments
    if (tool, action) != ("coreai-build", "compile"):
        end(64, f"cannot play {arguments}")
    named = dict(zip(options[::2], options[1::2], strict=False))
    compile_bundle(Path(bundle), Path(named["--output"]), named["--architecture"])


if __name__ == "__main__":
    main(sys.argv[1:])
