"""A tiny checkpoint with random weights, in the layout of ``Qwen/Qwen-Image-2.1``.

Its pictures mean nothing. It exists so that every number on the way can be compared with the
reference implementation's.
"""

from pathlib import Path

import torch
from diffusers import AutoencoderKLQwenImage21
from torch import nn

from ..graphs.dit import DiTConfig
from ..graphs.text_encoder import TextEncoderConfig
from ..latents import QWEN_IMAGE_21
from .layout import build_tokenizer, new_text_encoder, new_transformer, write_checkpoint

TRAINING_TEXT = (
    "a red apple on a wooden table, studio lighting",
    "This is an RGBA image with transparency. A cute cartoon dragon sticker. "
    "The image has alpha channel and the background is transparent.",
    "an icon of a blue potion bottle for a role-playing game, flat colours, thick outline",
    "The quick brown fox jumps over the lazy dog, 0123456789 times.",
)
VOCABULARY = 600

DIT = DiTConfig(num_layers=2, num_attention_heads=2, attention_head_dim=128, context_in_dim=64, mlp_ratio=2)


def write_tiny_checkpoint(folder: str | Path, seed: int = 0) -> Path:
    """Write the checkpoint (about 5 MB, bf16) to ``folder``; the same seed gives the same weights."""
    folder = Path(folder)
    tokenizer = build_tokenizer(TRAINING_TEXT, VOCABULARY)
    text_config = TextEncoderConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=DIT.context_in_dim, intermediate_size=128,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32, rope_theta=5e6,
    )  # fmt: skip
    text_encoder = new_text_encoder(text_config, tokenizer, (6, 5, 5), tie_embeddings=False)
    transformer = new_transformer(DIT)
    vae = AutoencoderKLQwenImage21(
        base_dim=4, decoder_base_dim=8, dim_mult=[1, 1, 2, 4, 4], num_res_blocks=1,
        latents_mean=list(QWEN_IMAGE_21.mean), latents_std=list(QWEN_IMAGE_21.std),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    for network in (text_encoder, transformer, vae):
        randomize(network, generator)
    write_checkpoint(folder, text_encoder, transformer, vae, tokenizer)
    return folder


def randomize(model: nn.Module, generator: torch.Generator) -> None:
    """Weights that keep the scale of what passes through them, scales near 1, biases near 0.

    Default initialisations leave gates and modulations near zero, where a wrong input would not show.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            fan_in = parameter[0].numel() if parameter.ndim > 1 else 1
            if fan_in > 1:
                parameter.copy_(noise * fan_in**-0.5)
            else:
                parameter.add_(0.1 * noise)
