"""The command line, run in this process on the tiny model set."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from coreai_rgba_image.host.cli import MODELS_VARIABLE, main
from coreai_rgba_image.host.denoiser import Shortcuts
from coreai_rgba_image.host.doctor import Page
from coreai_rgba_image.host.latents import initial_noise
from coreai_rgba_image.host.model_set import ModelSet
from coreai_rgba_image.host.pipeline import decode, encode_prompt, generate
from coreai_rgba_image.host.pixels import to_rgba8
from coreai_rgba_image.host.sampling import Sampling, Settings

PROMPT = "a red apple"


def test_generate_writes_the_picture_and_prints_where(
    tiny_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "apple.png"
    size = ["--width", "192", "--height", "128", "--steps", "2", "--seed", "5"]
    assert main(["generate", PROMPT, "--model", str(tiny_set), *size, "-o", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    picture = np.asarray(Image.open(out))
    assert np.array_equal(picture, generate(ModelSet(tiny_set), PROMPT, 192, 128, Settings(2), seed=5))


def test_a_size_without_a_decoder_is_drawn_from_tiles(tiny_set: Path, tmp_path: Path) -> None:
    """288x128 with the decoder for 192x128; a size that has one is drawn whole."""
    out, model, tile = tmp_path / "apple.png", ModelSet(tiny_set), (8, 12)
    command = ["generate", PROMPT, "--model", str(tiny_set), "--height", "128", "--steps", "1", "-o", str(out)]
    assert main([*command, "--width", "288", "--tiled"]) == 0
    sampling = Sampling(model, encode_prompt(model, PROMPT), initial_noise(0, 8, 18), Settings(1))
    list(sampling.run())
    [image] = decode(model, sampling.tokens, 8, 18, largest_tile=tile)
    assert np.array_equal(np.asarray(Image.open(out)), to_rgba8(image)[0])
    assert main([*command, "--width", "192", "--tiled"]) == 0
    assert np.array_equal(np.asarray(Image.open(out)), generate(model, PROMPT, 192, 128, Settings(1)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--width", "0", "--height", "0"], "the width is 0 pixels"),
        (["--width", "256"], "give both width and height"),
        (["--width", "320", "--height", "256"], "no VAE decoder for 320x256"),
        (["--steps", "0"], "steps is 0"),
        (["--cfg", "4"], "no negative prompt"),
        (["--seed", "-1"], "the seed is -1"),
        (["--model", "nobody's"], "no model set is called"),
        (["--sampler", "ddim"], "there is no sampler 'ddim'"),
        (["--sigmas", "0.2,0.4"], "number 2 of sigmas"),
        (["--step-cache", "0.7"], "share of re-used steps is 0.7"),
        (["--batch-file", "jobs.json"], "give either a prompt or --batch-file"),
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


def test_a_batch_file_draws_what_single_commands_draw_and_tells_each_step(
    tiny_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs, log = tmp_path / "jobs.json", tmp_path / "progress.jsonl"
    outputs = [tmp_path / f"{seed}.png" for seed in (3, 8)]
    jobs.write_text(json.dumps([{"seed": int(path.stem), "output": str(path)} for path in outputs]), encoding="utf-8")
    common = ["--model", str(tiny_set), "--width", "192", "--height", "128", "--steps", "2"]
    batch = ["--batch-file", str(jobs), "--progress-file", str(log)]
    assert main(["generate", *common, *batch]) == 1, "no prompt, neither on the command line nor in the jobs"
    jobs.write_text(
        json.dumps([{"prompt": PROMPT, "seed": int(path.stem), "output": str(path)} for path in outputs]),
        encoding="utf-8",
    )
    capsys.readouterr()
    assert main(["generate", *common, *batch]) == 0
    assert capsys.readouterr().out.split() == [str(path) for path in outputs]
    for path in outputs:
        single = generate(ModelSet(tiny_set), PROMPT, 192, 128, Settings(2), seed=int(path.stem))
        assert np.array_equal(np.asarray(Image.open(path)), single)
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert [(line["stage"], line["step"]) for line in lines if line["stage"] != "decode"] == [
        ("encode", 0), ("encode", 1), *(("sample", step) for step in range(5))
    ]  # fmt: skip
    assert [line["step"] for line in lines if line["stage"] == "decode"] == [1, 2]
    assert all(line["seconds"] >= 0 and line["free_memory"] > 0 for line in lines)


def test_every_sampler_setting_reaches_the_sampler(
    tiny_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Settings] = []

    def noting(*arguments: Any, **others: Any) -> list[np.ndarray]:
        given.append(arguments[4])
        return [np.zeros((8, 8, 4), np.uint8)]

    monkeypatch.setattr("coreai_rgba_image.host.pipeline.generate_batch", noting)
    options = (
        "--steps 7 --cfg 2.5 --sampler dpmpp_2m --sigmas 1,0.6,0.2 --text-reuse off --step-cache 0.25 "
        "--first-block-cache 0.1 --negative-prompt x"
    )
    arguments = ["generate", PROMPT, "--model", str(tiny_set), *options.split(), "-o", str(tmp_path / "a.png")]
    assert main(arguments) == 0
    assert given == [Settings(7, 2.5, "dpmpp_2m", "model", (1.0, 0.6, 0.2), Shortcuts("off", 0.1, 0.25))]
    assert main([*arguments, "--schedule", "karras"]) == 1


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


def test_models_of_some_sets_in_json_for_scripts(
    tiny_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny").symlink_to(tiny_set, target_is_directory=True)
    monkeypatch.setenv(MODELS_VARIABLE, str(tmp_path))
    assert main(["models", "tiny", str(tiny_set), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["looked_in"] == [str(tmp_path)]
    assert [(found["name"], found["usable"]) for found in told["sets"]] == [("tiny", True), (str(tiny_set), True)]
    assert told["sets"][0]["sizes"] == [[176, 144], [192, 128], [256, 256]]
    assert main(["models", "nobody's"]) == 1
    assert 'no model set is called "nobody\'s"' in capsys.readouterr().err


def test_a_list_of_500_bundles_opens_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(500):
        (tmp_path / f"set {number // 5}" / f"{number}.aimodel").mkdir(parents=True)
    monkeypatch.setenv(MODELS_VARIABLE, str(tmp_path))
    opened: list[Path] = []
    monkeypatch.setattr("coreai_rgba_image.host.model_set.read_bundle", opened.append)
    started = time.perf_counter()
    assert main(["models", "--list", "--json"]) == 0
    assert time.perf_counter() - started < 2
    sets = json.loads(capsys.readouterr().out)["sets"]
    assert sum(len(found["bundles"]) for found in sets) >= 500
    assert sets[0] == {"name": "set 0", "path": f"{tmp_path}/set 0", "bundles": [f"{n}.aimodel" for n in range(5)]}
    assert main(["models", "--list"]) == 0
    assert f"set 99  {tmp_path}/set 99\n  bundles: 5\n" in capsys.readouterr().out
    assert opened == []


@pytest.mark.parametrize(("works", "status"), [(True, 0), (False, 1)])
def test_doctor_ends_with_1_if_nothing_can_be_drawn(
    works: bool, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("coreai_rgba_image.host.doctor.examine", lambda *places: Page("the page\n", works))
    assert main(["doctor"]) == status
    assert capsys.readouterr().out == "the page\n"


def test_export_without_sizes_makes_the_published_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        "coreai_rgba_image.host.export.model_set.export_model_set", lambda *values, **others: asked.append(values[3])
    )
    assert main(["export", "--checkpoint", str(tmp_path), "--out", str(tmp_path)]) == 0
    assert main(["export", "--checkpoint", str(tmp_path), "--out", str(tmp_path), "--size", "384x256"]) == 0
    assert asked == [("256", "512", "1024"), ["384x256"]]


def test_export_says_what_a_checkpoint_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--checkpoint", str(tmp_path), "--out", str(tmp_path / "set"), "--size", "256"]) == 1
    assert "model_index.json" in capsys.readouterr().err
    assert not (tmp_path / "set").exists()
