"""Names, dtypes and axis limits of every graph input and output, in one leaf module.

The runtime enforces almost none of this: a wrong dtype or inner dimension kills the process
instead of raising, and exported ranges are not checked at all. So every array is checked here
before it crosses into native code. Source: the host contract of RGBA-Image-2.1.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

LATENT_CHANNELS = 64
IMAGE_CHANNELS = 4
PIXELS_PER_TOKEN = 16
ROPE_CHANNELS = 64

Shape = tuple[int | str, ...]

COMPUTE = "compute"
"""Stands for the dtype a graph computes in, one of ``COMPUTE_DTYPES``; a bundle says which."""
COMPUTE_DTYPES = ("float32", "bfloat16")


class ContractError(ValueError):
    """Input outside the contract. The message names the value, the limit and the way out."""


@dataclass(frozen=True)
class TensorSpec:
    """One graph input or output. A string in ``shape`` names an axis, an integer is fixed."""

    name: str
    dtype: str
    shape: Shape

    def __post_init__(self) -> None:
        if self.dtype not in (COMPUTE, *COMPUTE_DTYPES) and np.dtype(self.dtype).kind not in "fiu":
            raise ContractError(f"{self.name}: dtype {self.dtype} is not a number type")
        if any(isinstance(size, int) and size < 1 for size in self.shape):
            raise ContractError(f"{self.name}: shape {self.shape} has a size below 1")


@dataclass(frozen=True)
class HeldArray:
    """An array that stays in the runtime, to be passed from one function to another."""

    array: Any
    dtype: str
    shape: tuple[int, ...]

    def numpy(self) -> np.ndarray:
        """A copy of its values, for dtypes that numpy has."""
        return np.array(self.array.numpy())

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * (2 if self.dtype == "bfloat16" else 4)


@dataclass(frozen=True)
class GraphSpec:
    """A graph's function: its inputs, its outputs, and the inclusive limits of its dynamic axes.

    An axis named in a shape but not in ``limits`` is fixed in any one bundle, yet differs between
    models (the hidden width, the picture size): ``bind`` fills it in from the bundle.
    """

    kind: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    function: str = "main"

    def __post_init__(self) -> None:
        names = [tensor.name for tensor in (*self.inputs, *self.outputs)]
        if len(set(names)) != len(names):
            raise ContractError(f"{self.kind}: a name is used twice in {names}")
        for axis, (low, high) in self.limits.items():
            if not 1 <= low <= high:
                raise ContractError(f"{self.kind}: axis {axis} has limits {low}..{high}")

    def bind(self, sizes: Mapping[str, int], compute: str = COMPUTE) -> "GraphSpec":
        """The same graph with the named axes fixed, those of them it has, and the dtype it computes in."""

        def fix(tensor: TensorSpec) -> TensorSpec:
            shape = tuple(sizes.get(size, size) if isinstance(size, str) else size for size in tensor.shape)
            return replace(tensor, shape=shape, dtype=compute if tensor.dtype == COMPUTE else tensor.dtype)

        return replace(self, inputs=tuple(map(fix, self.inputs)), outputs=tuple(map(fix, self.outputs)))

    @property
    def computed(self) -> set[str]:
        """Names of the tensors in the dtype the graph computes in."""
        return {tensor.name for tensor in (*self.inputs, *self.outputs) if tensor.dtype == COMPUTE}

    def output(self, name: str) -> TensorSpec:
        return next(tensor for tensor in self.outputs if tensor.name == name)

    def check(self, arrays: Mapping[str, np.ndarray | HeldArray]) -> None:
        """Raise ``ContractError`` unless ``arrays`` can be passed to the graph."""
        expected = {tensor.name for tensor in self.inputs}
        if arrays.keys() != expected:
            raise ContractError(
                f"{self.kind} takes {sorted(expected)}: "
                f"missing {sorted(expected - arrays.keys())}, unknown {sorted(arrays.keys() - expected)}"
            )
        sizes: dict[str, int] = {}
        for tensor in self.inputs:
            self._check_tensor(tensor, arrays[tensor.name], sizes)

    def _check_tensor(self, tensor: TensorSpec, array: np.ndarray | HeldArray, sizes: dict[str, int]) -> None:
        label = f"{self.kind} input {tensor.name}"
        if not isinstance(array, np.ndarray | HeldArray):
            raise ContractError(f"{label} is a {type(array).__name__}: pass a numpy array")
        if str(array.dtype) != tensor.dtype:
            raise ContractError(f"{label} is {array.dtype}: convert it to {tensor.dtype}")
        if len(array.shape) != len(tensor.shape):
            raise ContractError(f"{label} has shape {list(array.shape)}: it takes {describe(tensor.shape)}")
        for size, axis in zip(array.shape, tensor.shape, strict=True):
            if isinstance(axis, int):
                if size != axis:
                    raise ContractError(f"{label} has shape {list(array.shape)}: it takes {describe(tensor.shape)}")
                continue
            if axis in self.limits:
                low, high = self.limits[axis]
                if not low <= size <= high:
                    raise ContractError(f"{label} has {axis} = {size}: this graph takes {low}..{high}")
            if sizes.setdefault(axis, size) != size:
                raise ContractError(f"{label} has {axis} = {size}, another input has {sizes[axis]}: make them equal")


def describe(shape: Shape) -> str:
    """``[1, N, 64]`` as people write it."""
    return "[" + ", ".join(str(size) for size in shape) + "]"


TEXT_ENCODER = GraphSpec(
    kind="text encoder",
    inputs=(TensorSpec("input_ids", "int32", (1, "Lfull")),),
    outputs=(TensorSpec("hidden", "float32", (1, "Lfull", "D")),),
    limits={"Lfull": (16, 512)},
)

_DIT_LIMITS = {"L": (8, 512), "N": (64, 4096)}
_IMG_TOKENS = TensorSpec("img_tokens", "float32", (1, "N", LATENT_CHANNELS))
_TXT_FEATS = TensorSpec("txt_feats", "float32", (1, "L", "D"))
_TIMESTEP = TensorSpec("timestep", "float32", (1,))
_TXT_ROPE = tuple(TensorSpec(name, "float32", (1, "L", ROPE_CHANNELS)) for name in ("txt_cos", "txt_sin"))
_IMG_ROPE = tuple(TensorSpec(name, "float32", (1, "N", ROPE_CHANNELS)) for name in ("img_cos", "img_sin"))
_TXT_KV = tuple(TensorSpec(name, COMPUTE, ("blocks", "heads", "L", "head_size")) for name in ("txt_keys", "txt_values"))
_HIDDEN = TensorSpec("hidden", "float32", (1, "N", "width"))
_ADDED = TensorSpec("added", "float32", (1, "N", "width"))
_VEL = TensorSpec("vel", "float32", (1, "N", LATENT_CHANNELS))


def _dit(function: str, inputs: tuple[TensorSpec, ...], *outputs: TensorSpec) -> GraphSpec:
    axes = {axis for tensor in (*inputs, *outputs) for axis in tensor.shape}
    limits = {axis: pair for axis, pair in _DIT_LIMITS.items() if axis in axes}
    return GraphSpec("DiT", inputs, outputs, limits, function)


DIT = _dit("main", (_IMG_TOKENS, _TXT_FEATS, _TIMESTEP, *_TXT_ROPE, *_IMG_ROPE), _VEL)

TEXT_KV = _dit("text_kv", (_TXT_FEATS, *_TXT_ROPE), *_TXT_KV)
"""Keys and values of the text in every block: they are the same in every step of a run."""

STEP = _dit("step", (_IMG_TOKENS, _TIMESTEP, *_IMG_ROPE, *_TXT_KV), _VEL)
"""``main`` for the image tokens alone, given what ``text_kv`` made."""

HEAD = _dit(
    "head", (_IMG_TOKENS, _TIMESTEP, *_IMG_ROPE, *_TXT_KV), _HIDDEN, TensorSpec("change", "float32", _HIDDEN.shape)
)
"""Image tokens after the first block, and what that block changed."""

TAIL = _dit("tail", (_HIDDEN, _TIMESTEP, *_IMG_ROPE, *_TXT_KV), _ADDED)
"""What the blocks after the first add to ``hidden``."""

FINISH = _dit("finish", (_HIDDEN, _ADDED, _TIMESTEP), _VEL)

DIT_FUNCTIONS = (TEXT_KV, STEP, HEAD, TAIL, FINISH)
"""What a DiT bundle may hold beside ``main``; the published ones hold ``main`` alone."""

VAE_DECODER = GraphSpec(
    kind="VAE decoder",
    inputs=(TensorSpec("latents_packed", "float32", (1, "N", LATENT_CHANNELS)),),
    outputs=(TensorSpec("image", "float32", (1, IMAGE_CHANNELS, "H", "W")),),
)

GRAPHS = (TEXT_ENCODER, DIT, VAE_DECODER)
"""The graphs a model set is made of, in the order a picture goes through them."""
