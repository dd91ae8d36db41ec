"""The Core AI converter and its writer, with fewer copies of the weights.

Measured with coreai-torch 0.4.3 and coreai-core 1.0.0b3, whose own way takes three times the weights'
bytes. The checkpoint's pages stay mapped while the converter copies them. The converter widens each
bf16 weight to fp32 and narrows it again, which for an embedding of 1.2 GB takes 3.7 GB more, and does
so for every function that uses it. The writer reads the whole program back to hash it. None of this
happens here; what remains is the converter's one copy.
"""

import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from coreai.authoring import AIProgram
from coreai.authoring.asset import _COREAI_PRODUCER
from coreai.runtime import _AIModelAsset
from coreai_torch import TorchConverter
from coreai_torch.converter import _mlir, coreai, get_tensor_type
from torch import Tensor

from ..files import hash_file
from .stored import StandIns


class StreamingConverter(TorchConverter):
    """Reads what a stand-in stands for when it makes the constant, once for all functions."""

    def __init__(self, stand_ins: StandIns):
        super().__init__(mode=TorchConverter.Mode.RELEASE)
        self._stand_ins = stand_ins
        self._constants: dict[int, Any] = {}

    @property
    def unread(self) -> int:
        """How many stand-ins were not met: what the program has in their place is not the weights."""
        return len(self._stand_ins) - len(self._constants)

    def _constant_from_tensor(self, tensor: Tensor) -> Any:
        stored = self._stand_ins.find(tensor)
        if stored is None:
            return super()._constant_from_tensor(tensor)
        address = tensor.data_ptr()
        if address not in self._constants:
            kind = get_tensor_type(tensor, self._location)
            values = as_numpy(stored.read(tensor.dtype))
            self._constants[address] = _mlir.dialects.coreai.create_elements_attr(self._location, kind, values)
        return coreai.ConstantOp(value=self._constants[address]).result


def as_numpy(tensor: Tensor) -> np.ndarray:
    """The same memory, read-only; bfloat16, which numpy lacks, in the type the converter knows it by."""
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        array = tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    else:
        array = tensor.numpy()
    array.flags.writeable = False
    return array


def save(program: AIProgram, folder: Path) -> Any:
    """Write ``program`` as the asset ``folder``, as ``AIProgram.save_asset`` does; hashes it piece by piece."""
    folder.mkdir()
    asset = _AIModelAsset._create(path=str(folder), metadata=None)
    program._save_bytecode(asset._program_bytecode_path)
    asset._program_hash_path.write_bytes(bytes.fromhex(hash_file(asset._program_bytecode_path)))

    def stamp(metadata: Any) -> None:
        metadata.creation_date = time.time()
        metadata._producer = _COREAI_PRODUCER

    asset.update_metadata(stamp)
    return asset
