"""Everything that only a Mac has: its chip, its macOS, Apple's compiler, the options of a load.

None of this was run on a Mac by us. It is written to what is documented of these programs, and tested with stand-ins
of the same names; each is looked for on ``PATH``.
"""

import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from .contract import ContractError
from .files import hash_file

LICENCE_NOT_ACCEPTED = 69
UTILITY_NOT_FOUND = 72
"""Exit statuses of ``xcrun``."""

NO_XCODE = (
    "this needs a Mac with Xcode 27: install it, open it once, and select it with "
    "sudo xcode-select -s /Applications/Xcode.app"
)
NO_LICENCE = "the licence of Xcode is not accepted yet: sudo xcodebuild -license accept"
NO_TOOL = (
    "coreai-build is missing, which comes with the Metal Toolchain: xcodebuild -downloadComponent MetalToolchain. "
    "If xcodebuild -showComponent MetalToolchain finds it, another Xcode is selected: "
    "sudo xcode-select -s /Applications/Xcode.app"
)

SECONDS_TO_ANSWER = 60
FIRST_GENERATION = 12
"""M1 is h13, M5 is h17."""
GENERATIONS = 5
VARIANTS = {"": "g", "Pro": "s", "Max": "c", "Ultra": "d"}
"""Letter of a variant. Only c (M4 Max = h16c) is verified, the others are inferred from Apple's names for its GPUs."""


def on_mac() -> bool:
    return sys.platform == "darwin"


def chip() -> str:
    """Name of this Mac's chip, ``Apple M4 Max``."""
    return _answer("sysctl", "-n", "machdep.cpu.brand_string")


def architecture() -> str:
    """What ``coreai-build`` calls this Mac's chip, ``h16c``. Raises ``ContractError`` for a chip we do not know."""
    name = chip()
    found = re.fullmatch(r"Apple M(\d+)(?: (Pro|Max|Ultra))?", name)
    if not found or not 1 <= int(found[1]) <= GENERATIONS:
        raise ContractError(
            f"the architecture of the chip {name!r} is not known here, only of M1 to M{GENERATIONS}: name it with "
            "--architecture; h16c is the M4 Max, a wrong one is found out before anything is kept"
        )
    return f"h{FIRST_GENERATION + int(found[1])}{VARIANTS[found[2] or '']}"


def os_build() -> str:
    """The build of macOS, ``26A428``."""
    return _answer("sw_vers", "-buildVersion")


def tool_version() -> str:
    """Tells one ``coreai-build`` from another: the start of its program's SHA-256.

    Raises ``ContractError`` with what to install where there is none.
    """
    return hash_file(Path(_answer("xcrun", "--find", "coreai-build")))[:12]


def compile_command(bundle: Path, output: Path, architecture: str) -> list[str]:
    """Compiles ``bundle`` to ``output/<name>.<architecture>.aimodelc``.

    Frequent reshapes, because otherwise a 32-block DiT aborts and every new size is compiled anew; one
    architecture, because without a name it compiles for all twenty, at up to 27 GB each.
    """
    return [
        "xcrun", "coreai-build", "compile", str(bundle), "--output", str(output), "--platform", "macOS",
        "--architecture", architecture, "--preferred-compute", "gpu", "--expect-frequent-reshapes",
    ]  # fmt: skip


def explain(status: int, output: str) -> str:
    """Why ``xcrun`` or what it started failed, with the way out."""
    said = output.lower()
    if status == LICENCE_NOT_ACCEPTED:
        return NO_LICENCE
    if "requires xcode" in said or "no developer tools" in said or "invalid active developer path" in said:
        return NO_XCODE
    if status == UTILITY_NOT_FOUND or "unable to find utility" in said or "requires the metal toolchain" in said:
        return NO_TOOL
    ended = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return f"it {ended}. Its last words: {last_words(output)}"


def last_words(output: str, count: int = 3) -> str:
    """The last lines of what a program printed, as one."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return " / ".join(lines[-count:])[-600:] or "none"


def load_options(runtime: ModuleType) -> Any:
    """Options for ``AIModel.load``, None elsewhere: on a Mac, None would leave symbols of MPSGraph unresolved."""
    return runtime.SpecializationOptions.default() if on_mac() else None


def _answer(*command: str) -> str:
    """What a program prints. Raises ``ContractError`` if it cannot be run or fails."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS_TO_ANSWER, check=False
        )
    except FileNotFoundError as error:
        raise ContractError(f"there is no {command[0]} on PATH: {NO_XCODE}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ContractError(f"{' '.join(command)} cannot be run ({error}): {NO_XCODE}") from error
    if done.returncode:
        raise ContractError(f"{' '.join(command)}: {explain(done.returncode, done.stdout + done.stderr)}")
    return done.stdout.strip()
