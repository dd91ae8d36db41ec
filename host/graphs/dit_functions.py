"""The DiT in parts, so that a sampler need not repeat what does not change from step to step.

Text tokens never see the image and are modulated from t = 0: their keys and values are the same in
every step of a run. ``TextKeysValues`` computes them once, ``Step`` is the rest of the network.
``Head``, ``Tail`` and ``Finish`` are ``Step`` cut after the first block, for the first-block cache.
Every part is a view of one ``DiT``: the exporter stores its weights once.
"""

import torch
from torch import Tensor, nn

from .dit import DiT, image_attention, text_attention


class _Part(nn.Module):
    def __init__(self, dit: DiT):
        super().__init__()
        self.dit = dit


class TextKeysValues(_Part):
    """Text features and positions to every block's keys and values, ``[blocks, heads, L, head size]`` each."""

    def forward(self, txt_feats: Tensor, txt_cos: Tensor, txt_sin: Tensor) -> tuple[Tensor, Tensor]:
        dit = self.dit
        x = dit.project_text(txt_feats)
        modulation = dit.modulate(dit.embed_timestep(torch.zeros(1)))
        keys, values = [], []

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys.append(key)
            values.append(value)
            return text_attention(query, key, value)

        *blocks, last = dit.blocks
        for block in blocks:
            x = block(x, modulation, txt_cos, txt_sin, attend)
        _, key, value = last.project(x, modulation, txt_cos, txt_sin)
        return torch.cat((*keys, key)), torch.cat((*values, value))


class _ImagePart(_Part):
    def run_blocks(
        self, x: Tensor, blocks: range, embedding: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Image tokens ``[1, N, width]`` through the numbered blocks."""
        modulation = self.dit.modulate(embedding)
        for index in blocks:
            attend = image_attention(keys[index : index + 1], values[index : index + 1])
            x = self.dit.blocks[index](x, modulation, cos, sin, attend)
        return x


class Step(_ImagePart):
    """Velocity of the image tokens, given the text's keys and values."""

    def forward(
        self, img_tokens: Tensor, timestep: Tensor, img_cos: Tensor, img_sin: Tensor, txt_keys: Tensor,
        txt_values: Tensor,
    ) -> Tensor:  # fmt: skip
        embedding = self.dit.embed_timestep(timestep)
        x, blocks = self.dit.project_image(img_tokens), range(self.dit.config.num_layers)
        x = self.run_blocks(x, blocks, embedding, img_cos, img_sin, txt_keys, txt_values)
        return self.dit.velocity(x, embedding)


class Head(_ImagePart):
    """Image tokens after the first block, and what that block added to them, ``[1, N, width]`` float32 each."""

    def forward(
        self, img_tokens: Tensor, timestep: Tensor, img_cos: Tensor, img_sin: Tensor, txt_keys: Tensor,
        txt_values: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        start = self.dit.project_image(img_tokens)
        embedding = self.dit.embed_timestep(timestep)
        x = self.run_blocks(start, range(1), embedding, img_cos, img_sin, txt_keys, txt_values)
        return x.float(), (x - start).float()


class Tail(_ImagePart):
    """What all blocks after the first add to ``hidden``, ``[1, N, width]`` float32."""

    def forward(
        self, hidden: Tensor, timestep: Tensor, img_cos: Tensor, img_sin: Tensor, txt_keys: Tensor,
        txt_values: Tensor,
    ) -> Tensor:  # fmt: skip
        start, blocks = hidden.to(self.dit.compute_dtype), range(1, self.dit.config.num_layers)
        embedding = self.dit.embed_timestep(timestep)
        x = self.run_blocks(start, blocks, embedding, img_cos, img_sin, txt_keys, txt_values)
        return (x - start).float()


class Finish(_Part):
    """The velocity, from ``hidden`` and what the blocks after the first add to it, now or in an earlier step."""

    def forward(self, hidden: Tensor, added: Tensor, timestep: Tensor) -> Tensor:
        x = (hidden + added).to(self.dit.compute_dtype)
        return self.dit.velocity(x, self.dit.embed_timestep(timestep))
