"""The oracle against a plain call of diffusers' pipeline that hooks watch: bit for bit."""

import hashlib
import json
import shutil
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from coreai_rgba_image.host.bundle import METADATA_KEY
from coreai_rgba_image.host.cli import main
from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.gates.oracle import Oracle, Request, capture, checkpoint_files, perturbed
from coreai_rgba_image.host.latents import initial_noise, pack, to_vae_space, unpack
from coreai_rgba_image.host.pixels import composite, to_rgba8
from coreai_rgba_image.host.prompt import PromptTokenizer

pytestmark = pytest.mark.slow

GUIDED_FILES = [
    "prompt", "negative_prompt", "start", "step_0000", "step_0001", "step_0002", "step_0003", "decode", "picture",
]  # fmt: skip


def observe(pipeline: Any, request: Request) -> dict[str, list[np.ndarray]]:
    """What a plain call of the pipeline passes, in the order it does."""
    seen: dict[str, list[np.ndarray]] = {}

    def note(name: str, value: torch.Tensor) -> None:
        seen.setdefault(name, []).append((value.float() if value.is_floating_point() else value).numpy().copy())

    def encoder(module: Any, arguments: Any, options: dict[str, Any], output: Any) -> None:
        note("ids", options["input_ids"])
        note("hidden", output.hidden_states[-1])

    def transformer(module: Any, arguments: Any, options: dict[str, Any], output: Any) -> None:
        note("latents", options["hidden_states"])
        note("timestep", options["timestep"])
        note("embeddings", options["encoder_hidden_states"])
        note("velocity", output[0][:, -options["hidden_states"].shape[1] :])

    def decoder(module: Any, arguments: Any) -> None:
        note("vae_input", arguments[0])

    def at_step_end(pipe: Any, step: int, time: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        note("after", tensors["latents"])
        return tensors

    handles = [
        pipeline.text_encoder.register_forward_hook(encoder, with_kwargs=True),
        pipeline.transformer.register_forward_hook(transformer, with_kwargs=True),
        # The first module of ``vae.decode``, so what it is given is what ``decode`` was given.
        pipeline.vae.post_quant_conv.register_forward_pre_hook(decoder),
    ]
    try:
        images = pipeline(
            request.prompt, negative_prompt=request.negative_prompt, true_cfg_scale=request.cfg,
            width=request.width, height=request.height, num_inference_steps=request.steps,
            generator=torch.Generator("cpu").manual_seed(request.seed), callback_on_step_end=at_step_end,
        ).images  # fmt: skip
    finally:
        for handle in handles:
            handle.remove()
    seen["picture"] = [np.asarray(image) for image in images]
    note("sigmas", pipeline.scheduler.sigmas)
    note("timesteps", pipeline.scheduler.timesteps)
    return seen


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def bf16_pipeline(tiny_checkpoint: Path) -> Any:
    from diffusers import QwenImage21Pipeline

    pipeline = QwenImage21Pipeline.from_pretrained(tiny_checkpoint, dtype=torch.bfloat16)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module", params=["square", "guided, not square", "bf16"])
def oracle(captures: dict[str, Oracle], request: pytest.FixtureRequest) -> Oracle:
    return captures[request.param]


@pytest.fixture(scope="module")
def seen(oracle: Oracle, reference_pipeline: Any, bf16_pipeline: Any) -> dict[str, list[np.ndarray]]:
    return observe(bf16_pipeline if oracle.request.dtype == "bf16" else reference_pipeline, oracle.request)


def test_the_text_is_what_a_plain_call_sees(oracle: Oracle, seen: dict[str, list[np.ndarray]]) -> None:
    tokens = PromptTokenizer.from_file(oracle.request.checkpoint / "processor").encode(oracle.request.prompt)
    assert oracle.ids.dtype == np.int32
    assert np.array_equal(oracle.ids, tokens.ids)
    assert np.array_equal(oracle.ids, seen["ids"][0])
    assert oracle.drop_idx == tokens.drop_idx
    assert np.array_equal(oracle.hidden, seen["hidden"][0])
    assert oracle.hidden.shape == (1, oracle.ids.shape[1], 64)
    assert np.array_equal(oracle.embeddings, seen["embeddings"][0])
    assert np.array_equal(oracle.embeddings, oracle.hidden[:, oracle.drop_idx :])
    if oracle.request.guided:
        assert np.array_equal(oracle.negative("ids"), seen["ids"][1])
        assert np.array_equal(oracle.negative("hidden"), seen["hidden"][1])
        assert np.array_equal(oracle.negative("embeddings"), seen["embeddings"][1])


def test_noise_and_schedule_are_a_plain_calls(oracle: Oracle, seen: dict[str, list[np.ndarray]]) -> None:
    assert np.array_equal(oracle.noise, seen["latents"][0])
    if oracle.request.dtype == "fp32":
        assert np.array_equal(oracle.noise, pack(initial_noise(oracle.request.seed, *oracle.request.grid)))
    assert np.array_equal(oracle.sigmas, seen["sigmas"][0])
    assert np.array_equal(oracle.timesteps, seen["timesteps"][0])
    assert (oracle.steps, oracle.sigmas.shape) == (oracle.request.steps, (oracle.request.steps + 1,))
    height, width = oracle.request.grid
    assert oracle.mu == 0.5 + (height * width - 256) * (0.9 - 0.5) / (8192 - 256)


def test_every_step_is_a_plain_calls(oracle: Oracle, seen: dict[str, list[np.ndarray]]) -> None:
    branches = 2 if oracle.request.guided else 1
    assert len(seen["velocity"]) == branches * oracle.steps
    for step in range(oracle.steps):
        assert np.array_equal(oracle.latents(step), seen["latents"][branches * step])
        assert np.array_equal(oracle.timestep(step), seen["timestep"][branches * step])
        assert np.array_equal(oracle.conditional(step), seen["velocity"][branches * step])
        after = oracle.latents(step + 1) if step + 1 < oracle.steps else oracle.final_latents
        assert np.array_equal(after, seen["after"][step])
        if oracle.request.guided:
            conditional, unconditional = seen["velocity"][2 * step : 2 * step + 2]
            assert np.array_equal(oracle.unconditional(step), unconditional)
            expected = unconditional + np.float32(oracle.request.cfg) * (conditional - unconditional)
            assert np.array_equal(oracle.velocity(step), expected)
        else:
            assert np.array_equal(oracle.velocity(step), oracle.conditional(step))
    assert not np.array_equal(oracle.velocity(0), oracle.velocity(1))


def test_the_picture_is_a_plain_calls(oracle: Oracle, seen: dict[str, list[np.ndarray]]) -> None:
    height, width = oracle.request.grid
    assert np.array_equal(oracle.vae_input, seen["vae_input"][0])
    if oracle.request.dtype == "fp32":
        z = unpack(oracle.final_latents, height, width)
        assert np.array_equal(oracle.vae_input, to_vae_space(z)[:, :, None])
    assert oracle.vae_output.shape == (1, 4, 16 * height, 16 * width)
    assert np.array_equal(oracle.rgba8[0], seen["picture"][0])
    assert oracle.rgba8.std() > 10
    if oracle.request.dtype == "fp32":  # in bf16 the pipeline scales to 0 .. 1 in bf16 too
        assert np.array_equal(oracle.rgba8, to_rgba8(oracle.vae_output))
    assert np.array_equal(oracle.white8, composite(oracle.rgba8))
    for name, picture in (("rgba", oracle.rgba8), ("white", oracle.white8)):
        assert np.array_equal(np.asarray(Image.open(oracle.folder / f"{name}.png")), picture[0])


def test_every_file_says_what_made_it(guided: Oracle, tiny_checkpoint: Path) -> None:
    assert guided.request.files == GUIDED_FILES
    assert {path.name for path in guided.folder.iterdir()} == {
        *(f"{name}.safetensors" for name in GUIDED_FILES), "rgba.png", "white.png"
    }  # fmt: skip
    headers = []
    for name in GUIDED_FILES:
        with safe_open(guided.folder / f"{name}.safetensors", "np") as file:
            metadata = file.metadata()
        assert list(metadata) == [METADATA_KEY]
        headers.append(json.loads(metadata[METADATA_KEY]))
    assert len({header.pop("content") for header in headers}) == len(headers)
    assert all(header == headers[0] for header in headers)
    header = headers[0]
    assert (header["format"], header["version"]) == ("coreai-rgba oracle", 1)
    assert header["request"] == {
        "checkpoint": str(tiny_checkpoint.resolve()), "prompt": "-\"it's\" a {sticker}\n🍎", "negative_prompt": "",
        "width": 192, "height": 128, "steps": 4, "seed": 2**64 - 1, "cfg": 3.0, "dtype": "fp32",
        "embed_perturb": 0.0, "perturb_seed": 0,
    }  # fmt: skip
    made_by = header["made_by"]
    assert made_by == guided.made_by
    assert made_by["torch"] == version("torch")
    assert made_by.keys() == {"diffusers", "transformers", "torch", "checkpoint_sha256", "checkpoint_files"}
    files = {path.relative_to(tiny_checkpoint).as_posix(): path for path in tiny_checkpoint.rglob("*")}
    assert made_by["checkpoint_files"] == {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sorted(files.items()) if path.is_file()
    }


def test_only_what_the_index_names_is_hashed(tiny_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))
    (checkpoint / "README.md").write_text("hello", encoding="utf-8")
    (checkpoint / "oracle").mkdir()
    (checkpoint / "oracle" / "start.safetensors").write_bytes(b"")
    (checkpoint / "vae" / ".DS_Store").write_bytes(b"")
    found = [path.relative_to(checkpoint) for path in checkpoint_files(checkpoint)]
    assert found == [path.relative_to(tiny_checkpoint) for path in checkpoint_files(tiny_checkpoint)]


