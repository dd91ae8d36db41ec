"""Layers that the graphs share."""

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


class LoraLinear(nn.Module):
    """``(W + B A) x`` for a ``Linear``'s ``W [out, in]``, ``down`` A ``[rank, in]`` and ``up`` B ``[out, rank]``.

    The sum is never made in W, and W x is not rounded before the update is added: each swallows
    what is smaller than half a step of bf16. ``[W | B]`` times ``[x ; A x]`` is one product with
    one rounding at its end. For an update of 0.2 % of W's norm and bf16 throughout, on Core AI:
    0.996 of the update arrives; 0.81 of it does with W + B A in W, and just as little where W x
    and B A x are two products. ``weight`` is the ``Linear``'s own parameter.
    """

    def __init__(self, linear: Linear, down: Tensor, up: Tensor):
        super().__init__()
        self.weight = linear.weight
        self.down = nn.Parameter(down, requires_grad=False)
        self.up = nn.Parameter(up, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        low_rank = F.linear(x, self.down.to(x.dtype))
        weight = torch.cat((self.weight.to(x.dtype), self.up.to(x.dtype)), dim=1)
        return F.linear(torch.cat((x, low_rank), dim=-1), weight)


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
