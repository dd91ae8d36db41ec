"""What is no capture, not this one, or no sensible request is refused, and nothing is touched."""

import errno
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.gates import oracle as oracle_module
from coreai_rgba_image.host.gates.captured import DamagedFileError, read_file, write_file
from coreai_rgba_image.host.gates.oracle import Oracle, Request, capture, fingerprint

from .folders import contents, damage

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompt": "a pear"}, "prompt is .* there and 'a pear' here"),
        ({"width": 256}, "width is 192 there and 256 here"),
        ({"steps": 3}, "steps is 4 there and 3 here"),
        ({"steps": 5, "seed": 1}, "steps is 4 there and 5 here; seed is 18446744073709551615 there and 1 here"),
        ({"cfg": 2.0}, "cfg is 3.0 there and 2.0 here"),
        ({"dtype": "bf16"}, "dtype is 'fp32' there and 'bf16' here"),
        ({"embed_perturb": 1e-5}, "embed_perturb is 0.0 there and 1e-05 here"),
    ],
)
def test_a_folder_of_another_request_is_refused(
    guided: Oracle, copy: Path, changed: dict[str, Any], message: str
) -> None:
    damage(copy / "picture.safetensors")
    before = contents(copy)
    with pytest.raises(ContractError, match=f"holds another capture: {message}. Choose another folder"):
        capture(replace(guided.request, **changed), copy)
    assert contents(copy) == before, "a folder that is refused is left as it was"


def test_a_folder_of_another_checkpoint_is_refused_and_a_moved_one_is_not(
    guided: Oracle, copy: Path, tmp_path: Path
) -> None:
    moved = Path(shutil.copytree(guided.request.checkpoint, tmp_path / "moved"))
    (copy / "decode.safetensors").unlink()
    request = replace(guided.request, checkpoint=moved)
    capture(request, copy)
    assert contents(copy) == contents(guided.folder)
    with (moved / "vae" / "config.json").open("a", encoding="utf-8") as file:
        file.write("\n")
    with pytest.raises(ContractError, match=r"checkpoint_sha256 is '[0-9a-f]{64}' there and '[0-9a-f]{64}' here"):
        capture(request, copy)


def test_a_folder_made_with_another_library_is_refused(
    guided: Oracle, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracle_module, "version", lambda library: "9.9")
    with pytest.raises(ContractError, match=r"diffusers is '0.42.1' there and '9.9' here; transformers is"):
        capture(guided.request, copy)


def foreign(folder: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"weight": np.zeros(3, np.float32)}, folder / "picture.safetensors")


def later(folder: Path) -> None:
    header, arrays = read_file(folder / "picture.safetensors")
    write_file(folder / "picture.safetensors", {**header, "version": 2}, arrays)


@pytest.mark.parametrize(
    ("put", "message"),
    [
        (foreign, r"picture\.safetensors is no part of a capture: choose another folder"),
        (later, "version 2, this pack reads 'coreai-rgba oracle' version 1"),
        (lambda folder: (folder / "other.safetensors").write_bytes(b""), r"other\.safetensors is no file of this one"),
        (lambda folder: shutil.copy(folder / "start.safetensors", folder / "start 2.safetensors"), "start 2.safeten"),
    ],
)
def test_files_of_something_else_are_refused(
    guided: Oracle, copy: Path, put: Callable[[Path], object], message: str
) -> None:
    put(copy)
    before = contents(copy)
    with pytest.raises(ContractError, match=message):
        capture(guided.request, copy)
    assert contents(copy) == before


def test_reading_finds_what_is_wrong(guided: Oracle, captures: dict[str, Oracle], copy: Path, tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="holds no capture: make one with coreai-rgba oracle"):
        Oracle(tmp_path / "nothing")
    oracle = Oracle(copy)
    damage(copy / "step_0001.safetensors")
    assert oracle.velocity(2).shape == (1, 96, 64)
    with pytest.raises(DamagedFileError, match=r"step_0001\.safetensors is damaged"):
        oracle.velocity(1)
    shutil.copy(captures["bf16"].folder / "picture.safetensors", copy)
    with pytest.raises(ContractError, match=r"picture\.safetensors in .* is from another capture"):
        _ = oracle.rgba8
    for step in (-1, 4):
        with pytest.raises(ContractError, match=f"step is {step}: .* has 0 to 3"):
            guided.latents(step)
    for read in (lambda: captures["square"].unconditional(0), lambda: captures["square"].negative("ids")):
        with pytest.raises(ContractError, match="no guidance"):
            read()