def test_fixed_sigmas_of_a_checkpoint_are_used(tiny_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(tiny_checkpoint, tmp_path / "turbo"))
    index = json.loads((checkpoint / "model_index.json").read_text(encoding="utf-8"))
    (checkpoint / "model_index.json").write_text(json.dumps({**index, "sample_sigmas": [1.0, 0.6]}), encoding="utf-8")
    request = Request(checkpoint, width=192, height=128, steps=40)
    with pytest.raises(ContractError, match="2 fixed steps, so set steps to 2"):
        capture(request, tmp_path / "out")
    oracle = capture(replace(request, steps=2), tmp_path / "out")
    assert oracle.sigmas.tolist() == [1, pytest.approx(0.02), 0]


def test_perturbed_embeddings_are_scaled_by_their_own_size() -> None:
    embeddings = np.random.default_rng(0).standard_normal((1, 40, 64), dtype=np.float32)
    assert np.array_equal(perturbed(embeddings, 0.0, 3), embeddings)
    changed = perturbed(embeddings, 1e-3, 3)
    assert changed.dtype == np.float32
    assert np.array_equal(changed, perturbed(embeddings, 1e-3, 3))
    assert not np.array_equal(changed, perturbed(embeddings, 1e-3, 4))
    relative = changed / embeddings - 1
    assert relative.std() == pytest.approx(1e-3, rel=0.05)
    assert abs(relative.mean()) < 1e-4
    noise = torch.randn((1, 40, 64), generator=torch.Generator().manual_seed(3)).numpy()
    assert np.array_equal(changed, embeddings * (1 + np.float32(1e-3) * noise))


