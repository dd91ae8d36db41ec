"""What tests look at in the folder of a capture, and do to it."""

from pathlib import Path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def damage(path: Path) -> None:
    """Flip one bit in the middle, as a disk might."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
