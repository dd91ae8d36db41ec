"""The command line, run in this process on the tiny model set."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from coreai_rgba_image.host.cli import MODELS_VARIABLE, main
from coreai_rgba_image.host.model_set import ModelSet
from coreai_rgba_image.host.pipeline import generate

PROMPT = "a red apple"


def test_generate_writes_the_picture_and_prints_where(
    tiny_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "apple.png"
    size = ["--width", "192", "--height", "128", "--steps", "2", "--seed", "5"]
    assert main(["generate", PROMPT, "--model", str(tiny_set), *size, "-o", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    picture = np.asarray(Image.open(out))
    assert np.array_equal(picture, generate(ModelSet(tiny_set), PROMPT, 192, 128, steps=2, seed=5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--width", "0", "--height", "0"], "the width is 0 pixels"),
        (["--width", "256"], "give both --width and --height"),
        (["--width", "320", "--height", "256"], "no VAE decoder for 320x256"),
        (["--steps", "0"], "steps is 0"),
        (["--cfg", "4"], "no negative prompt"),
        (["--seed", "-1"], "the seed is -1"),
        (["--model", "nobody's"], "no model set is called"),
        (["-o", "picture.jpg"], "would lose the transparency"),
        (["-o", "nowhere/picture.png"], "is not a folder"),
    ],
)
def test_a_wrong_request_ends_in_a_message_and_status_1(
    options: list[str], message: str, tiny_set: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", PROMPT, "--model", str(tiny_set), *options]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_models_lists_every_set_and_what_it_lacks(
    tiny_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    half = tmp_path / "half" / "qi21_vae_256_fp32.aimodel"
    half.parent.mkdir()
    half.symlink_to(tiny_set / half.name, target_is_directory=True)
    (tmp_path / "tiny").symlink_to(tiny_set, target_is_directory=True)
    monkeypatch.setenv(MODELS_VARIABLE, str(tmp_path))
    assert main(["models"]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines() if not line.startswith(" ")] == [
        "half",
        "tiny",
        "demo",
        "looked",
    ]
    assert "holds no DiT bundle. To make it from the checkpoint: coreai-rgba export" in listed


def test_export_says_what_a_checkpoint_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--checkpoint", str(tmp_path), "--out", str(tmp_path / "set"), "--size", "256"]) == 1
    assert "model_index.json" in capsys.readouterr().err
    assert not (tmp_path / "set").exists()