def test_a_perturbed_capture_differs_from_the_embeddings_on(guided: Oracle, tmp_path: Path) -> None:
    oracle = capture(replace(guided.request, embed_perturb=1e-2, perturb_seed=5), tmp_path / "perturbed")
    assert np.array_equal(oracle.hidden, guided.hidden)
    assert np.array_equal(oracle.noise, guided.noise)
    assert np.array_equal(oracle.embeddings, perturbed(guided.embeddings, 1e-2, 5))
    assert np.array_equal(oracle.negative("embeddings"), perturbed(guided.negative("embeddings"), 1e-2, 5))
    difference = np.abs(oracle.conditional(0) - guided.conditional(0)).max()
    assert 0 < difference < 0.1 * np.abs(guided.conditional(0)).max()
    before = contents(oracle.folder)
    (oracle.folder / "step_0002.safetensors").unlink()
    capture(oracle.request, oracle.folder)
    assert contents(oracle.folder) == before


def test_the_command_captures_what_the_options_say(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["oracle", "--checkpoint", str(tiny_checkpoint), "--out", str(out), "--size", "192x128"]
    assert main([*arguments, "--steps", "2"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert Oracle(out).request == Request(tiny_checkpoint.resolve(), width=192, height=128, steps=2)
    assert main([*arguments, "--steps", "3"]) == 1
    assert "steps is 2 there and 3 here" in capsys.readouterr().err
    assert main([*arguments[:-1], "176x144"]) == 1
    assert "the width is 176 pixels" in capsys.readouterr().err
