"""How the memory of an export grows with the component: the slope between two sizes, seen from outside."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .large import write_text_encoder

SCRIPT = Path(__file__).with_name("measure_memory.py")


def peak_and_size(checkpoint: Path) -> tuple[int, int]:
    """Resident bytes at the peak of an export in a process of its own, and the bundle's."""
    command = [sys.executable, str(SCRIPT), "--export", "encoder", str(checkpoint), str(checkpoint / "set")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    return told["resident"], told["bundle"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark is read from /proc")
def test_each_byte_of_a_bundle_is_in_memory_once(tmp_path: Path) -> None:
    """Beside a weight that is being copied: the pages of the checkpoint it comes from."""
    (low, small), (high, large) = (
        peak_and_size(write_text_encoder(tmp_path / f"{layers}", layers, 1_000)) for layers in (0, 1)
    )
    largest = 4096 * 12288 * 2
    assert large - small > 380_000_000
    assert high - low <= 1.1 * (large - small) + largest
