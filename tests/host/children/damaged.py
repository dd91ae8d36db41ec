"""Damaged bundles, each of which would kill the process if it were loaded.

``python damaged.py FOLDER WORK`` damages copies of FOLDER's bundles in WORK, opens each, runs a
good bundle at the end, and prints what each ended in as JSON: ``{case: [error class, message]}``.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from engine import inputs_for

from coreai_rgba_image.host import runtime
from coreai_rgba_image.host.bundle import METADATA_KEY, import_coreai, read_bundle

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456\n"


def edit_program(edit: Callable[[bytearray], object], *, keep_hash: bool = True) -> Callable[[Path], None]:
    """Change the program's bytes; without its hash file only the runtime's own reader can object."""

    def damage(bundle: Path) -> None:
        program = bytearray((bundle / "main.mlirb").read_bytes())
        edit(program)
        (bundle / "main.mlirb").write_bytes(program)
        if not keep_hash:
            (bundle / "main.hash").unlink()

    return damage


def flip(position: float) -> Callable[[bytearray], None]:
    """Flip one bit of the byte at that part of the file."""

    def edit(program: bytearray) -> None:
        program[int(position * len(program))] ^= 1

    return edit


def truncate(program: bytearray) -> None:
    del program[len(program) // 2 :]


def overwrite(content: bytes) -> Callable[[bytearray], None]:
    def edit(program: bytearray) -> None:
        program[:] = content

    return edit


def own_metadata(text: str) -> Callable[[Path], None]:
    def damage(bundle: Path) -> None:
        import_coreai()[1].AIModelAsset.load(bundle).update_metadata(lambda own: own.set_custom(METADATA_KEY, text))

    return damage


def replace_by_a_file(bundle: Path) -> None:
    shutil.rmtree(bundle)
    bundle.write_bytes(b"not a folder")


def empty(bundle: Path) -> None:
    shutil.rmtree(bundle)
    bundle.mkdir()


def program_is_a_folder(bundle: Path) -> None:
    (bundle / "main.mlirb").unlink()
    (bundle / "main.mlirb").mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": shutil.rmtree,
    "a file": replace_by_a_file,
    "an empty folder": empty,
    "no program": lambda bundle: (bundle / "main.mlirb").unlink(),
    "the program a folder": program_is_a_folder,
    "an empty program": edit_program(overwrite(b"")),
    "truncated": edit_program(truncate),
    "truncated, no hash": edit_program(truncate, keep_hash=False),
    "first byte flipped": edit_program(flip(0)),
    "a weight's bit flipped": edit_program(flip(0.9)),
    "header flipped, no hash": edit_program(flip(0), keep_hash=False),
    "zeros, no hash": edit_program(overwrite(bytes(5000)), keep_hash=False),
    "a Git LFS pointer": edit_program(overwrite(LFS_POINTER)),
    "a Git LFS pointer, no hash": edit_program(overwrite(LFS_POINTER), keep_hash=False),
    "another program's hash": lambda bundle: (bundle / "main.hash").write_bytes(bytes(32)),
    "an empty hash": lambda bundle: (bundle / "main.hash").write_bytes(b""),
    "metadata.json not JSON": lambda bundle: (bundle / "metadata.json").write_text("{"),
    "our metadata not JSON": own_metadata("{"),
    "our metadata a list": own_metadata("[]"),
    "limits not pairs": own_metadata('{"limits": {"Lfull": 16}}'),
    "limits a list": own_metadata('{"limits": []}'),
    "limits upside down": own_metadata('{"limits": {"Lfull": [512, 16]}}'),
    "limits of text": own_metadata('{"limits": {"Lfull": ["a", "b"]}}'),
}


def outcome(bundle: Path) -> list[str]:
    try:
        with runtime.load(read_bundle(bundle)) as graph:
            graph(**inputs_for(graph.spec))
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["no error", ""]


def main(folder: Path, work: Path) -> None:
    results = {}
    for case, damage in DAMAGES.items():
        bundle = Path(shutil.copytree(folder / "set" / "vae.aimodel", work / case / "vae.aimodel"))
        damage(bundle)
        results[case] = outcome(bundle)
    results["another suffix"] = outcome(Path(shutil.copytree(folder / "set" / "vae.aimodel", work / "vae.mlmodel")))
    results["another model's graph"] = outcome(folder / "foreign.aimodel")
    results["an encoder of float ids"] = outcome(folder / "float_ids.aimodel")
    results["good after all"] = outcome(folder / "set" / "vae.aimodel")
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
