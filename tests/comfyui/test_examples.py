"""The example workflows, run from the API as they are; what they draw is what their thumbnails show."""

import io
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from .make_examples import EXAMPLES, NOTES, draw, examples, put_photo, save_thumbnail, thumbnail
from .server import Client, Server

pytestmark = pytest.mark.slow

CLIENT = EXAMPLES / "api" / "client.py"
SECONDS_FOR_ALL = 360
STICKER = "sticker"

Pictures = dict[str, list[Image.Image]]


@pytest.fixture(scope="module")
def drawn(server: Server, comfyui: Path) -> tuple[Pictures, float]:
    """What each example draws, and the seconds that all of them took together."""
    put_photo(comfyui, server.base)
    client = Client(server.address)
    began = time.monotonic()
    pictures = {name: draw(client, workflow) for name, workflow in examples().items()}
    seconds = time.monotonic() - began
    client.close()
    return pictures, seconds


def test_each_example_is_whole() -> None:
    """A workflow in both formats, a thumbnail and a note."""
    names = set(examples())
    assert len(names) >= 6
    assert names == set(NOTES)
    assert names == {path.stem for path in EXAMPLES.glob("*.json")} == {path.stem for path in EXAMPLES.glob("*.jpg")}


@pytest.mark.parametrize("name", sorted(NOTES))
def test_the_thumbnail_is_what_it_draws(drawn: tuple[Pictures, float], name: str) -> None:
    """To 1 of 255, both as JPEG."""
    file = io.BytesIO()
    save_thumbnail(thumbnail(drawn[0][name]), file)
    expected, shipped = (np.asarray(Image.open(source), int) for source in (file, EXAMPLES / f"{name}.jpg"))
    np.testing.assert_allclose(shipped, expected, rtol=0, atol=1)
    assert expected.std() > 20, "the picture is too plain to show anything"


def test_all_of_them_run_in_six_minutes(drawn: tuple[Pictures, float]) -> None:
    assert drawn[1] < SECONDS_FOR_ALL


def test_the_examples_show_what_they_are_for(drawn: tuple[Pictures, float]) -> None:
    pictures, _ = drawn
    assert len({picture.tobytes() for picture in pictures["four_seeds"]}) == 4
    before, after = pictures["image_to_image"]
    assert before.tobytes() != after.tobytes()
    for name in set(NOTES) - {"sticker_on_photo"}:
        assert all(picture.getextrema()[3][0] == 0 for picture in pictures[name]), name  # nothing there, somewhere
    [photo] = pictures["sticker_on_photo"]
    assert photo.mode == "RGB"


def test_the_command_draws_the_same_sticker(drawn: tuple[Pictures, float], tmp_path: Path) -> None:
    inputs = {part["class_type"]: part["inputs"] for part in examples()[STICKER].values()}
    sampler, empty = inputs["CoreAIDiTSampler"], inputs["EmptyLatentImage"]
    options = {"--model": sampler["model"], "--seed": sampler["seed"], "--steps": sampler["steps"]}
    options |= {"--width": empty["width"], "--height": empty["height"], "--out": tmp_path / "command.png"}
    command = [str(Path(sys.executable).with_name("coreai-rgba")), "generate", inputs["CoreAITextEncode"]["text"]]
    command += [str(part) for option in options.items() for part in option]
    subprocess.run(command, check=True, timeout=300, cwd=tmp_path)
    theirs = Image.open(tmp_path / "command.png")
    [ours] = drawn[0][STICKER]
    assert ours.mode == theirs.mode == "RGBA"
    assert ours.tobytes() == theirs.tobytes()


def run_client(server: Server, *arguments: str | Path, **options: str) -> subprocess.Popen[str]:
    command = [sys.executable, CLIENT, *arguments, "--server", server.address]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_the_client_follows_a_prompt_and_saves_its_picture(server: Server, tmp_path: Path) -> None:
    text = "a large blue ring sticker, transparent background"
    process = run_client(
        server,
        EXAMPLES / "api/sticker.json",
        "--out",
        tmp_path / "out",
        "--set",
        f"1.text={text}",
        "--set",
        "3.steps=3",
    )
    said, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    *progress, path = said.splitlines()
    assert [line for line in progress if line.startswith("CoreAIDiTSampler")] == [
        f"CoreAIDiTSampler: {step} of 3" for step in (1, 2, 3)
    ]
    [saved] = (tmp_path / "out").iterdir()
    assert saved == Path(path)
    assert Image.open(saved).mode == "RGBA"
    assert "ring" in json.loads(Image.open(saved).info["prompt"])["1"]["inputs"]["text"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("1.text", "use NODE.INPUT=VALUE with one of 1.model, 1.text"),
        ("1.words=x", "use NODE.INPUT=VALUE with one of 1.model, 1.text"),
        ("3.steps=0", "ComfyUI refuses the workflow.*smaller than min"),
        ("1.model=gone", "(?=.*CoreAITextEncode).*gone"),
    ],
)
def test_the_client_says_what_is_wrong(server: Server, tmp_path: Path, setting: str, message: str) -> None:
    process = run_client(server, EXAMPLES / "api/sticker.json", "--out", tmp_path / "out", "--set", setting)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "Traceback" not in error
    assert re.search(message, error, re.DOTALL)
    assert not (tmp_path / "out").exists()


def test_ctrl_c_in_the_client_stops_the_prompt(server: Server, client: Client) -> None:
    process = run_client(server, EXAMPLES / "api/sticker.json", "--set", "3.steps=500", "--set", "3.seed=99")
    assert process.stdout is not None
    assert any(line.startswith("CoreAIDiTSampler: 2 ") for line in process.stdout)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (1, "stopped\n")
    deadline = time.monotonic() + 30  # 500 steps take longer
    while client.queue() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert client.queue() == []


def test_without_a_server_the_client_says_so(tmp_path: Path) -> None:
    command = [sys.executable, CLIENT, EXAMPLES / "api/sticker.json", "--server", "127.0.0.1:9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("no ComfyUI answers at 127.0.0.1:9: start it")
