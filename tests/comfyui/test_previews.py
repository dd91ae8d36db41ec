"""What the sampler shows while it works: a progress event and a preview for each step, unless previews are off."""

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from .server import Client, Run, Server, make_base, running_server
from .workflows import latents, node, picture

pytestmark = pytest.mark.slow

STICKER = "a large red star sticker, transparent background"

PREVIEW_SWITCH = """
from comfy.cli_args import LatentPreviewMethod, args
class PreviewSwitch:
    @classmethod
    def INPUT_TYPES(cls): return {"required": {"latent": ("LATENT",), "method": ("STRING", {})}}
    RETURN_TYPES, FUNCTION, CATEGORY = ("LATENT",), "run", "other"
    def run(self, latent, method):
        args.preview_method = LatentPreviewMethod(method)
        return (latent,)
NODE_CLASS_MAPPINGS = {"PreviewSwitch": PreviewSwitch}
"""
"""A pack that changes the method while the server runs, as newer versions of ComfyUI do for each prompt."""


def shown(run: Run) -> list[np.ndarray]:
    """The previews, ``[H, W, 3]``; they must be JPEG files."""
    pictures = [Image.open(io.BytesIO(preview)) for preview in run.previews]
    assert {picture.format for picture in pictures} <= {"JPEG"}
    return [np.asarray(picture) for picture in pictures]


@pytest.mark.parametrize(("feature_flags", "event"), [(True, 4), (False, 1)], ids=["with metadata", "without"])
def test_each_step_is_told_and_shown_once(server: Server, feature_flags: bool, event: int) -> None:
    client = Client(server.address, feature_flags=feature_flags)
    run = client.run(latents(f"told and shown as {event}", steps=4))
    client.close()
    assert run.outcome == "execution_success"
    told = [data for data in run.told("progress") if data["node"] == "sampler"]
    assert [(data["value"], data["max"]) for data in told] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert run.preview_events == [event] * 4
    assert [preview.shape for preview in shown(run)] == [(128, 192, 3)] * 4


def test_a_preview_is_no_larger_than_comfyui_asks_for(client: Client) -> None:
    [preview] = shown(client.run(latents("large", width=1024, height=256, steps=1)))
    assert preview.shape == (128, 512, 3)


def test_the_last_preview_is_like_the_picture_on_a_checkerboard(client: Client) -> None:
    run = client.run(picture(STICKER, model="demo", width=256, height=256, steps=8))
    last = shown(run)[-1].astype(float)
    [saved] = run.outputs("save")
    rgba = np.asarray(Image.open(io.BytesIO(client.view(saved))), dtype=float)
    rows, columns = np.indices((256, 256)) // 16
    board = np.where((rows + columns) % 2, 153.0, 204.0)[..., None]
    alpha = rgba[..., 3:] / 255
    expected = rgba[..., :3] * alpha + board * (1 - alpha)
    assert 10 * np.log10(255**2 / np.square(last - expected).mean()) >= 18
    transparent = rgba[:32, :32, 3] == 0
    assert transparent.mean() > 0.9
    assert np.abs(last[:32, :32] - board[:32, :32])[transparent].mean() < 12


@pytest.fixture(scope="module")
def server_without_previews(
    comfyui: Path, tiny_set: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    base = make_base(tmp_path_factory.mktemp("without-previews") / "base")
    (base / "models" / "coreai" / "tiny").symlink_to(tiny_set, target_is_directory=True)
    (base / "custom_nodes" / "switch.py").write_text(PREVIEW_SWITCH, encoding="utf-8")
    with running_server(comfyui, base, previews="none") as server:
        yield server


def test_preview_method_none_is_obeyed_and_so_is_a_later_choice(server_without_previews: Server) -> None:
    client = Client(server_without_previews.address)
    run = client.run(latents("not shown", steps=2))  # newer versions of ComfyUI leave out quick ones between
    assert (run.progress, run.previews) == ([1, 2], [])
    for method, previews in (("auto", 2), ("none", 0)):
        workflow = latents("switched", steps=2, latent_image=["switch", 0])
        workflow["switch"] = node("PreviewSwitch", latent=["empty", 0], method=method)
        run = client.run(workflow)
        assert (run.progress, len(run.previews)) == ([1, 2], previews)
    client.close()
