"""What a bundle takes on disk and in memory, the latter seen from processes that do nothing else.

``python -m coreai_rgba_image.host.bench.memory BUNDLE on|off`` loads the bundle, runs two steps with
or without reuse of the text, and prints its resident megabytes.
"""

import subprocess
import sys
from pathlib import Path

import psutil

from .. import runtime
from ..bundle import Bundle, read_bundle
from ..contract import ContractError
from ..denoiser import PromptSlot, Shortcuts
from ..latents import initial_noise, pack
from ..rope import rope_tables
from .results import Bar, Ratios, Result, Section, Spread, progress
from .steps import TIME, Setting, compile_ahead, random_embeddings, text_width

SETTING = Setting(256, 256, 494)
"""The longest text, whose keys and values are what reuse adds."""

REPEATS = 5
SIZE_BAR, MEMORY_BAR = Bar(1.02, at_least=False), Bar(1.10, at_least=False)


def resident_megabytes() -> float:
    """Of this process, without pages of shared libraries: the kernel drops and rereads tens of MB of those at will."""
    process = psutil.Process()
    if sys.platform != "linux":
        return process.memory_full_info().uss / 1e6
    return sum(mapping.rss for mapping in process.memory_maps() if ".so" not in Path(mapping.path).name) / 1e6


def megabytes_after_steps(bundle: Bundle, text_reuse: str, setting: Setting = SETTING) -> float:
    """Loads, takes two steps, and looks while everything is still there."""
    with runtime.load(bundle) as dit:
        embeddings = random_embeddings(text_width(bundle), setting.text)
        slot = PromptSlot(dit, embeddings, rope_tables(setting.text, *setting.grid), Shortcuts(text_reuse))
        denoise, x = slot.denoiser(), pack(initial_noise(0, *setting.grid))
        for _ in range(2):
            denoise(x, TIME)
        return resident_megabytes()


def megabytes_in_a_new_process(bundle: Bundle, text_reuse: str) -> float:
    command = [sys.executable, "-m", __name__, str(bundle.path), text_reuse]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = "\n".join(done.stderr.splitlines()[-1:])  # of a traceback, the error itself
        raise ContractError(f"a process that was to run {bundle.path.name} ended with {done.returncode}: {said}")
    return float(done.stdout)


def size_section(full: Bundle, alone: Bundle, repeats: int = REPEATS) -> Section:
    """``full`` has every function, ``alone`` is as published: ``main``."""
    runs = ((full, "on"), (alone, "off"))
    for bundle, _ in runs:
        compile_ahead(bundle)
    turns = [
        [megabytes_in_a_new_process(bundle, reuse) for bundle, reuse in runs]
        for _ in progress(range(repeats), "memory of new processes")
    ]
    steps, main = zip(*turns, strict=True)
    disk = full.size / alone.size
    note = f"{full.size / 1e6:.2f} / {alone.size / 1e6:.2f} MB"
    resident = f"{Spread.of(steps)} / {Spread.of(main)} MB, without libraries"
    return Section(
        "Size and memory",
        [
            Result("disk", "all functions / main alone", Spread.of([disk]), bar=SIZE_BAR, note=note),
            Result(f"memory, {SETTING}", "step / main", Ratios(steps, main).spread, bar=MEMORY_BAR, note=resident),
        ],
    )


if __name__ == "__main__":
    print(megabytes_after_steps(read_bundle(sys.argv[1]), sys.argv[2]))
