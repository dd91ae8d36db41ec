"""Tables and settings for hosts in other languages: what is written is right, and what is not is found."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from coreai_rgba_image.host.cli import main
from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.export.model_set import export_host
from coreai_rgba_image.host.gates.constants import (
    IMAGE_TOKENS,
    STEPS,
    Check,
    check_host_constants,
    checkpoint_scheduler,
    host_constants,
    write_host_constants,
)
from coreai_rgba_image.host.schedule import SchedulerConfig

FILES = {*(f"rope_axis{axis}_{part}.f32" for axis in range(3) for part in ("cos", "sin")), "scheduler.json"}
CHECKS = [
    "RoPE tables and rope_tables",
    "RoPE tables and diffusers' QwenImage21Rope",
    "scheduler.json and flow_match_schedule",
    "scheduler.json and diffusers' FlowMatchEulerDiscreteScheduler",
]


def verdicts(checks: list[Check]) -> list[bool | None]:
    assert [check.what for check in checks] == CHECKS
    return [check.same for check in checks]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of Qwen-Image-2.1, not to be changed."""
    folder = tmp_path_factory.mktemp("constants")
    write_host_constants(folder, SchedulerConfig())
    return folder


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "copy"))


def test_the_files_are_those_of_an_exported_model_set(tiny_checkpoint: Path, tmp_path: Path) -> None:
    checks = host_constants(tmp_path / "constants", tiny_checkpoint)
    assert verdicts(checks) == [True] * 4
    export_host(tiny_checkpoint, tmp_path / "set")
    ours = {path.name: path.read_bytes() for path in (tmp_path / "constants").iterdir()}
    assert ours.keys() == FILES
    assert ours == {path.name: path.read_bytes() for path in (tmp_path / "set" / "host").iterdir()}


def test_without_a_checkpoint_they_are_qwen_image_21s(written: Path) -> None:
    assert json.loads((written / "scheduler.json").read_text(encoding="utf-8")) == asdict(SchedulerConfig())
    checks = check_host_constants(written, SchedulerConfig())
    assert verdicts(checks) == [True] * 4
    assert str(checks[0]) == "same: RoPE tables and rope_tables: 18 cases, bit for bit"
    assert str(checks[3]).endswith(f"{len(STEPS) * len(IMAGE_TOKENS)} cases, bit for bit")


def test_the_command_prints_a_line_for_each_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["host-constants", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.startswith(f"same: {what}: ") for line, what in zip(lines, CHECKS, strict=True)] == [True] * 4
    assert {path.name for path in tmp_path.iterdir()} == FILES


@pytest.mark.parametrize("position", [-1024, -1, 0, 7, 4000, 8191])
def test_one_last_digit_in_a_table_is_found(copy: Path, position: int) -> None:
    path = copy / "rope_axis1_sin.f32"
    table = np.fromfile(path, "<f4").reshape(9216, 28)
    table[position + 1024, 3] = np.nextafter(table[position + 1024, 3], np.float32(2))
    path.write_bytes(table.tobytes())
    checks = check_host_constants(copy, SchedulerConfig())
    assert verdicts(checks) == [False, False, True, True]
    assert str(checks[0]).startswith("DIFFERENT: RoPE tables and rope_tables: ")
    assert checks[1].note.endswith("of 18 cases, the first: axis 1, every position")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: path.unlink(), "is missing beside the other RoPE tables"),
        (lambda path: path.write_bytes(path.read_bytes()[:-4]), "bytes, a table has"),
        (lambda path: path.write_bytes(path.read_bytes()[::-1]), "does not hold the RoPE table"),
        (lambda path: [other.unlink() for other in path.parent.glob("rope*")], "holds no RoPE tables"),
    ],
)
def test_tables_that_cannot_be_read_differ(copy: Path, harm: Callable[[Path], object], message: str) -> None:
    harm(copy / "rope_axis2_cos.f32")
    checks = check_host_constants(copy, SchedulerConfig())
    assert verdicts(checks) == [False, False, True, True]
    assert message in checks[0].note


