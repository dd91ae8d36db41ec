"""The native nodes people put around ours: each gives the right picture, by a value stated here."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from coreai_rgba_image.host.latents import from_vae_space, initial_noise, to_vae_space, unpack
from coreai_rgba_image.host.model_set import ModelSet
from coreai_rgba_image.host.pipeline import decode, encode_prompt, generate
from coreai_rgba_image.host.pixels import to_rgba8
from coreai_rgba_image.host.sampling import Sampling, Settings
from coreai_rgba_image.host.tiling import ANY_TILE

from .server import Client, Run, Server
from .test_pictures import put_latent, sampled, saved_latents, saved_pictures
from .workflows import TEXT, latents, node, picture

pytestmark = pytest.mark.slow

STEPS = 2
SEED = 7


@pytest.fixture(scope="module")
def rgba(tiny_model: ModelSet) -> np.ndarray:
    """The picture ``[128, 192, 4]`` that all of ``picture()``'s graphs here draw."""
    return generate(tiny_model, TEXT, 192, 128, Settings(STEPS), seed=SEED)


@pytest.fixture(scope="module")
def vae_space() -> np.ndarray:
    """Latents ``[2, 64, 8, 12]`` of this model."""
    return to_vae_space(np.random.default_rng(1).standard_normal((2, 64, 8, 12), np.float32))


def through(client: Client, server: Server, start: np.ndarray, **nodes: dict[str, Any]) -> np.ndarray:
    """What ``nodes`` make of the latents ``start``, node ``loaded``; the last of them is saved."""
    workflow = put_latent(server, "start", start) | nodes
    workflow["save_latents"] = node("SaveLatent", samples=[list(nodes)[-1], 0], filename_prefix="through")
    return saved_latents(client, client.run(workflow))


def test_save_and_load_keep_every_bit(client: Client, server: Server, vae_space: np.ndarray) -> None:
    workflow = put_latent(server, "start", vae_space)
    workflow["save_latents"] = node("SaveLatent", samples=["loaded", 0], filename_prefix="kept")
    np.testing.assert_array_equal(saved_latents(client, client.run(workflow)), vae_space)


def test_a_part_of_a_batch_and_its_copies(client: Client, server: Server, vae_space: np.ndarray) -> None:
    result = through(
        client, server, vae_space,
        second=node("LatentFromBatch", samples=["loaded", 0], batch_index=1, length=1),
        copies=node("RepeatLatentBatch", samples=["second", 0], amount=3),
    )  # fmt: skip
    np.testing.assert_array_equal(result, vae_space[[1, 1, 1]])


def test_copies_of_a_latent_get_noise_of_their_own(client: Client, tiny_model: ModelSet) -> None:
    workflow = latents(latent_image=["copies", 0], steps=1)
    workflow["copies"] = node("RepeatLatentBatch", samples=["empty", 0], amount=2)
    result = saved_latents(client, client.run(workflow))
    np.testing.assert_array_equal(result, sampled(tiny_model, initial_noise(SEED, 8, 12, 2), steps=1))


def test_latents_are_scaled_and_then_drawn_again(client: Client, server: Server, tiny_model: ModelSet) -> None:
    """192x128 by 1.25: the sampler starts from ComfyUI's enlargement, 'tiled' draws what no bundle of the set does."""
    start = to_vae_space(np.random.default_rng(1).standard_normal((1, 64, 8, 12), np.float32))
    scaled = node("LatentUpscaleBy", samples=["loaded", 0], upscale_method="nearest-exact", scale_by=1.25)
    enlarged = through(client, server, start, scaled=scaled)
    rows, columns = (np.minimum(np.floor((np.arange(n) + 0.5) / 1.25).astype(int), n) for n in (10, 15))
    np.testing.assert_array_equal(enlarged, start[:, :, rows][..., columns])

    workflow = (
        put_latent(server, "start", start) | {"scaled": scaled} | picture(latent_image=["scaled", 0], denoise=0.5)
    )
    workflow["decode"]["inputs"]["tiled"] = True
    [image] = saved_pictures(client, client.run(workflow))
    assert (image.mode, image.size) == ("RGBA", (240, 160))
    begun = from_vae_space(enlarged, tiny_model.latent_statistics)
    embeddings, noise = encode_prompt(tiny_model, TEXT), initial_noise(SEED, 10, 15)
    sampling = Sampling(tiny_model, embeddings, noise, Settings(STEPS), latents=begun, denoise=0.5)
    list(sampling.run())
    [expected] = decode(tiny_model, sampling.tokens, 10, 15, largest_tile=ANY_TILE)
    np.testing.assert_array_equal(np.asarray(image), to_rgba8(expected)[0])


def test_latents_are_put_together(client: Client, server: Server, vae_space: np.ndarray) -> None:
    """LatentComposite counts 8 pixels a latent pixel: 32 is 4 of them, which are 64 pixels of this model."""
    result = through(
        client, server, vae_space,
        first=node("LatentFromBatch", samples=["loaded", 0], batch_index=0, length=1),
        second=node("LatentFromBatch", samples=["loaded", 0], batch_index=1, length=1),
        both=node("LatentComposite", samples_to=["first", 0], samples_from=["second", 0], x=32, y=0, feather=0),
    )  # fmt: skip
    np.testing.assert_array_equal(result[..., :4], vae_space[:1, ..., :4])
    np.testing.assert_array_equal(result[..., 4:], vae_space[1:, ..., :8])


