"""What the nodes draw in a real server, compared with what the host draws without one."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load, save_file

from coreai_rgba_image.host.latents import from_vae_space, initial_noise, to_vae_space, unpack
from coreai_rgba_image.host.model_set import ModelSet
from coreai_rgba_image.host.pipeline import encode_prompt, generate
from coreai_rgba_image.host.sampling import Sampling, Settings

from .server import Client, Run, Server, Workflow
from .workflows import TEXT, latents, node, picture

pytestmark = pytest.mark.slow


def saved_pictures(client: Client, run: Run, save: str = "save") -> list[Image.Image]:
    assert run.outcome == "execution_success", run.messages[-1]
    return [Image.open(io.BytesIO(client.view(output))) for output in run.outputs(save)]


def saved_latents(client: Client, run: Run, save: str = "save_latents") -> np.ndarray:
    """``[B, 64, h, w]`` in VAE space."""
    assert run.outcome == "execution_success", run.messages[-1]
    [output] = run.outputs(save, "latents")
    return load(client.view(output))["latent_tensor"]


def sampled(model: ModelSet, noise: np.ndarray, steps: int = 2, cfg: float = 1.0, **others: Any) -> np.ndarray:
    """What the host's sampler makes of that noise and ``workflows.TEXT``, as a LATENT carries it."""
    sampling = Sampling(model, encode_prompt(model, TEXT), noise, Settings(steps, cfg), **others)
    list(sampling.run())
    height, width = noise.shape[2:]
    return unpack(to_vae_space(sampling.tokens, model.latent_statistics), height, width)


def put_latent(server: Server, name: str, samples: np.ndarray) -> Workflow:
    """A LoadLatent node ``loaded`` for a file that is put into the server's input folder."""
    file = f"{name}.latent"
    save_file(
        {"latent_tensor": samples, "latent_format_version_0": np.zeros(0, np.float32)}, server.base / "input" / file
    )
    return {"loaded": node("LoadLatent", latent=file)}


def test_alpha_survives_join_save_and_load(client: Client, server: Server, tiny_model: ModelSet) -> None:
    """IMAGE and MASK through JoinImageWithAlpha give the host's picture, bit for bit; LoadImage gives both back."""
    workflow = picture(steps=3)
    workflow["joined"] = node("JoinImageWithAlpha", image=["decode", 0], alpha=["decode", 1])
    workflow["save"] = node("SaveImage", images=["joined", 0], filename_prefix="joined")
    run = client.run(workflow)
    [joined] = saved_pictures(client, run)
    expected = generate(tiny_model, TEXT, 192, 128, Settings(3), seed=7)
    np.testing.assert_array_equal(np.asarray(joined), expected)
    assert len(np.unique(expected[..., 3])) > 20, "the alpha is too plain to show anything"

    (server.base / "input" / "joined.png").write_bytes(client.view(run.outputs("save")[0]))
    again = {
        "loaded": node("LoadImage", image="joined.png"),
        "joined": node("JoinImageWithAlpha", image=["loaded", 0], alpha=["loaded", 1]),
        "save": node("SaveImage", images=["joined", 0], filename_prefix="again"),
    }
    [loaded] = saved_pictures(client, client.run(again))
    # LoadImage gives 1 - alpha / 255, JoinImageWithAlpha 1 - that, and SaveImage truncates: a level may go.
    np.testing.assert_allclose(np.asarray(loaded)[..., 3].astype(int), expected[..., 3], rtol=0, atol=1)
    np.testing.assert_array_equal(np.asarray(loaded)[..., :3], expected[..., :3])


def test_a_batch_has_comfyuis_noise_and_gives_a_picture_each(client: Client, tiny_model: ModelSet) -> None:
    run = client.run(picture(batch=3))
    assert len({image.tobytes() for image in saved_pictures(client, run)}) == 3
    np.testing.assert_array_equal(saved_latents(client, run), sampled(tiny_model, initial_noise(7, 8, 12, 3)))


def test_one_of_a_batch_keeps_its_noise(client: Client, tiny_model: ModelSet) -> None:
    workflow = latents(batch=4, latent_image=["chosen", 0])
    workflow["chosen"] = node("LatentFromBatch", samples=["empty", 0], batch_index=2, length=1)
    expected = sampled(tiny_model, initial_noise(7, 8, 12, 1, [2]))
    np.testing.assert_array_equal(saved_latents(client, client.run(workflow)), expected)


EMPTY_LATENTS = {
    "4 channels": node("EmptyLatentImage", width=192, height=128, batch_size=1),
    "16 channels": node("EmptySD3LatentImage", width=192, height=128, batch_size=1),
    "16 channels, one frame": node("EmptyHunyuanLatentVideo", width=192, height=128, length=1, batch_size=1),
}


