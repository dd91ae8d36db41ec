"""Writes a model set whose weights outweigh everything else: ``python make_heavy_set.py FOLDER``.

Encoder, DiT and decoder have 64, 150 and 34 MB, all read in each call, and compute next to nothing.
The tokenizer is not made here.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from coreai_rgba_image.host.contract import DIT, TEXT_ENCODER, VAE_DECODER
from coreai_rgba_image.host.export.convert import convert
from coreai_rgba_image.host.runtime import compiled_for_linux

WIDTH = 512
VOCABULARY = 1000


def heavy(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """For the mean of all tokens, so that each weight is used once."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Linear(hidden, outputs))


class HeavyEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.weights = heavy(WIDTH, 15_000, WIDTH)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids.int())
        return hidden + self.weights(hidden.mean(1, keepdim=True))


class HeavyDiT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = heavy(WIDTH, 65_000, 64)

    def forward(
        self, x: Tensor, text: Tensor, t: Tensor, txt_cos: Tensor, txt_sin: Tensor, img_cos: Tensor, img_sin: Tensor
    ) -> Tensor:
        context = self.weights(text.mean(1, keepdim=True)) + (txt_cos + txt_sin).mean(1, keepdim=True)
        return x * img_cos + img_sin * t + context


class HeavyDecoder(nn.Module):
    """128 x 128 pixels from 64 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = heavy(64, 65_000, 64)
        self.patch = nn.Linear(64, 4 * 16 * 16)

    def forward(self, tokens: Tensor) -> Tensor:
        patches = self.patch(tokens + self.weights(tokens.mean(1, keepdim=True))).reshape(1, 8, 8, 4, 16, 16)
        return patches.permute(0, 3, 1, 4, 2, 5).reshape(1, 4, 128, 128)


def main(folder: Path) -> None:
    torch.manual_seed(0)
    for bundle in (
        convert(HeavyEncoder(), TEXT_ENCODER.bind({"D": WIDTH}), folder / "encoder.aimodel", {}),
        convert(HeavyDiT(), DIT.bind({"D": WIDTH}), folder / "dit.aimodel", {}),
        convert(HeavyDecoder(), VAE_DECODER.bind({"N": 64, "H": 128, "W": 128}), folder / "vae.aimodel", {}),
    ):
        compiled_for_linux(bundle)  # so that no measured process does


if __name__ == "__main__":
    main(Path(sys.argv[1]))
