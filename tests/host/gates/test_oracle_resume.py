"""A capture that was stopped or damaged, anywhere, ends up as the same files."""

import logging
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coreai_rgba_image.host.cli import main
from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.gates import oracle as oracle_module
from coreai_rgba_image.host.gates.captured import DamagedFileError, read_file, write_file
from coreai_rgba_image.host.gates.oracle import Oracle, Request, capture

from .folders import contents, damage

pytestmark = pytest.mark.slow

GUIDED_FILES = [
    "prompt", "negative_prompt", "start", "step_0000", "step_0001", "step_0002", "step_0003", "decode", "picture",
]  # fmt: skip


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


@pytest.mark.parametrize("first", range(len(GUIDED_FILES) + 1), ids=[*GUIDED_FILES, "complete"])
def test_a_capture_goes_on_from_wherever_it_stopped(
    guided: Oracle, copy: Path, first: int, caplog: pytest.LogCaptureFixture
) -> None:
    for name in GUIDED_FILES[first:]:
        (copy / f"{name}.safetensors").unlink()
    for picture in copy.glob("*.png"):
        picture.unlink()
    kept = {path: path.stat().st_mtime_ns for path in copy.iterdir()}
    capture(guided.request, copy)
    assert contents(copy) == contents(guided.folder)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert not [record for record in caplog.records if record.name == oracle_module.__name__]


@pytest.mark.parametrize("name", ["square", "bf16"])
def test_other_captures_go_on_too(captures: dict[str, Oracle], tmp_path: Path, name: str) -> None:
    oracle = captures[name]
    for index, lost in enumerate((["step_0001"], ["step_0002", "decode", "picture"], ["prompt", "step_0000"])):
        folder = Path(shutil.copytree(oracle.folder, tmp_path / f"{index}"))
        for stem in lost:
            (folder / f"{stem}.safetensors").unlink()
        capture(oracle.request, folder)
        assert contents(folder) == contents(oracle.folder)


@pytest.mark.parametrize(
    ("name", "harm"), [*((name, damage) for name in GUIDED_FILES), ("prompt", cut), ("step_0001", cut), ("decode", cut)]
)
def test_a_damaged_file_is_made_again_with_a_warning(
    guided: Oracle, copy: Path, name: str, harm: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    path = copy / f"{name}.safetensors"
    harm(path)
    with pytest.raises(DamagedFileError, match=rf"{name}\.safetensors is damaged .* run coreai-rgba oracle"):
        read_file(path)
    with caplog.at_level(logging.WARNING):
        capture(guided.request, copy)
    assert contents(copy) == contents(guided.folder)
    assert [record.getMessage() for record in caplog.records if f"{name}.safetensors is damaged" in record.getMessage()]


def test_what_is_on_disk_is_not_computed_again(guided: Oracle, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four steps are left; what the first leaves for them, keys and values of two prompts, is computed again."""
    from diffusers import QwenImage21Transformer2DModel
    from transformers import Qwen3VLForConditionalGeneration

    for name in GUIDED_FILES[GUIDED_FILES.index("step_0002") :]:
        (copy / f"{name}.safetensors").unlink()
    calls: list[type] = []
    for network in (QwenImage21Transformer2DModel, Qwen3VLForConditionalGeneration):
        monkeypatch.setattr(network, "forward", counting(network.forward, calls, network))
    capture(guided.request, copy)
    assert calls == [QwenImage21Transformer2DModel] * (2 + 2 * 2)
    assert contents(copy) == contents(guided.folder)
    calls.clear()
    capture(guided.request, copy)
    assert calls == []


def counting(forward: Callable[..., Any], calls: list[type], network: type) -> Callable[..., Any]:
    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(network)
        return forward(*arguments, **options)

    return counted


def rewrite(path: Path, name: str) -> None:
    """Change ``name`` a little, leaving a file that is whole."""
    header, arrays = read_file(path)
    arrays[name] = arrays[name] * np.float32(1.001)
    write_file(path, header, arrays)


def test_what_does_not_follow_from_what_precedes_it_is_made_again(
    guided: Oracle, copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rewrite(copy / "step_0002.safetensors", "latents")
    (copy / "picture.safetensors").unlink()
    with caplog.at_level(logging.WARNING):
        capture(guided.request, copy)
    assert "step_0002.safetensors does not follow from what was captured before it" in caplog.text
    assert contents(copy) == contents(guided.folder)


def test_a_machine_that_computes_other_numbers_does_not_go_on(captures: dict[str, Oracle], tmp_path: Path) -> None:
    oracle = captures["square"]
    folder = Path(shutil.copytree(oracle.folder, tmp_path / "other"))
    rewrite(folder / "step_0000.safetensors", "velocity")
    for name in ("step_0001", "step_0002", "decode", "picture"):
        (folder / f"{name}.safetensors").unlink()
    before = contents(folder)
    with pytest.raises(ContractError, match=r"step 0 differs from what .* holds by up to .*OMP_NUM_THREADS"):
        capture(oracle.request, folder)
    assert contents(folder) == before


def test_an_unfinished_capture_says_how_to_finish_it(
    guided: Oracle, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("step_0003", "decode", "picture"):
        (copy / f"{name}.safetensors").unlink()
    with pytest.raises(ContractError, match=r"not finished, it lacks decode, picture, step_0003\. To go") as error:
        Oracle(copy)
    program, *arguments = shlex.split(str(error.value).split("stopped: ")[1])
    assert program == "coreai-rgba"
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"{copy}\n"
    assert contents(copy) == contents(guided.folder)


def test_an_interrupted_capture_leaves_whole_files_and_goes_on(
    guided: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C while the sixth file is being written: it has its temporary name by then."""
    folder, replaced, replace = tmp_path / "interrupted", 0, Path.replace

    def interrupted(path: Path, target: Path) -> Path:
        nonlocal replaced
        replaced += 1
        if replaced == 6:
            raise KeyboardInterrupt
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupted)
        assert main(shlex.split(guided.request.command(folder))[1:]) == 130
    assert capsys.readouterr().err.endswith("coreai-rgba: interrupted\n")
    assert {path.name for path in folder.iterdir()} == {f"{name}.safetensors" for name in GUIDED_FILES[:5]}
    capture(guided.request, folder)
    assert contents(folder) == contents(guided.folder)


def test_a_killed_capture_goes_on(tiny_checkpoint: Path, tmp_path: Path) -> None:
    request = Request(tiny_checkpoint.resolve(), steps=40, negative_prompt="blurry", cfg=2.0)
    folder = tmp_path / "killed"
    code = "import sys; from coreai_rgba_image.host.cli import main; sys.exit(main(sys.argv[1:]))"
    child = subprocess.Popen([sys.executable, "-c", code, *shlex.split(request.command(folder))[1:]])
    deadline = time.monotonic() + 120
    while not (folder / "step_0004.safetensors").exists():
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    with pytest.raises(ContractError, match="is not finished"):
        Oracle(folder)
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
    assert len(kept) >= 8
    for path in kept:
        read_file(path)
    capture(request, folder)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    whole = capture(request, tmp_path / "whole")
    # What was being written when the process died keeps its temporary name.
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".safetensors", ".png")}
    assert found == contents(whole.folder)
