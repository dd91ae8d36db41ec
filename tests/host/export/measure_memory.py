"""What an export takes in memory, measured on components of 4 GB with the real block shapes.

``python tests/host/export/measure_memory.py FOLDER [dit|encoder|vae ...]`` writes a random checkpoint
to FOLDER, exports it in a process of its own, runs the bundle in another, and deletes both: 20 GB
of disk and 7 GB of memory. It reads Linux's ``/proc``. ``VmHWM`` counts every resident page, pages of
the checkpoint that are mapped among them; ``RssAnon`` those that only swapping could free.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from large import write_dit, write_text_encoder, write_vae

from coreai_rgba_image.host import runtime
from coreai_rgba_image.host.bundle import read_bundle
from coreai_rgba_image.host.export.component import Component
from coreai_rgba_image.host.export.model_set import dit, text_encoder, vae_decoder
from coreai_rgba_image.host.rope import rope_tables

WRITERS: dict[str, Callable[[Path], Path]] = {
    "dit": lambda folder: write_dit(folder, blocks=10),
    "encoder": lambda folder: write_text_encoder(folder, layers=8),
    "vae": lambda folder: write_vae(folder, base=288),
}
BARS = {"dit": 1.3, "encoder": 1.6, "vae": 1.3}
"""Of a component's bytes, beside 1 GB: the most that an export may have resident."""


def component(name: str, checkpoint: Path, out: Path) -> Component:
    """The VAE for four tokens: the weights are those of any size, and the CPU runtime is slow with convolutions."""
    if name == "dit":
        return dit(checkpoint, out, "bf16")
    return text_encoder(checkpoint, out) if name == "encoder" else vae_decoder(checkpoint, out, 2, 2)


@dataclass(frozen=True)
class Peak:
    """Bytes: resident at most, anonymous at most, resident at most in each stage, those of the bundle; and seconds."""

    resident: int
    anonymous: int
    stages: dict[str, int]
    bundle: int
    seconds: float


def memory_of(process: int | str, field: str) -> int:
    """A field of a process's status, bytes; 0 if it has ended."""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    found = re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def measure_export(name: str, checkpoint: Path, out: Path) -> Peak:
    """Export a component in a process that does nothing else."""
    command = [sys.executable, __file__, "--export", name, str(checkpoint), str(out)]
    anonymous = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            anonymous = max(anonymous, memory_of(process.pid, "RssAnon"))
            time.sleep(0.02)
        told = process.stdout.read() if process.stdout else ""
    if process.returncode:
        raise RuntimeError(f"the export of {name} ended with {process.returncode}")
    return Peak(anonymous=anonymous, **json.loads(told.splitlines()[-1]))


def export_here(name: str, checkpoint: Path, out: Path) -> dict[str, Any]:
    """The child's part. Writing 5 to ``clear_refs`` starts a new high-water mark, so that each stage has its own."""
    stages: dict[str, int] = {}
    current = "start"

    def stage(text: str) -> None:
        nonlocal current
        stages[current] = memory_of("self", "VmHWM")
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        current = text

    started = time.monotonic()
    bundle = component(name, checkpoint, out).export(stage)
    stage("end")
    size = (bundle.path / "main.mlirb").stat().st_size
    return {
        "resident": max(stages.values()), "stages": stages, "bundle": size, "seconds": time.monotonic() - started
    }  # fmt: skip


def run_here(name: str, out: Path) -> dict[str, Any]:
    """Load the bundle and call it once, with as little as it takes."""
    random = np.random.default_rng(0)
    bundle = read_bundle(component(name, out, out).bundle)
    inputs: dict[str, np.ndarray] = {
        "encoder": {"input_ids": np.arange(16, dtype=np.int32)[None]},
        "vae": {"latents_packed": random.standard_normal((1, 4, 64), dtype=np.float32)},
        "dit": {
            "img_tokens": random.standard_normal((1, 64, 64), dtype=np.float32),
            "txt_feats": random.standard_normal((1, 8, 4096), dtype=np.float32),
            "timestep": np.array([0.7], dtype=np.float32),
            **vars(rope_tables(8, 8, 8)),
        },
    }[name]
    started = time.monotonic()
    with runtime.load(bundle) as graph:
        loaded = time.monotonic()
        [output] = graph(**inputs).values()
    return {
        "load": loaded - started, "call": time.monotonic() - loaded,
        "finite": bool(np.isfinite(output).all()), "deviation": float(output.std()),
    }  # fmt: skip


def run_elsewhere(name: str, out: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--run", name, str(out), str(out)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(name: str, folder: Path) -> bool:
    """Print what exporting and running ``name`` took; whether it is within its bar."""
    checkpoint, out = folder / f"{name}-checkpoint", folder / f"{name}-set"
    try:
        WRITERS[name](checkpoint)
        peak = measure_export(name, checkpoint, out)
        shutil.rmtree(checkpoint)
        ran = run_elsewhere(name, out)
    finally:
        for path in (checkpoint, out):
            shutil.rmtree(path, ignore_errors=True)
    bar = BARS[name] * peak.bundle + 1e9
    print(
        f"{name}: bundle {peak.bundle / 1e9:.2f} GB, resident at most {peak.resident / 1e9:.2f} GB "
        f"(the bar is {bar / 1e9:.2f}), anonymous {peak.anonymous / 1e9:.2f} GB, {peak.seconds:.0f} s"
    )
    for stage, resident in peak.stages.items():
        print(f"    {stage:<60}{resident / 1e9:8.2f} GB")
    print(f"    it runs: {ran}")
    return peak.resident <= bar and ran["finite"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("components", nargs="*", default=[*WRITERS], help=", ".join(WRITERS))
    options = parser.parse_args()
    within = [measure(name, options.folder) for name in options.components]
    return 0 if all(within) else 1


if __name__ == "__main__":
    if sys.argv[1] in ("--export", "--run"):
        _, action, name, checkpoint, out = sys.argv
        told = export_here(name, Path(checkpoint), Path(out)) if action == "--export" else run_here(name, Path(out))
        print(json.dumps(told))
    else:
        sys.exit(main())
