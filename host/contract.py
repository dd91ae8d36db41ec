"""Names, dtypes and axis limits of every graph input and output, in one leaf module.

The runtime enforces almost none of this: a wrong dtype or inner dimension kills the process
instead of raising, and exported ranges are not checked at all. So every array is checked here
before it crosses into native code. Source: the host contract of RGBA-Image-2.1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

LATENT_CHANNELS = 64
IMAGE_CHANNELS = 4
PIXELS_PER_TOKEN = 16
ROPE_CHANNELS = 64

Shape = tuple[int | str, ...]


class ContractError(ValueError):
    """Input outside the contract. The message names the value, the limit and the way out."""


@dataclass(frozen=True)
class TensorSpec:
    """One graph input or output. A string in ``shape`` names an axis, an integer is fixed."""

    name: str
    dtype: str
    shape: Shape

    def __post_init__(self) -> None:
        if np.dtype(self.dtype).kind not in "fiu":
            raise ContractError(f"{self.name}: dtype {self.dtype} is not a number type")
        if any(isinstance(size, int) and size < 1 for size in self.shape):
            raise ContractError(f"{self.name}: shape {self.shape} has a size below 1")


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

    def __post_init__(self) -> None:
        names = [tensor.name for tensor in (*self.inputs, *self.outputs)]
        if len(set(names)) != len(names):
            raise ContractError(f"{self.kind}: a name is used twice in {names}")
        for axis, (low, high) in self.limits.items():
            if not 1 <= low <= high:
                raise ContractError(f"{self.kind}: axis {axis} has limits {low}..{high}")

    def bind(self, sizes: Mapping[str, int]) -> "GraphSpec":
        """The same graph with the named axes fixed."""

        def fix(tensor: TensorSpec) -> TensorSpec:
            return replace(tensor, shape=tuple(sizes.get(s, s) if isinstance(s, str) else s for s in tensor.shape))

        return replace(self, inputs=tuple(map(fix, self.inputs)), outputs=tuple(map(fix, self.outputs)))

    def output(self, name: str) -> TensorSpec:
        return next(tensor for tensor in self.outputs if tensor.name == name)

    def check(self, arrays: Mapping[str, np.ndarray]) -> None:
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

    def _check_tensor(self, tensor: TensorSpec, array: np.ndarray, sizes: dict[str, int]) -> None:
        label = f"{self.kind} input {tensor.name}"
        if not isinstance(array, np.ndarray):
            raise ContractError(f"{label} is a {type(array).__name__}: pass a numpy array")
        if array.dtype != np.dtype(tensor.dtype):
            raise ContractError(f"{label} is {array.dtype}: convert it to {tensor.dtype}")
        if array.ndim != len(tensor.shape):
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

DIT = GraphSpec(
    kind="DiT",
    inputs=(
        TensorSpec("img_tokens", "float32", (1, "N", LATENT_CHANNELS)),
        TensorSpec("txt_feats", "float32", (1, "L", "D")),
        TensorSpec("timestep", "float32", (1,)),
        TensorSpec("txt_cos", "float32", (1, "L", ROPE_CHANNELS)),
        TensorSpec("txt_sin", "float32", (1, "L", ROPE_CHANNELS)),
        TensorSpec("img_cos", "float32", (1, "N", ROPE_CHANNELS)),
        TensorSpec("img_sin", "float32", (1, "N", ROPE_CHANNELS)),
    ),
    outputs=(TensorSpec("vel", "float32", (1, "N", LATENT_CHANNELS)),),
    limits={"L": (8, 512), "N": (64, 4096)},
)

VAE_DECODER = GraphSpec(
    kind="VAE decoder",
    inputs=(TensorSpec("latents_packed", "float32", (1, "N", LATENT_CHANNELS)),),
    outputs=(TensorSpec("image", "float32", (1, IMAGE_CHANNELS, "H", "W")),),
)

GRAPHS = (TEXT_ENCODER, DIT, VAE_DECODER)
"""The graphs a model set is made of, in the order a picture goes through them."""