@pytest.mark.parametrize(
    "changed", [{"max_shift": 0.9000001}, {"shift_terminal": 0.0}, {"base_image_seq_len": 255}, {"shift": 3.0}]
)
def test_other_settings_are_found_where_they_matter(copy: Path, changed: dict[str, float]) -> None:
    config = replace(SchedulerConfig(), **changed)  # type: ignore[arg-type]
    (copy / "scheduler.json").write_text(json.dumps(asdict(config)), encoding="utf-8")
    same = "shift" in changed  # where the shift is dynamic, a static one makes no difference
    assert verdicts(check_host_constants(copy, SchedulerConfig())) == [True, True, False, same]


def test_a_scheduler_json_that_cannot_be_read_differs(copy: Path) -> None:
    (copy / "scheduler.json").write_text("{", encoding="utf-8")
    checks = check_host_constants(copy, SchedulerConfig())
    assert verdicts(checks) == [True, True, False, False]
    assert "cannot read the scheduler's settings" in checks[2].note


def test_the_exit_status_is_1_when_one_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [Check("one", True, ""), Check("two", None, "why"), Check("three", False, "how")]
    monkeypatch.setattr("coreai_rgba_image.host.gates.constants.host_constants", lambda out, checkpoint: checks)
    assert main(["host-constants", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().out == "same: one: \nnot run: two: why\nDIFFERENT: three: how\n"


def test_without_diffusers_its_checks_are_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "diffusers"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "diffusers", None)
    assert main(["host-constants", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["same", "not run", "same", "not run"]
    assert "pip install -e '.[reference]'" in lines[1]


def changed_checkpoint(tiny_checkpoint: Path, folder: Path, file: str, **changed: object) -> Path:
    """A checkpoint of JSON files only, one of them changed."""
    for name in ("model_index.json", "scheduler/scheduler_config.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        content = json.loads((tiny_checkpoint / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps({**content, **(changed if name == file else {})}), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    "changed",
    [
        {"max_shift": 1.15, "max_image_seq_len": 4096},
        {"shift_terminal": None},
        {"use_dynamic_shifting": False, "shift": 3.0},
    ],
)
def test_settings_of_a_checkpoint_are_compared_with_its_own_scheduler(
    tiny_checkpoint: Path, tmp_path: Path, changed: dict[str, object]
) -> None:
    checkpoint = changed_checkpoint(
        tiny_checkpoint, tmp_path / "checkpoint", "scheduler/scheduler_config.json", **changed
    )
    assert verdicts(host_constants(tmp_path / "out", checkpoint)) == [True] * 4
    assert checkpoint_scheduler(checkpoint) != SchedulerConfig()
    other = check_host_constants(tmp_path / "out", SchedulerConfig(), tiny_checkpoint)
    assert verdicts(other) == [True, True, False, False]


def test_fixed_sigmas_of_a_checkpoint_are_written(tiny_checkpoint: Path, tmp_path: Path) -> None:
    fixed = [1.0, 0.75, 0.5, 0.25]
    checkpoint = changed_checkpoint(tiny_checkpoint, tmp_path / "few", "model_index.json", sample_sigmas=fixed)
    checks = host_constants(tmp_path / "out", checkpoint)
    assert verdicts(checks) == [True] * 4
    assert checks[3].note.startswith(f"{len(IMAGE_TOKENS)} cases")
    assert json.loads((tmp_path / "out" / "scheduler.json").read_text(encoding="utf-8"))["sample_sigmas"] == fixed


def test_a_single_step_from_pure_noise_has_no_reference(tiny_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = changed_checkpoint(tiny_checkpoint, tmp_path / "one", "model_index.json", sample_sigmas=[1.0])
    checks = host_constants(tmp_path / "out", checkpoint)
    assert verdicts(checks) == [True, True, True, None]
    assert "0 by 0" in checks[3].note


def test_what_is_no_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["host-constants", "--out", str(tmp_path / "out"), "--checkpoint", str(tmp_path)]) == 1
    assert "the checkpoint must have the folders of Qwen/Qwen-Image-2.1" in capsys.readouterr().err
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    with pytest.raises(ContractError, match=r"cannot write to .*: choose another folder"):
        host_constants(tmp_path / "file" / "out")
