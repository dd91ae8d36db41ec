"""What is told of a model set: its parts, what is wrong with it, and the command that mends it."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from coreai_rgba_image.host import compiled
from coreai_rgba_image.host.compiled import CompiledState
from coreai_rgba_image.host.describe import Part, describe
from coreai_rgba_image.host.model_set import ModelSet

from .published_set import DIT, ENCODER

VAE = "qi21_vae_1024_fp32.aimodel"


@pytest.fixture
def own_set(published_set: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(published_set, tmp_path / "own"))


def test_a_whole_set_is_told_with_all_its_parts(published_set: Path) -> None:
    found = describe("name", ModelSet(published_set))
    assert found.usable
    assert (found.name, found.path, found.licence, found.problems) == ("name", str(published_set), "FOR RESEARCH", ())
    assert found.sizes == ((176, 144), (192, 128), (256, 256))
    parts = {part.name: part for part in found.parts}
    assert {part.kind for part in found.parts} == {"text encoder", "DiT", "VAE decoder"}
    assert parts[ENCODER].limits == {"Lfull": (16, 512)}
    assert (parts[DIT].functions, parts[DIT].limits) == (("main",), {"L": (8, 512), "N": (64, 4096)})
    assert parts[VAE].picture == (176, 144), "whatever its name says"
    assert parts[DIT].size == (published_set / DIT / "main.mlirb").stat().st_size
    assert not any(part.guessed for part in found.parts)
    lines = list(found.lines())
    assert lines[0] == "licence: FOR RESEARCH"
    assert any(f"text encoder: {ENCODER}, " in line and "prompts of up to 512 tokens" in line for line in lines)
    assert lines[-1] == "sizes: 176x144, 192x128, 256x256"


def test_it_is_json(published_set: Path) -> None:
    found = json.loads(json.dumps(describe("name", ModelSet(published_set)).to_json()))
    assert found["usable"] is True
    assert found["parts"][0]["compiled"] == {"name": "", "architecture": "", "size": 0, "needed": False}
    assert found["sizes"] == [[176, 144], [192, 128], [256, 256]]


def test_each_thing_that_is_wrong_has_its_command(own_set: Path) -> None:
    shutil.rmtree(own_set / DIT)
    (own_set / VAE / "main.mlirb").write_bytes(bytes(5000))
    (own_set / "tokenizer" / "tokenizer.json").unlink()
    (own_set / "NOTICE").unlink()
    found = describe("own", ModelSet(own_set))
    assert not found.usable
    command = f"coreai-rgba download own --to {own_set.parent} --accept-license"
    assert [(problem.blocks, problem.command) for problem in found.problems] == [
        (False, command), (True, command), (True, command), (False, command)
    ]  # fmt: skip
    told = ["1024_fp32.aimodel/main.mlirb does not match", "holds no DiT", "no tokenizer", "has no NOTICE"]
    assert all(text in problem.text for text, problem in zip(told, found.problems, strict=True))
    lines = list(found.lines())
    assert sum(line.startswith("problem: ") for line in lines) == 2
    assert all(line.count(command) == 1 for line in lines if line.startswith(("problem: ", "note: ")))
    [guess] = [part for part in found.parts if part.guessed]
    assert (guess.name, guess.kind, guess.picture, guess.size) == (VAE, "VAE decoder", (1024, 1024), 5000)


def test_a_set_of_ones_own_lacks_no_published_files(tiny_set: Path) -> None:
    assert describe("tiny", ModelSet(tiny_set)).problems == ()


def test_a_set_that_is_gone_is_a_problem_and_no_exception(tmp_path: Path) -> None:
    found = describe("gone", ModelSet(tmp_path / "gone"))
    assert (found.usable, found.parts, found.sizes) == (False, (), ())
    assert "gone is gone: connect its disk again" in found.problems[0].text


def test_what_a_mac_needs_compiled_is_told(own_set: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states that a Mac would have; how they come about is tested where they do."""
    copy = own_set / "aot" / "encoder.h16c.aimodelc"
    copy.mkdir(parents=True)
    (copy / "main-h16c.mlirb").write_bytes(bytes(1000))
    states = {
        "text encoder": CompiledState(copy, "h16c", "", True),
        "DiT": CompiledState(None, None, "it is not compiled: coreai-rgba compile own dit", True),
        "VAE decoder": CompiledState(None, None, "", False),
    }
    monkeypatch.setattr(compiled, "state", lambda bundle: states[bundle.spec.kind])
    found = describe("own", ModelSet(own_set))
    [problem] = found.problems
    assert (problem.text, problem.blocks, found.usable) == (states["DiT"].problem, True, False)
    assert problem.command == compiled.compile_advice(ModelSet(own_set).dit)
    texts = {part.kind: part.text for part in found.parts}
    assert "compiled for h16c (0.0 MB)" in texts["text encoder"]
    assert texts["DiT"].endswith(", not compiled")
    assert texts["VAE decoder"].endswith("needs no compiled copy here")


def test_without_core_ai_names_are_the_best_guess(published_set: Path, tmp_path: Path) -> None:
    code = f"""
import json, sys
sys.modules["coreai"] = None
from coreai_rgba_image.host.describe import describe
from coreai_rgba_image.host.model_set import ModelSet
print(json.dumps(describe("name", ModelSet(__import__("pathlib").Path({str(published_set)!r}))).to_json()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(done.stdout)
    assert (found["usable"], found["problems"][0]["command"]) == (False, "pip install coreai-core")
    assert [(part["guessed"], part["kind"]) for part in found["parts"]] == [
        (True, "DiT"), (True, "text encoder"), *[(True, "VAE decoder")] * 3
    ]  # fmt: skip
    assert found["sizes"] == [[256, 256], [512, 512], [1024, 1024]]


def test_a_part_of_an_unknown_name_is_unknown() -> None:
    part = Part("mine.aimodel", "", True, 2_500_000_000)
    assert part.text == "unknown (by its name): mine.aimodel, 2.50 GB"
    assert replace(part, kind="DiT", size=1_500_000).text == "DiT (by its name): mine.aimodel, 1.5 MB"