@pytest.mark.parametrize("kind", EMPTY_LATENTS)
def test_an_empty_latent_of_another_model_gives_the_size(client: Client, tiny_model: ModelSet, kind: str) -> None:
    workflow = latents() | {"empty": EMPTY_LATENTS[kind]}
    expected = sampled(tiny_model, initial_noise(7, 8, 12))
    np.testing.assert_array_equal(saved_latents(client, client.run(workflow)), expected)


def test_an_empty_latent_of_64_channels_gives_the_size(client: Client, server: Server, tiny_model: ModelSet) -> None:
    workflow = latents(latent_image=["loaded", 0]) | put_latent(server, "empty64", np.zeros((1, 64, 8, 12), np.float32))
    expected = sampled(tiny_model, initial_noise(7, 8, 12))
    np.testing.assert_array_equal(saved_latents(client, client.run(workflow)), expected)


def test_denoise_below_1_starts_from_the_latent(client: Client, server: Server, tiny_model: ModelSet) -> None:
    start = to_vae_space(np.random.default_rng(1).standard_normal((1, 64, 8, 12), np.float32))
    load_start = put_latent(server, "start", start)
    noise = initial_noise(7, 8, 12)
    settings = {"latents": from_vae_space(start, tiny_model.latent_statistics), "steps": 4}
    distances = []
    for denoise in (0.3, 0.6, 1.0):
        run = client.run(latents(latent_image=["loaded", 0], steps=4, denoise=denoise) | load_start)
        result = saved_latents(client, run)
        np.testing.assert_array_equal(result, sampled(tiny_model, noise, denoise=denoise, **settings))
        assert run.progress[-1] == 4
        distances.append(float(np.abs(result - start).mean()))
    assert distances == sorted(distances)
    np.testing.assert_array_equal(result, sampled(tiny_model, noise, steps=4))  # 1.0 has nothing of the start


def test_a_noise_mask_keeps_what_it_excludes(client: Client, server: Server) -> None:
    """The left half is drawn anew, the right half stays, bit for bit."""
    start = to_vae_space(np.random.default_rng(1).standard_normal((1, 64, 8, 12), np.float32))
    workflow = latents(latent_image=["masked", 0], steps=3) | put_latent(server, "start", start)
    workflow |= {
        "nothing": node("SolidMask", value=0.0, width=192, height=128),
        "left": node("SolidMask", value=1.0, width=96, height=128),
        "mask": node("MaskComposite", destination=["nothing", 0], source=["left", 0], x=0, y=0, operation="add"),
        "masked": node("SetLatentNoiseMask", samples=["loaded", 0], mask=["mask", 0]),
    }
    result = saved_latents(client, client.run(workflow))
    np.testing.assert_allclose(result[..., 6:], start[..., 6:], rtol=0, atol=1e-5)
    assert (np.abs(result - start)[..., :6] > 0.1).mean() > 0.9


def test_guidance_uses_the_negative_prompt(client: Client, tiny_model: ModelSet) -> None:
    workflow = latents(cfg=3.0, negative=["negative", 0])
    workflow["negative"] = node("CoreAITextEncode", model="tiny", text="blurry")
    expected = sampled(tiny_model, initial_noise(7, 8, 12), cfg=3.0, negative=encode_prompt(tiny_model, "blurry"))
    np.testing.assert_array_equal(saved_latents(client, client.run(workflow)), expected)
    assert not np.array_equal(expected, sampled(tiny_model, initial_noise(7, 8, 12)))


def test_guidance_of_1_leaves_the_negative_prompt_out(client: Client, tiny_model: ModelSet) -> None:
    workflow = latents(cfg=1.0, negative=["negative", 0])
    workflow["negative"] = node("CoreAITextEncode", model="tiny", text="blurry")
    expected = sampled(tiny_model, initial_noise(7, 8, 12))
    np.testing.assert_array_equal(saved_latents(client, client.run(workflow)), expected)


def test_a_native_node_between_sampler_and_decoder_has_its_say(client: Client) -> None:
    """The tokens that ride along in the LATENT must not be decoded once ``samples`` is another."""
    workflow = picture()
    workflow["flipped"] = node("LatentFlip", samples=["sampler", 0], flip_method="y-axis: horizontally")
    workflow["decode_flipped"] = node("CoreAIRGBADecode", model="tiny", samples=["flipped", 0])
    workflow["save_flipped"] = node("SaveImage", images=["decode_flipped", 2], filename_prefix="flipped")
    run = client.run(workflow)
    [plain], [flipped] = saved_pictures(client, run), saved_pictures(client, run, "save_flipped")
    assert plain.tobytes() != flipped.tobytes()