def test_reading_needs_neither_diffusers_nor_the_checkpoint(guided: Oracle) -> None:
    code = f"""
import sys
for name in ("diffusers", "transformers", "accelerate", "coreai", "coreai_torch"):
    sys.modules[name] = None
from coreai_rgba_image.host.gates.oracle import Oracle
oracle = Oracle({str(guided.folder)!r})
print(oracle.rgba8.shape, oracle.request.steps)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "(1, 128, 192, 4) 4\n"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 272}, "the width is 272 pixels: diffusers' pipeline takes multiples of 32, 256 or 288"),
        ({"height": 0}, "the height is 0 pixels: .* 32 or 64"),
        ({"width": 96, "height": 96}, "has 36 image tokens: the DiT takes 64..4096"),
        ({"steps": 0}, "steps is 0: it must be from 1"),
        ({"cfg": float("nan")}, "cfg is nan"),
        ({"cfg": 0.5, "negative_prompt": "x"}, "cfg is 0.5: diffusers' pipeline guides above 1 only"),
        ({"cfg": 4.0}, "cfg is 4.0, but there is no negative prompt"),
        ({"negative_prompt": "x"}, "a negative prompt does nothing at cfg 1"),
        ({"seed": -1}, "the seed is -1: it must be from 0"),
        ({"perturb_seed": 2**64}, "the perturb seed is 18446744073709551616"),
        ({"dtype": "fp16"}, "dtype is 'fp16': choose one of fp32, bf16"),
        ({"embed_perturb": float("inf")}, "embed perturb is inf"),
        ({"embed_perturb": -1e-5}, "embed perturb is -1e-05: it must be 0 or a relative size"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        Request(Path("nowhere"), **settings)


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is refused is refused before a network is loaded."""
    with monkeypatch.context() as patch:
        patch.setattr(oracle_module, "_run", lambda request, recording: pytest.fail("the pipeline ran"))
        yield


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 1}, "steps is 1: diffusers stretches a single step from pure noise by 0/0, so ask for 2 or more"),
        ({"prompt": "apple " * 600}, "tokens long with its template, the limit is 512"),
        ({"negative_prompt": "\ud800", "cfg": 2.0}, "lone surrogate"),
    ],
)
@pytest.mark.usefixtures("nothing_loads")
def test_what_the_checkpoint_cannot_answer_is_refused(
    tiny_checkpoint: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ContractError, match=message):
        capture(Request(tiny_checkpoint, **settings), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("nothing_loads")
def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r"cannot read .*model_index\.json .* folders of Qwen/Qwen-Image-2.1"):
        capture(Request(tmp_path), tmp_path / "out")


def test_a_missing_library_is_named(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ContractError, match=r"diffusers .* pip install -e '\.\[reference\]'"):
        capture(Request(tiny_checkpoint), tmp_path / "out")
    monkeypatch.setattr(oracle_module, "LIBRARIES", ("no-such-library",))
    with pytest.raises(ContractError, match=r"no-such-library is not installed: .* pip install -e '\.\[reference\]'"):
        capture(Request(tiny_checkpoint), tmp_path / "out")


@pytest.mark.usefixtures("nothing_loads")
def test_a_folder_that_cannot_be_written_is_named(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    with pytest.raises(ContractError, match=r"cannot write .*file/out .* choose another folder"):
        capture(Request(tiny_checkpoint, steps=2), tmp_path / "file" / "out")


def test_a_full_disk_ends_in_a_message_and_the_capture_goes_on_later(
    guided: Oracle, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy / "picture.safetensors").unlink()

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(oracle_module, "write_file", full)
        with pytest.raises(ContractError, match=r"cannot write .*picture\.safetensors .*No space .* run the same"):
            capture(guided.request, copy)
    capture(guided.request, copy)
    assert contents(copy) == contents(guided.folder)


def test_a_fingerprint_is_that_of_what_is_captured_not_of_where_it_lies(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """So the cache never hands a new checkpoint the capture of an old one, nor is refused for it."""
    moved = Path(shutil.copytree(tiny_checkpoint, tmp_path / "moved"))
    request = Request(tiny_checkpoint, steps=3)
    assert fingerprint(replace(request, checkpoint=moved)) == fingerprint(request)
    assert fingerprint(replace(request, seed=1)) != fingerprint(request)
    damage(moved / "vae" / "diffusion_pytorch_model.safetensors")
    assert fingerprint(replace(request, checkpoint=moved)) != fingerprint(request)
