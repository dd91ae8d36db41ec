"""What an export needs is told and checked before it starts, and a killed one leaves nothing that looks whole."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from coreai_rgba_image.host.cli import main
from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.export import component as component_module
from coreai_rgba_image.host.export.component import Component, Plan
from coreai_rgba_image.host.export.convert import TEMPORARY, remove_abandoned
from coreai_rgba_image.host.export.model_set import dit, export_model_set, text_encoder, vae_decoder
from coreai_rgba_image.host.model_set import ModelSet


def components(checkpoint: Path, out: Path) -> list[Component]:
    return [text_encoder(checkpoint, out), dit(checkpoint, out, "fp32"), vae_decoder(checkpoint, out, 16, 16)]


def command(checkpoint: Path, out: Path, *options: str) -> list[str]:
    return ["export", "--checkpoint", str(checkpoint), "--out", str(out), "--size", "256", *options]


@pytest.fixture
def plan(tiny_checkpoint: Path, tmp_path: Path) -> Plan:
    return Plan.of(components(tiny_checkpoint, tmp_path / "set"), tmp_path / "set")


def test_bundles_are_as_large_as_planned(tiny_checkpoint: Path, tiny_set: Path, plan: Plan) -> None:
    encoder, dit_cost, vae = plan.costs
    found = ModelSet(tiny_set)
    for cost, bundle in ((encoder, found.text_encoder), (dit_cost, found.dit), (vae, found.vae_decoder(16, 16))):
        # The program itself is a large part of so small a bundle, and none of one of gigabytes.
        assert cost.bundle <= bundle.size <= cost.bundle + 600_000
    assert dit_cost.source == (tiny_checkpoint / "transformer" / "diffusion_pytorch_model.safetensors").stat().st_size
    assert plan.disk >= sum(cost.bundle for cost in plan.costs)
    assert plan.memory == max(cost.memory for cost in plan.costs)


def test_a_dry_run_tells_what_it_takes_and_writes_nothing(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tiny_checkpoint, tmp_path / "set", "--dry-run")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:24].strip() for line in lines[:-1]] == ["part", "text encoder", "DiT", "VAE decoder 256x256"]
    assert re.fullmatch(
        r"needed: 0\.0\d GB of disk \(\d+\.\d\d GB free\), \d\.\d\d GB of memory \(\d+\.\d\d GB available\)", lines[-1]
    )
    assert not (tmp_path / "set").exists()


def test_a_dry_run_of_one_part_speaks_of_that_part(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tiny_checkpoint, tmp_path, "dit", "--dry-run")) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["part", "DiT", "needed:"]


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("lacking", "message"),
    [
        ({"disk_free": 10_000_000}, r"needs 0\.\d+ GB of disk, 0\.01 GB are free for .*set: make room, pass --out"),
        ({"memory_available": 20_000_000}, r"exporting the .* needs \d\.\d+ GB of memory, 0\.02 GB are available"),
    ],
)
def test_an_export_that_does_not_fit_is_refused_before_anything_is_written(
    tiny_checkpoint: Path, tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], lacking: dict[str, int], message: str, options: list[str],
) -> None:  # fmt: skip
    with pytest.raises(ContractError, match=message):
        replace(plan, **lacking).check()
    monkeypatch.setattr(Plan, "of", lambda components, out: replace(plan, **lacking))
    assert main(command(tiny_checkpoint, tmp_path / "set", *options)) == 1
    told = capsys.readouterr()
    assert "needed: " in told.out
    assert told.err.startswith("coreai-rgba: ")
    assert not (tmp_path / "set").exists()


def test_a_part_that_does_not_fit_its_config_is_found_before_any_is_written(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "checkpoint"
    broken.mkdir()
    for entry in tiny_checkpoint.iterdir():
        if entry.name != "vae":
            (broken / entry.name).symlink_to(entry)
    with pytest.raises(ContractError, match=r"cannot read .*vae"):
        export_model_set(broken, tmp_path / "set", sizes=["256"])
    assert not (tmp_path / "set").exists()


def test_each_stage_is_reported_with_its_component_and_the_time(tiny_checkpoint: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    (tmp_path / f"{TEMPORARY}{2**22 + 1}-of a process that is gone").mkdir()
    export_model_set(tiny_checkpoint, tmp_path, ["vae"], ["192x128"], report=lines.append)
    stages = [line.split(None, 1) for line in lines[3:]]
    assert [told for _, told in stages] == [
        "VAE decoder 192x128: tracing main", "VAE decoder 192x128: converting",
        "VAE decoder 192x128: writing qi21_vae_192x128_fp32.aimodel", "done",
    ]  # fmt: skip
    minutes = [[int(number) for number in elapsed.split(":")] for elapsed, _ in stages]
    assert minutes == sorted(minutes)
    assert [path.name for path in tmp_path.iterdir()] == ["qi21_vae_192x128_fp32.aimodel"]


def wait_for(folder: Path, process: "subprocess.Popen[bytes]") -> None:
    while not list(folder.glob(f"{TEMPORARY}*/*.aimodel")):
        assert process.poll() is None, "the export ended before it could be killed"
        time.sleep(0.002)


def start(arguments: Sequence[str]) -> "subprocess.Popen[bytes]":
    code = "import sys; from coreai_rgba_image.host.cli import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.DEVNULL)


def test_a_killed_export_leaves_no_bundle_and_its_remains_are_removed(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with start(command(tiny_checkpoint, tmp_path, "vae")) as process:
        wait_for(tmp_path, process)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    [left] = tmp_path.iterdir()
    assert left.name.startswith(TEMPORARY)
    remove_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_a_running_export_is_writing_is_left_alone(tmp_path: Path) -> None:
    running = tmp_path / f"{TEMPORARY}{os.getpid()}-x"
    running.mkdir()
    (tmp_path / f"{TEMPORARY}notes").mkdir()
    remove_abandoned(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {running.name, f"{TEMPORARY}notes"}


def test_the_estimate_of_memory_grows_with_the_bundle_alone(plan: Plan) -> None:
    for cost in plan.costs:
        assert cost.memory - component_module.MEMORY_BASE < 4 * cost.bundle
