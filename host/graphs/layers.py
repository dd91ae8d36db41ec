"""Layers that two of the three graphs share."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """A bias-free linear layer that computes in the dtype of its input.

    The weight keeps the dtype it was loaded with and is cast on use. The converter keeps the
    stored constant and emits the cast, so bf16 weights stay bf16 in the bundle also when the
    computation is fp32: twice the precision costs no bytes.
    """

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, statistics in fp32.

    ``offset`` is added to the weight: 1 for weights that a checkpoint stores zero-centred.
    """

    def __init__(self, size: int, eps: float, offset: float = 0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (self.weight.float() + self.offset)).to(x.dtype)
