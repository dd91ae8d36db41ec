"""Writes the trained networks as a checkpoint in the layout of ``Qwen/Qwen-Image-2.1``, bf16.

The export reads it as it reads the published one, and diffusers loads it, which is what the
fidelity gates compare with. Needs diffusers and transformers.
"""

import random
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage21
from tokenizers import Tokenizer
from torch import Tensor

from .captions import all_scenes, paraphrase
from .layout import build_tokenizer, new_text_encoder, new_transformer, write_checkpoint
from .networks import DIT, DemoModel, text_config
from .pictures import Placement, draw
from .train_vae import CONFIG, LATENT_CHANNELS, LATENT_NOISE, encode, new_vae, to_unit

VOCABULARY = 512
LANGUAGE_PREFIX = "model.language_model."


def demo_tokenizer(seed: int) -> Tokenizer:
    """A byte-level BPE in which the words of the grammar are single tokens; any other text still encodes."""
    rng = random.Random(seed)
    scenes = rng.sample(all_scenes(), 1500)
    texts = [scene.caption for scene in scenes] + [paraphrase(scene, rng) for scene in scenes for _ in range(2)]
    return build_tokenizer(tuple(texts), VOCABULARY)


@torch.no_grad()
def latent_moments(vae: AutoencoderKLQwenImage21) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each latent channel over pictures of the grammar, ``[64]`` each."""
    scenes = random.Random(0).sample([scene for scene in all_scenes() if not scene.held_out], 160)
    latents = []
    for start in range(0, len(scenes), 16):
        radii = [(scene, 0.38 if scene.size == "large" else 0.19) for scene in scenes[start : start + 16]]
        pictures = np.stack([draw(scene, Placement(radius=radius), 256, 256) for scene, radius in radii])
        latents.append(encode(vae, to_unit(pictures)))
    values = torch.cat(latents).transpose(0, 1).flatten(1)
    return values.mean(1), values.std(1)


@torch.no_grad()
def finished_vae(weights: dict[str, Tensor], seed: int) -> AutoencoderKLQwenImage21:
    """The trained autoencoder with latents scaled like the published model's, rounded to bf16 (kept as fp32).

    Any invertible scale per channel can hide between the encoder's last and the decoder's first
    layer, both 1x1 convolutions. The published latents have deviations of 3 to 5 around means of
    several units; with such numbers a picture shows when they are forgotten or applied twice.
    Channels the training left unused are not blown up: their deviation counts as the noise's.
    """
    vae = new_vae(seed)
    vae.load_state_dict(weights)
    mean, std = latent_moments(vae)
    std = std.clamp(min=LATENT_NOISE)
    generator = torch.Generator().manual_seed(seed)
    new_std = (3.0 + 1.5 * torch.rand(LATENT_CHANNELS, generator=generator)).mul(1e4).round().div(1e4)
    new_mean = torch.randn(LATENT_CHANNELS, generator=generator).mul(1.5e4).round().div(1e4)
    gain = new_std / std

    encoder_end, decoder_start = vae.quant_conv, vae.post_quant_conv
    encoder_end.weight[:LATENT_CHANNELS] *= gain.view(-1, 1, 1, 1)
    encoder_end.bias[:LATENT_CHANNELS] = (encoder_end.bias[:LATENT_CHANNELS] - mean) * gain + new_mean
    # The other half of the output is the posterior's log variance: the noise it was trained with.
    encoder_end.weight[LATENT_CHANNELS:] = 0.0
    encoder_end.bias[LATENT_CHANNELS:] = 2 * (LATENT_NOISE * gain).log()
    decoder_start.bias += decoder_start.weight[:, :, 0, 0] @ (mean - new_mean / gain)
    decoder_start.weight /= gain.view(1, -1, 1, 1)

    vae.register_to_config(latents_mean=[round(v, 4) for v in new_mean.tolist()])
    vae.register_to_config(latents_std=[round(v, 4) for v in new_std.tolist()])
    return vae.to(torch.bfloat16).to(torch.float32).eval()


def write_demo_checkpoint(folder: Path, vae: AutoencoderKLQwenImage21, model: DemoModel, tokenizer: Tokenizer) -> None:
    """Write all parts to ``folder``. ``model`` holds the averaged weights; parts it lacks start at random."""
    torch.manual_seed(0)
    text_encoder = new_text_encoder(
        text_config(tokenizer.get_vocab_size()), tokenizer, (24, 20, 20), tie_embeddings=True
    )
    trained = {f"{LANGUAGE_PREFIX}{name}": value for name, value in model.text_encoder.state_dict().items()}
    missing, unexpected = text_encoder.load_state_dict(trained, strict=False)
    left = [name for name in missing if name.startswith(LANGUAGE_PREFIX) and name != f"{LANGUAGE_PREFIX}norm.weight"]
    if left or unexpected:
        raise RuntimeError(f"the text stack does not fit transformers' names: missing {left}, unexpected {unexpected}")
    transformer = new_transformer(DIT)
    transformer.load_state_dict(model.dit.state_dict())
    half_vae = AutoencoderKLQwenImage21(**{**CONFIG, **{k: vae.config[k] for k in ("latents_mean", "latents_std")}})
    half_vae.load_state_dict(vae.state_dict())
    write_checkpoint(folder, text_encoder, transformer, half_vae, tokenizer)
