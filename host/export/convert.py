"""One torch graph to one ``.aimodel`` with the contract's names and axes."""

import json
import logging
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..bundle import METADATA_KEY, SUFFIX, Bundle, read_bundle
from ..contract import ContractError, GraphSpec, TensorSpec

logger = logging.getLogger(__name__)


Part = tuple[nn.Module, GraphSpec]
"""A module, and the function of a bundle that it becomes."""


def convert(
    model: nn.Module, spec: GraphSpec, path: Path, metadata: dict[str, Any], others: Sequence[Part] = ()
) -> Bundle:
    """Write ``model`` to ``path`` as a bundle whose function ``main`` is what ``spec`` says.

    ``others`` are further functions; parameters that modules have in common are stored once.
    Release mode without debug information: half the load time of what the converter leaves, and
    no path of this machine inside. The bundle appears under its name only when it is whole.
    """
    if path.suffix != SUFFIX:
        raise ContractError(f"{path} must end in {SUFFIX}")
    program = _program([(model, spec), *others])
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(
        {"kind": spec.kind, "limits": {axis: list(pair) for axis, pair in spec.limits.items()}, **metadata}
    )
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".export-") as temporary:
        asset = program.save_asset(Path(temporary) / path.name)
        asset.update_metadata(lambda own: own.set_custom(METADATA_KEY, text))
        shutil.rmtree(path, ignore_errors=True)
        (Path(temporary) / path.name).rename(path)
    return read_bundle(path)


def _program(parts: Sequence[Part]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a torch newer than the converter was tried with
            from coreai_torch import TorchConverter, get_decomp_table
            from coreai_torch.debugging.debug_info import strip_debug_info
    except ImportError as error:
        raise ContractError(
            f"the Core AI converter is not installed ({error}): pip install 'coreai-rgba-image[export]'"
        ) from error
    converter = TorchConverter(mode=TorchConverter.Mode.RELEASE)
    for model, spec in parts:
        converter.add_exported_program(
            _traced(model, spec, get_decomp_table()),
            input_names=[tensor.name for tensor in spec.inputs],
            output_names=[tensor.name for tensor in spec.outputs],
            entrypoint_name=spec.function,
        )
    program = converter.to_coreai()
    strip_debug_info(program)
    return program


def _traced(model: nn.Module, spec: GraphSpec, decompositions: dict[Any, Any]) -> torch.export.ExportedProgram:
    # ComfyUI runs nodes in inference mode, whose tensors torch.export cannot trace.
    with torch.inference_mode(False), torch.no_grad():
        examples = tuple(_example(tensor, spec) for tensor in spec.inputs)
        exported = torch.export.export(model, examples, dynamic_shapes=_dynamic_shapes(spec), strict=False)
        return exported.run_decompositions(decompositions)


def _example(tensor: TensorSpec, spec: GraphSpec) -> torch.Tensor:
    """A tensor to trace with. Each axis gets a size of its own, so that no two look like one."""
    sizes = []
    for axis in tensor.shape:
        if isinstance(axis, str) and axis not in spec.limits:
            raise ContractError(f"{spec.kind}: the size of axis {axis} is not known, bind it before the export")
        sizes.append(axis if isinstance(axis, int) else sum(spec.limits[axis]) // 2 + 1)
    return torch.zeros(sizes, dtype=getattr(torch, tensor.dtype))


def _dynamic_shapes(spec: GraphSpec) -> tuple[dict[int, Any] | None, ...]:
    dims = {axis: torch.export.Dim(axis, min=low, max=high) for axis, (low, high) in spec.limits.items()}
    shapes = []
    for tensor in spec.inputs:
        dynamic = {index: dims[axis] for index, axis in enumerate(tensor.shape) if isinstance(axis, str)}
        shapes.append(dynamic or None)
    return tuple(shapes)
