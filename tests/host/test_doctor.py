"""The page for a bug report: every line by itself, nothing private, and a run that really draws."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from coreai_rgba_image.host import doctor, smoke
from coreai_rgba_image.host.cli import MODELS_VARIABLE
from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.doctor import examine
from coreai_rgba_image.host.smoke import smoke_run

from .published_set import DIT

NAME = "o'brien (née x.*)"
COMMAND = "import sys; from coreai_rgba_image.host.cli.doctor import doctor_command as run; sys.exit(run(None))"


def drawn() -> str:
    return "drawn"


def run_doctor(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", COMMAND], env=os.environ | environment, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip


def test_a_whole_page_of_a_hostile_user_has_nothing_private_in_it(published_set: Path, tmp_path: Path) -> None:
    home = tmp_path / "homes" / NAME
    broken = Path(shutil.copytree(published_set, home / "models" / f"{NAME}'s set"))
    (broken / DIT / "main.mlirb").write_bytes(bytes(5000))
    (home / "models" / "linked").symlink_to(published_set)
    secret = {"HF_TOKEN": "hf_secret", "COREAI_RGBA_PRIVATE": "hf_secret"}
    done = run_doctor(HOME=str(home), USER=NAME, LOGNAME=NAME, **{MODELS_VARIABLE: str(home / "models")}, **secret)
    page = done.stdout
    assert done.returncode == 0, page + done.stderr
    for private in (NAME, "brien", str(home), socket.gethostname(), "hf_secret"):
        assert private not in page
    assert "- system: " in page
    assert "- works: 2 steps, 256x256 pixels" in page
    assert "~/models" in page
    assert "main.mlirb does not match main.hash, so it is damaged" in page
    for name in ("- linked: ", "- USER's set: ", "- demo: ", "licence: FOR RESEARCH"):
        assert name in page
    assert page.count("not found out") == 0
    assert page.startswith("# Core AI RGBA Image\n")


def test_what_fails_says_so_in_its_line_and_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = examine([tmp_path], None, drawn)

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error", "/somewhere")

    for name in ("_system", "_memory", "_free", "_version", "_pack_version", "describe", "cache_folder"):
        monkeypatch.setattr(doctor, name, fail)
    page = examine([tmp_path], tmp_path / "no ComfyUI", drawn)
    assert page.works
    assert headings(page.text) == headings(whole.text)
    assert "- system: not found out, OSError: [Errno 5] Input/output error: '/somewhere'" in page.text
    assert "- ComfyUI: not found out, FileNotFoundError: " in page.text
    assert "- chip: " in page.text
    monkeypatch.setattr(doctor, "available_model_sets", fail)
    assert "## Smoke run\n\n- works: drawn" in examine([tmp_path], None, drawn).text


def headings(text: str) -> list[str]:
    """What each line is about."""
    return [line.split(": ")[0] for line in text.splitlines() if not line.startswith("  ")]


def test_a_run_that_fails_is_told_and_the_page_is_whole(tmp_path: Path) -> None:
    def fail() -> str:
        raise ContractError("the process died by SIGILL:\nlast words")

    page = examine([tmp_path], None, fail)
    assert not page.works
    assert page.text.endswith("- fails: not found out, ContractError: the process died by SIGILL: last words\n")
    assert "- numpy: 2" in page.text


def test_comfyui_is_found_by_its_version_file(comfyui_dir: Path, tmp_path: Path) -> None:
    version = (comfyui_dir / "comfyui_version.py").read_text(encoding="utf-8").split('"')[1]
    assert f"- ComfyUI: {version}\n" in examine([], comfyui_dir, drawn).text
    assert "- ComfyUI: this pack is not installed in one" in examine([], None, drawn).text


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os; print('about to die', flush=True); os.abort()", "the process died by SIGABRT: about to die"),
        ("raise SystemExit('no picture')", "the process ended with 1: no picture"),
        ("import time; time.sleep(60)", "no picture within"),
        (f'print(\'{smoke.RESULT}\' + \'{{"shape": [256, 256, 4], "lowest": 0, "highest": 0}}\')', "drew nothing"),
    ],
)
def test_a_smoke_run_that_dies_is_a_message(code: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke, "command_of", lambda module: [sys.executable, "-c", code])
    monkeypatch.setattr(smoke, "TIME_LIMIT", 1.5)
    with pytest.raises(ContractError, match=message):
        smoke_run()
