"""Which compiled copy a Mac loads, and that none is loaded which would end the process."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from coreai_rgba_image.host import compiled, compiler, mac, probe
from coreai_rgba_image.host.bundle import MAIN, Bundle, read_bundle
from coreai_rgba_image.host.contract import DIT, TEXT_ENCODER, VAE_DECODER, ContractError
from coreai_rgba_image.host.model_set import EMBEDDED_FOLDER

from .stand_in import HERE, Play, environment, player

CHILD = Path(__file__).parent / "children" / "mac_loads.py"
ENCODER = "qi21_encoder_dynL_w16a32_ids_iofp32.aimodel"


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    monkeypatch.setattr(mac, "on_mac", lambda: True)
    play = player(monkeypatch, tmp_path / "mac")
    play()
    return play


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """A DiT of one byte more than may be compiled just in time."""
    path = tmp_path / "a set" / "dit.v1.aimodel"
    path.mkdir(parents=True)
    (path / "main.mlirb").touch()
    os.truncate(path / "main.mlirb", compiled.JUST_IN_TIME_LIMIT + 1)
    return Bundle(path, {MAIN: DIT}, {}, "1" * 64)


def add_copy(bundle: Bundle, architecture: str, loads: str | None = "") -> Path:
    """A copy made by hand; ``loads`` is what came of trying it, None if nobody did."""
    path = compiled.copy_path(bundle, architecture)
    path.mkdir(parents=True)
    (path / f"main-{architecture}.mlirb").touch()
    if loads is not None:
        probe._remember(path, loads)
    return path


def test_a_large_bundle_is_refused_until_it_is_compiled(bundle: Bundle, play: Play) -> None:
    command = f"coreai-rgba compile '{bundle.path.parent}' dit"
    with pytest.raises(ContractError, match=f"macOS would abort.*2.1 GB of disk: {command}$"):
        compiled.path_to_load(bundle)
    found = compiled.state(bundle)
    assert (found.path, found.architecture, found.needed) == (None, None, True)
    assert found.problem.endswith(command)
    copy = add_copy(bundle, "h16c")
    copy.with_name(f"._{copy.name}").touch()  # as macOS leaves on foreign disks
    assert compiled.path_to_load(bundle) == copy
    assert compiled.state(bundle) == compiled.CompiledState(copy, "h16c", "", True)


def test_a_small_bundle_needs_no_copy(bundle: Bundle, play: Play) -> None:
    os.truncate(bundle.path / "main.mlirb", compiled.JUST_IN_TIME_LIMIT)
    assert compiled.path_to_load(bundle) == bundle.path
    assert compiled.state(bundle) == compiled.CompiledState(None, None, "", False)


def test_elsewhere_a_copy_is_shown_and_nothing_is_wrong(bundle: Bundle) -> None:
    assert compiled.state(bundle) == compiled.CompiledState(None, None, "", False)
    path = compiled.copy_path(bundle, "h13g")
    path.mkdir(parents=True)
    assert compiled.state(bundle) == compiled.CompiledState(path, "h13g", "", False)


def test_of_several_copies_the_one_that_loads_here_is_taken(bundle: Bundle, play: Play) -> None:
    other = add_copy(bundle, "h15d", None)
    own = add_copy(bundle, "h16c", None)
    assert compiled.state(bundle).path == own
    probe._remember(other, "")
    assert compiled.path_to_load(bundle) == other  # what this chip is called was guessed, that it loads is a fact
    probe._remember(own, "")
    assert compiled.path_to_load(bundle) == own


def test_a_copy_for_another_chip_is_a_problem_until_it_was_seen_to_load(bundle: Bundle, play: Play) -> None:
    copy = add_copy(bundle, "h13c", None)
    assert "it is for h13c, and this Mac takes h16c. Compile again: coreai-rgba" in compiled.state(bundle).problem
    probe._remember(copy, "")
    assert compiled.state(bundle).problem == ""


def test_on_an_unknown_chip_a_copy_is_taken_if_it_loads(bundle: Bundle, play: Play) -> None:
    play("Apple M9")
    copy = add_copy(bundle, "h21g")
    assert compiled.state(bundle) == compiled.CompiledState(copy, "h21g", "", True)
    assert compiled.path_to_load(bundle) == copy


def test_a_mac_that_does_not_tell_what_it_is_is_no_crash(bundle: Bundle, play: Play, tmp_path: Path) -> None:
    add_copy(bundle, "h16c")
    (tmp_path / "mac" / "programs" / "sw_vers").write_text("#!/bin/sh\nexit 1\n")
    assert "sw_vers -buildVersion" in compiled.state(bundle).problem


@pytest.mark.parametrize(("kind", "part"), [(TEXT_ENCODER, "encoder"), (VAE_DECODER, "vae")])
def test_the_advice_names_the_part_and_the_set_absolutely(
    kind: object, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    advice = compiled.compile_advice(Bundle(Path("set") / "x.aimodel", {MAIN: kind}, {}, ""))
    assert advice == f"coreai-rgba compile {tmp_path / 'set'} {part}"


def test_a_dit_is_expected_to_double(bundle: Bundle) -> None:
    assert compiled.expected_size(bundle) == 2 * bundle.size
    encoder = Bundle(bundle.path, {MAIN: TEXT_ENCODER}, {}, "")
    assert bundle.size < compiled.expected_size(encoder) < 1.2 * bundle.size


MESSAGES = {
    "not compiled": "not compiled, and macOS would abort.*coreai-rgba compile",
    "of another chip": "does not load here.*it is for h13g, and this Mac takes h16c.*coreai-rgba compile",
    "of two other chips": "h13g.*h14s.*keep the one.*coreai-rgba compile",
    "truncated": "it is damaged.*coreai-rgba compile",
    "truncated, by hand": "the process dies by SIG.*coreai-rgba compile",
    "of another source": "made from another version.*coreai-rgba compile",
    "record damaged": "record is damaged.*coreai-rgba compile",
    "source damaged": "download or export it again",
    "dies under a new macOS": "dies by SIGABRT.*coreai-rgba compile",
    "hangs": "did not load within.*try again",
}


def test_no_load_ends_the_process_and_following_the_advice_helps(tmp_path: Path) -> None:
    source = tmp_path / "source"
    path = Path(shutil.copytree(EMBEDDED_FOLDER / ENCODER, source / ENCODER))
    env = environment(tmp_path / "mac") | {"PYTHONPATH": str(HERE)}
    with pytest.MonkeyPatch.context() as patch:
        player(patch, tmp_path / "mac")()
        compiler.compile_bundle(read_bundle(path))
    command = [sys.executable, str(CHILD), str(source), str(tmp_path / "work")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    for case in ("none", "by hand"):
        assert results.pop(case) == [["no error", ""]] * 2
    assert {case for case, (_, after) in results.items() if after != ["no error", ""]} == set()
    assert results.keys() == MESSAGES.keys()
    for case, ((error, message), _) in results.items():
        assert error in ("ContractError", "DamagedBundleError"), case
        assert re.search(MESSAGES[case], message), (case, message)