def conditioned(client: Client, positive: str, **nodes: dict[str, Any]) -> np.ndarray:
    """What our sampler makes of a CONDITIONING that native nodes made of the texts ``prompt`` and ``other``."""
    workflow = latents() | nodes
    workflow["other"] = node("CoreAITextEncode", model="tiny", text="a blue square with a rather long name")
    workflow["sampler"]["inputs"]["positive"] = [positive, 0]
    return saved_latents(client, client.run(workflow))


def expected_of(model: ModelSet, embeddings: np.ndarray) -> np.ndarray:
    sampling = Sampling(model, embeddings, initial_noise(SEED, 8, 12), Settings(STEPS))
    list(sampling.run())
    return unpack(to_vae_space(sampling.tokens, model.latent_statistics), 8, 12)


def test_conditionings_are_zeroed_joined_and_mixed(client: Client, tiny_model: ModelSet) -> None:
    text = encode_prompt(tiny_model, TEXT)
    other = encode_prompt(tiny_model, "a blue square with a rather long name")
    zero = conditioned(client, "zero", zero=node("ConditioningZeroOut", conditioning=["prompt", 0]))
    np.testing.assert_array_equal(zero, expected_of(tiny_model, np.zeros_like(text)))

    joined = node("ConditioningConcat", conditioning_to=["prompt", 0], conditioning_from=["other", 0])
    expected = expected_of(tiny_model, np.concatenate([text, other], axis=1))
    np.testing.assert_array_equal(conditioned(client, "joined", joined=joined), expected)

    mixed = node(
        "ConditioningAverage", conditioning_to=["prompt", 0], conditioning_from=["other", 0],
        conditioning_to_strength=0.75,
    )  # fmt: skip
    average = torch.from_numpy(text) * 0.75 + torch.from_numpy(other[:, : text.shape[1]]) * (1 - 0.75)
    np.testing.assert_array_equal(conditioned(client, "mixed", mixed=mixed), expected_of(tiny_model, average.numpy()))


def drawn(client: Client, **nodes: dict[str, Any]) -> Run:
    """A run of our three nodes and what native ones make of the picture."""
    return client.run(picture(steps=STEPS, seed=SEED) | nodes)


def test_a_preview_and_a_file_are_the_picture(client: Client, rgba: np.ndarray) -> None:
    run = drawn(client, preview=node("PreviewImage", images=["decode", 2]))
    for name in ("save", "preview"):
        [image] = saved_pictures(client, run, name)
        np.testing.assert_array_equal(np.asarray(image), rgba)


def test_an_alpha_is_split_off_and_joined_again(client: Client, rgba: np.ndarray) -> None:
    run = drawn(
        client,
        split=node("SplitImageWithAlpha", image=["decode", 2]),
        joined=node("JoinImageWithAlpha", image=["split", 0], alpha=["split", 1]),
        save_joined=node("SaveImage", images=["joined", 0], filename_prefix="joined"),
        save_split=node("SaveImage", images=["split", 0], filename_prefix="split"),
    )
    [joined], [split] = (saved_pictures(client, run, name) for name in ("save_joined", "save_split"))
    np.testing.assert_array_equal(np.asarray(split), rgba[..., :3])
    # 1 - (1 - alpha) falls just below the grid of k / 255 for some k, and SaveImage truncates.
    np.testing.assert_array_equal(np.asarray(joined)[..., :3], rgba[..., :3])
    np.testing.assert_allclose(np.asarray(joined)[..., 3].astype(int), rgba[..., 3], rtol=0, atol=1)


def test_a_sticker_is_laid_on_a_picture(client: Client, rgba: np.ndarray) -> None:
    """The mask is 1 where the sticker is transparent, so it goes through InvertMask first."""
    run = drawn(
        client,
        background=node("EmptyImage", width=192, height=128, batch_size=1, color=0x3366CC),
        opaque=node("InvertMask", mask=["decode", 1]),
        laid=node(
            "ImageCompositeMasked", destination=["background", 0], source=["decode", 0], mask=["opaque", 0],
            x=0, y=0, resize_source=False,
        ),
        save_laid=node("SaveImage", images=["laid", 0], filename_prefix="laid"),
    )  # fmt: skip
    [laid] = saved_pictures(client, run, "save_laid")
    alpha = rgba[..., 3:] / 255
    expected = rgba[..., :3] * alpha + np.array([0x33, 0x66, 0xCC]) * (1 - alpha)
    np.testing.assert_allclose(np.asarray(laid).astype(float), expected, rtol=0, atol=1.001)  # truncated


def test_a_picture_with_alpha_is_scaled(client: Client, rgba: np.ndarray) -> None:
    run = drawn(
        client,
        half=node("ImageScale", image=["decode", 2], upscale_method="area", width=96, height=64, crop="disabled"),
        save_half=node("SaveImage", images=["half", 0], filename_prefix="half"),
    )
    [half] = saved_pictures(client, run, "save_half")
    expected = rgba.reshape(64, 2, 96, 2, 4).mean(axis=(1, 3))
    assert half.mode == "RGBA"
    np.testing.assert_allclose(np.asarray(half).astype(float), expected, rtol=0, atol=1)


def test_webp_keeps_the_alpha(client: Client, rgba: np.ndarray) -> None:
    webp = {"filename_prefix": "webp", "fps": 6.0, "lossless": True, "quality": 80, "method": "fastest"}
    run = drawn(client, webp=node("SaveAnimatedWEBP", images=["decode", 2], **webp))
    image = Image.open(io.BytesIO(client.view(run.outputs("webp")[0])))
    assert image.mode == "RGBA"
    np.testing.assert_array_equal(np.asarray(image)[..., 3], rgba[..., 3])
    seen = rgba[..., 3] > 0  # WEBP keeps no colour where nothing is seen
    np.testing.assert_array_equal(np.asarray(image)[seen], rgba[seen])
