"""A checkpoint's tensors one at a time, so that an export never holds the weights beside what it makes of them.

An export needs each weight once, when it becomes a constant of the bundle. Until then a model that
is to be exported has stand-ins: parameters of the right shape and dtype whose memory nobody touches,
which costs no memory.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..contract import ContractError


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file, as the file's header tells it."""

    path: Path
    name: str
    shape: torch.Size

    def read(self, dtype: torch.dtype) -> Tensor:
        """Its values: pages of the file where ``dtype`` is the file's own, else a copy."""
        try:
            with safe_open(self.path, framework="pt") as shard:
                return shard.get_tensor(self.name).to(dtype)
        except Exception as error:  # safetensors raises its own class for a damaged file, OSError for a missing one
            raise _unreadable(self.path, error) from error


class StandIns:
    """The parameters of a model that is only to be exported, and where their values are stored."""

    def __init__(self) -> None:
        self._stored: dict[int, StoredTensor] = {}
        self._tensors: list[Tensor] = []

    def add(self, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
        """A stand-in for ``stored`` as ``dtype``."""
        tensor = torch.empty(stored.shape, dtype=dtype, device="cpu")
        self._stored[tensor.data_ptr()] = stored
        self._tensors.append(tensor)  # as long as it lives, no other tensor has its address
        return tensor

    def __len__(self) -> int:
        return len(self._tensors)

    def find(self, tensor: Tensor) -> StoredTensor | None:
        """What ``tensor``, one of the parameters or an alias of it, stands for; ``None`` if it is no stand-in."""
        return self._stored.get(tensor.data_ptr())


class EmptyOnMeta(TorchFunctionMode):
    """Inside, modules get parameters without memory and without initial values; buffers are computed as ever."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **{**(kwargs or {}), **({"device": "meta"} if func is torch.empty else {})})


def stored_tensors(folder: Path, unused: re.Pattern[str]) -> dict[str, StoredTensor]:
    """What the files of ``folder`` hold, without what ``unused`` matches; reads their headers alone."""
    tensors = {}
    for path in shards(folder):
        try:
            with safe_open(path, framework="pt") as shard:
                for name in sorted(shard.keys()):
                    if not unused.match(name):
                        tensors[name] = StoredTensor(path, name, torch.Size(shard.get_slice(name).get_shape()))
        except Exception as error:
            raise _unreadable(path, error) from error
    return tensors


def shards(folder: Path) -> list[Path]:
    """The files an ``*.safetensors.index.json`` lists, else the one safetensors file there is."""
    if indexes := sorted(path for path in folder.glob("*.safetensors.index.json") if not path.name.startswith(".")):
        weight_map = read_json(indexes[0]).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ContractError(f"{indexes[0]} has no weight_map: download it again")
        return [folder / name for name in sorted(set(weight_map.values()))]
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("."))
    if len(files) != 1:
        raise ContractError(f"{folder} holds {len(files)} safetensors files and no index: download it again")
    return files


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ContractError(
            f"cannot read {path} ({error}): the checkpoint must have the folders of Qwen/Qwen-Image-2.1"
        ) from error
    if not isinstance(content, dict):
        raise ContractError(f"{path} is not a JSON object")
    return content


def _unreadable(path: Path, error: Exception) -> ContractError:
    return ContractError(f"cannot read {path} ({error}): download it again")
