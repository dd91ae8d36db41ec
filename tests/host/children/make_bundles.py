"""Writes bundles that exercise the engine: ``python make_bundles.py FOLDER``.

``set/`` holds the contract's three graphs, ``big.aimodel`` has 205 MB, and two are none of the
contract's graphs. The networks compute next to nothing: the engine only sees names, shapes, bytes.
"""

import contextlib
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from coreai_rgba_image.host.contract import DIT, TEXT_ENCODER, VAE_DECODER, ContractError, GraphSpec, TensorSpec
from coreai_rgba_image.host.export.convert import convert

WIDTH = 64
VOCABULARY = 256
BIG_WIDTH = 4096
BIG_VOCABULARY = 25_000
"""25,000 x 4096 weights in bf16 are 205 MB; 512 tokens give 8.4 MB of output."""


class Lookup(nn.Module):
    """A text encoder that is its embedding alone."""

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(torch.randn(vocabulary, width).bfloat16())

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.embedding(input_ids.int()).float()


class SmallDiT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Wide, so that a call with 4096 tokens takes a good part of a second.
        self.image = nn.Sequential(nn.Linear(64, 4096), nn.Linear(4096, 64))
        self.text = nn.Linear(WIDTH, 64)

    def forward(
        self, x: Tensor, text: Tensor, t: Tensor, txt_cos: Tensor, txt_sin: Tensor, img_cos: Tensor, img_sin: Tensor
    ) -> Tensor:
        context = (self.text(text) * txt_cos + txt_sin).mean(1, keepdim=True)
        return self.image(x) * img_cos + img_sin * t + context


class SmallDecoder(nn.Module):
    """128 x 128 pixels from 64 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(64, 4 * 16 * 16)

    def forward(self, tokens: Tensor) -> Tensor:
        patches = self.patch(tokens).reshape(1, 8, 8, 4, 16, 16)
        return patches.permute(0, 3, 1, 4, 2, 5).reshape(1, 4, 128, 128)


def main(folder: Path) -> None:
    torch.manual_seed(0)
    encoder = TEXT_ENCODER.bind({"D": WIDTH})
    float_ids = replace(encoder, inputs=(TensorSpec("input_ids", "float32", (1, "Lfull")),))
    foreign = GraphSpec("other model", (TensorSpec("x", "float32", (1, 64)),), (TensorSpec("y", "float32", (1, 64)),))
    convert(Lookup(VOCABULARY, WIDTH), encoder, folder / "set" / "encoder.aimodel", {})
    convert(SmallDiT(), DIT.bind({"D": WIDTH}), folder / "set" / "dit.aimodel", {})
    convert(SmallDecoder(), VAE_DECODER.bind({"N": 64, "H": 128, "W": 128}), folder / "set" / "vae.aimodel", {})
    convert(Lookup(BIG_VOCABULARY, BIG_WIDTH), TEXT_ENCODER.bind({"D": BIG_WIDTH}), folder / "big.aimodel", {})
    with contextlib.suppress(ContractError):  # convert reads back what it wrote, and these are not ours
        convert(Lookup(VOCABULARY, WIDTH), float_ids, folder / "float_ids.aimodel", {})
    with contextlib.suppress(ContractError):
        convert(nn.Linear(64, 64), foreign, folder / "foreign.aimodel", {})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
