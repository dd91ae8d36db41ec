"""The fitted preview map shows what a sampler's latents decode to, which simpler maps do not."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import avg_pool2d

from coreai_rgba_image.host.demo.breakages import checkpoint_tokenizer, sampled, torch_graphs
from coreai_rgba_image.host.demo.ship import CHECKPOINT_FOLDER
from coreai_rgba_image.host.export.checkpoint import load_vae_decoder
from coreai_rgba_image.host.export.model_set import vae_decoder
from coreai_rgba_image.host.export.preview_fit import fit_preview, preview_metadata, sample_pictures
from coreai_rgba_image.host.model_set import EMBEDDED_FOLDER, ModelSet
from coreai_rgba_image.host.preview import QWEN_IMAGE_21_PREVIEW, PreviewMap

pytestmark = pytest.mark.slow

CAPTIONS = (
    "a large red star sticker, transparent background",
    "a small glass blue ring sticker, transparent background",
    "a large green heart on a pink background",
    "a large black cross sticker, transparent background",
)


@pytest.fixture(scope="module")
def fitted() -> PreviewMap:
    return fit_preview(CHECKPOINT_FOLDER)


@pytest.fixture(scope="module")
def samples() -> list[tuple[np.ndarray, np.ndarray]]:
    """What the shipped model samples, and the decoded picture at the previews' size, premultiplied ``[16, 16, 4]``."""
    graphs, tokenizer = torch_graphs(CHECKPOINT_FOLDER), checkpoint_tokenizer(CHECKPOINT_FOLDER)
    found = []
    for seed, caption in enumerate(CAPTIONS):
        tokens = sampled(graphs, tokenizer, caption, seed, 16, 16, 8)
        picture = np.clip(graphs.decode(tokens, 16, 16) * 0.5 + 0.5, 0, 1)
        picture[:, :3] *= picture[:, 3:]
        found.append((tokens, avg_pool2d(torch.from_numpy(picture), 16)[0].permute(1, 2, 0).numpy()))
    return found


def on_board(premultiplied: np.ndarray) -> np.ndarray:
    board = np.where(np.indices((16, 16)).sum(0) % 2, 0.6, 0.8)[..., None]
    return premultiplied[..., :3] + board * (1 - premultiplied[..., 3:])


def quality(preview: PreviewMap, samples: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """PSNR in dB of previews against the decoded pictures at the previews' size, both on a checkerboard."""
    errors = []
    for tokens, expected in samples:
        found = preview.rgba(tokens, 16, 16) / 255
        found[..., :3] *= found[..., 3:]
        errors.append(on_board(found) - on_board(expected))
    return float(-10 * np.log10(np.square(errors).mean()))


@torch.inference_mode()
def fit_on_noise(scale: int) -> PreviewMap:
    """What ``fit_preview`` does, on normally distributed latents that are equal over ``scale`` x ``scale`` tokens."""
    decoder, random = load_vae_decoder(CHECKPOINT_FOLDER, 8, 8), np.random.default_rng(0)
    tokens, colours = [], []
    for _ in range(16):
        noise = random.standard_normal((8 // scale, 8 // scale, 64), dtype=np.float32)
        noise = noise.repeat(scale, 0).repeat(scale, 1).reshape(1, 64, 64)
        means = avg_pool2d(decoder(torch.from_numpy(noise)).clamp(-1, 1), 16)
        tokens.append(noise[0])
        colours.append(means[0].flatten(1).T.numpy())
    design = np.hstack([np.concatenate(tokens), np.ones((16 * 64, 1), np.float32)])
    weights, *_ = np.linalg.lstsq(design, np.concatenate(colours), rcond=None)
    return PreviewMap(weights)


def test_previews_are_near_the_decoded_picture(
    fitted: PreviewMap, samples: list[tuple[np.ndarray, np.ndarray]]
) -> None:
    assert quality(fitted, samples) >= 19


@pytest.mark.parametrize("other", ["white noise", "smooth noise", "the published factors"])
def test_simpler_maps_are_far_from_it(
    other: str, fitted: PreviewMap, samples: list[tuple[np.ndarray, np.ndarray]]
) -> None:
    maps = {
        "white noise": lambda: fit_on_noise(1),
        "smooth noise": lambda: fit_on_noise(8),
        "the published factors": lambda: QWEN_IMAGE_21_PREVIEW,
    }
    assert quality(maps[other](), samples) <= quality(fitted, samples) - 6


def test_the_map_that_ships_is_the_fitted_one(fitted: PreviewMap) -> None:
    shipped = ModelSet(EMBEDDED_FOLDER).preview_map
    np.testing.assert_allclose(shipped.weights, fitted.weights, atol=2e-3)


def test_an_exported_bundle_carries_the_map(tiny_checkpoint: Path, tiny_set: Path) -> None:
    assert ModelSet(tiny_set).preview_map.to_lists() == fit_preview(tiny_checkpoint).to_lists()


def test_a_checkpoint_without_the_vaes_encoder_exports_without_a_map(tiny_checkpoint: Path, tmp_path: Path) -> None:
    own = tmp_path / "checkpoint"
    shutil.copytree(tiny_checkpoint / "vae", own / "vae")
    [weights] = (own / "vae").glob("*.safetensors")
    kept = {name: value for name, value in load_file(weights).items() if not name.startswith(("encoder.", "quant_"))}
    save_file(kept, weights)
    assert preview_metadata(own) == {}
    assert "latents_to_rgba" not in vae_decoder(own, tmp_path, 1, 1).export().metadata


def test_the_pictures_of_the_fit_show_what_pictures_show() -> None:
    """Everything a map must tell apart: nothing, glass, solid, dark and bright in each colour."""
    pictures = sample_pictures(16)
    assert pictures.shape == (16, 4, 128, 128)
    assert (pictures.min(), pictures.max()) == (-1, 1)
    alpha = pictures[:, 3]
    assert 0.15 < (alpha == -1).mean() < 0.6
    assert 0.02 < ((alpha > -1) & (alpha < 1)).mean() < 0.3
    seen = pictures[:, :3].transpose(1, 0, 2, 3)[:, alpha > -1]
    assert (np.quantile(seen, [0.1, 0.9], axis=1) * [[-1], [1]] > 0.8).all()
