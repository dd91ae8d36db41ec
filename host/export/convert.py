"""One torch graph to one ``.aimodel`` with the contract's names and axes."""

import gc
import json
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch
from torch import nn

from ..bundle import METADATA_KEY, SUFFIX, Bundle, read_bundle
from ..contract import ContractError, GraphSpec, TensorSpec
from .stored import StandIns

logger = logging.getLogger(__name__)


Part = tuple[nn.Module, GraphSpec]
"""A module, and the function of a bundle that it becomes."""

Stage = Callable[[str], None]
"""Is told what an export is doing."""

TEMPORARY = ".export-"
"""How the name of a folder begins that holds a bundle being written; the number of the process follows."""


def convert(
    model: nn.Module, spec: GraphSpec, path: Path, metadata: dict[str, Any], others: Sequence[Part] = (),
    stand_ins: StandIns | None = None, stage: Stage = logger.info,
) -> Bundle:  # fmt: skip
    """Write ``model`` to ``path`` as a bundle whose function ``main`` is what ``spec`` says.

    ``others`` are further functions; parameters that modules have in common are stored once.
    Parameters among ``stand_ins`` are read from their files, one at a time. ``stage`` is told each step.
    Release mode without debug information: half the load time of what the converter leaves, and
    no path of this machine inside. The bundle appears under its name only when it is whole.
    """
    if path.suffix != SUFFIX:
        raise ContractError(f"{path} must end in {SUFFIX}")
    text = json.dumps(
        {"kind": spec.kind, "limits": {axis: list(pair) for axis, pair in spec.limits.items()}, **metadata}
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{TEMPORARY}{os.getpid()}-") as temporary:
        # The converter keeps the weights in files that it maps. Where the system's temporary folder
        # is itself memory they would take it, and the disk of the bundle is known to be large.
        with patch.dict(os.environ, {"TMPDIR": temporary}):
            save, program = _program([(model, spec), *others], stand_ins or StandIns(), stage)
        stage(f"writing {path.name}")
        asset = save(program, Path(temporary) / path.name)
        asset.update_metadata(lambda own: own.set_custom(METADATA_KEY, text))
        shutil.rmtree(path, ignore_errors=True)
        (Path(temporary) / path.name).rename(path)
    del program, asset
    gc.collect()  # of what the converter leaves; the next bundle needs the memory
    return read_bundle(path)


def remove_abandoned(folder: Path) -> None:
    """Delete what exports into ``folder`` that were killed have left half done."""
    for path in folder.glob(f"{TEMPORARY}*"):
        process = path.name.removeprefix(TEMPORARY).partition("-")[0]
        if process.isdigit() and not psutil.pid_exists(int(process)):
            shutil.rmtree(path)


def _program(parts: Sequence[Part], stand_ins: StandIns, stage: Stage) -> tuple[Callable[[Any, Path], Any], Any]:
    """How to save a program, and the program."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a torch newer than the converter was tried with
            from coreai_torch import get_decomp_table
            from coreai_torch.debugging.debug_info import strip_debug_info

            from .streaming import StreamingConverter, save
    except ImportError as error:
        raise ContractError(
            f"the Core AI converter is not installed ({error}): pip install 'coreai-rgba-image[export]'"
        ) from error
    converter = StreamingConverter(stand_ins)
    for model, spec in parts:
        stage(f"tracing {spec.function}")
        converter.add_exported_program(
            _traced(model, spec, get_decomp_table()),
            input_names=[tensor.name for tensor in spec.inputs],
            output_names=[tensor.name for tensor in spec.outputs],
            entrypoint_name=spec.function,
        )
    stage("converting")
    program = converter.to_coreai()
    if converter.unread:
        raise RuntimeError(f"{converter.unread} weights of {parts[0][1].kind} are not in the converted program")
    strip_debug_info(program)
    return save, program


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
