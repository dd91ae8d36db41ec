"""Makes a trained checkpoint the one that ships: ``python -m coreai_rgba_image.host.demo.ship CHECKPOINT``.

The checkpoint and the model set exported from it go to ``data/`` beside this file. The RoPE tables
are left out of the set: they are half its size and equal those the host computes.
"""

import shutil
import sys
from pathlib import Path

from ..export.model_set import export_model_set
from ..model_set import EMBEDDED_FOLDER

SIZES = ("256", "384x256", "512")
CHECKPOINT_FOLDER = EMBEDDED_FOLDER.parent / "checkpoint"


def export_shipped(checkpoint: Path, out: Path) -> None:
    """Export as the shipped set is: fp32 computation, as bf16 is ten times less exact on the CPU runtime."""
    export_model_set(checkpoint, out, sizes=SIZES, dit_compute="fp32")
    for table in (out / "host").glob("rope_axis*.f32"):
        table.unlink()


def ship(checkpoint: Path) -> None:
    for folder in (CHECKPOINT_FOLDER, EMBEDDED_FOLDER):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(checkpoint, CHECKPOINT_FOLDER)
    export_shipped(CHECKPOINT_FOLDER, EMBEDDED_FOLDER)


if __name__ == "__main__":
    ship(Path(sys.argv[1]))
