"""What an ``.aimodel`` bundle is, and whether it is whole, found out without running it.

The runtime does not refuse a damaged bundle: a missing or truncated program kills the process on
load. So nothing is loaded that did not pass ``read_bundle``.
"""

import json
import platform
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from .contract import COMPUTE, COMPUTE_DTYPES, DIT_FUNCTIONS, GRAPHS, ContractError, GraphSpec, TensorSpec
from .files import remembered, sha256_of

SUFFIX = ".aimodel"
PROGRAM = "main.mlirb"
MAIN = "main"
METADATA_KEY = "coreai_rgba_image"
"""Under this key of the bundle's own metadata stands one JSON string: limits, sizes, statistics."""

GET_AGAIN = "download or export it again"
CONNECT_AGAIN = "connect its disk again"


class CoreAIUnavailableError(RuntimeError):
    """The Core AI runtime cannot be imported here."""


class DamagedBundleError(ContractError):
    """A bundle that would kill the process if it were loaded."""


@dataclass(frozen=True)
class Bundle:
    """One ``.aimodel`` on disk: the functions it holds, by name, and what its exporter wrote about it."""

    path: Path
    functions: dict[str, GraphSpec]
    metadata: dict[str, Any]
    sha256: str

    @property
    def spec(self) -> GraphSpec:
        """Its main function, which every bundle has."""
        return self.functions[MAIN]

    @property
    def size(self) -> int:
        """Bytes of the program, weights included; ``ContractError`` if the disk it is on is gone."""
        with reading(self.path):
            return (self.path / PROGRAM).stat().st_size


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What the file system says while ``path`` is read, as a ``ContractError`` with the way out."""
    try:
        yield
    except FileNotFoundError as error:
        raise ContractError(f"{error.filename or path} is gone: {CONNECT_AGAIN}, or {GET_AGAIN}") from error
    except PermissionError as error:
        raise ContractError(
            f"{error.filename or path} may not be read: allow it with chmod -R u+rX {shlex.quote(str(path))}, on macOS "
            "also in System Settings, Privacy & Security, Files and Folders"
        ) from error
    except OSError as error:
        raise ContractError(f"{path} cannot be read ({error.strerror}): {CONNECT_AGAIN} and try again") from error


def import_coreai() -> tuple[ModuleType, ModuleType]:
    """``coreai.runtime`` and ``coreai.authoring``, imported on first use."""
    try:
        import coreai.authoring
        import coreai.runtime
    except ImportError as error:
        raise CoreAIUnavailableError(
            f"the Core AI runtime is not available here ({error}). This is {platform.platform()}, Python "
            f"{platform.python_version()}; it needs macOS 26 or newer on Apple silicon, or Linux on x86-64 with glibc "
            "2.34 or newer for slow runs on the CPU, and Python 3.11 to 3.14: pip install coreai-core"
        ) from error
    return coreai.runtime, coreai.authoring


def read_bundle(path: str | Path) -> Bundle:
    """Check the bundle at ``path`` and describe it.

    Raises ``DamagedBundleError`` for one that is not whole, ``ContractError`` for one that holds
    none of this model's graphs, ``CoreAIUnavailableError`` without the runtime.
    """
    with reading(Path(path)):
        return _read_bundle(Path(path))


def _read_bundle(path: Path) -> Bundle:
    if path.suffix != SUFFIX or path.is_file():
        raise DamagedBundleError(f"{path} is not an {SUFFIX} folder: {GET_AGAIN}")
    list(path.iterdir())  # raises for a folder that is gone or closed, which is_file() does not tell apart
    program = path / PROGRAM
    try:
        program.open("rb").close()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise DamagedBundleError(f"{path} has no {PROGRAM}: {GET_AGAIN}") from error
    digest = _check_hash(path)
    asset_class = import_coreai()[1].AIModelAsset
    if not asset_class.is_valid(str(path)):
        raise DamagedBundleError(f"Core AI does not recognise {path}: {GET_AGAIN}")
    try:
        asset = asset_class.load(path)
        metadata = _own_metadata(asset.metadata.creator_defined_metadata)
        signatures = remembered(program, "signatures", lambda: _signatures(asset))
    except (RuntimeError, ValueError) as error:
        raise DamagedBundleError(f"Core AI cannot read {path} ({error}): {GET_AGAIN}") from error
    functions = {
        name: _with_limits(match_graph(path.name, name, *map(_tensor_specs, signature)), metadata)
        for name, signature in signatures.items()
    }
    return Bundle(path, functions, metadata, digest)


def _signatures(asset: Any) -> dict[str, list[list[tuple[str, str]]]]:
    """Inputs and outputs of each function we know, as the summary describes them."""
    summary = asset.summary(include_statistics=False)
    if summary is None or MAIN not in summary.function_names:
        raise ValueError(f"it has no function {MAIN}")
    known = [MAIN, *(spec.function for spec in DIT_FUNCTIONS)]
    return {
        name: [summary.function_inputs(name), summary.function_outputs(name)]
        for name in known
        if name in summary.function_names
    }


def _check_hash(path: Path) -> str:
    """The program's SHA-256, which must be what the converter wrote to ``main.hash``."""
    program, recorded = path / PROGRAM, path / "main.hash"
    size = program.stat().st_size
    if size < 1024:
        raise DamagedBundleError(
            f"{program} has {size} bytes, as a Git LFS pointer has: fetch the real file (git lfs pull)"
        )
    if not recorded.is_file():
        raise DamagedBundleError(f"{path} has no {recorded.name}, so nothing tells whether it is whole: {GET_AGAIN}")
    digest = sha256_of(program)
    if recorded.read_bytes().hex() != digest:
        raise DamagedBundleError(f"{program} does not match {recorded.name}, so it is damaged: {GET_AGAIN}")
    return digest


def _own_metadata(custom: dict[str, Any]) -> dict[str, Any]:
    text = custom.get(METADATA_KEY, "{}")
    metadata = json.loads(text)
    if not isinstance(metadata, dict):
        raise ValueError(f"metadata {METADATA_KEY} is not a JSON object: {text[:80]!r}")
    return metadata


def _tensor_specs(described: list[tuple[str, str]]) -> tuple[TensorSpec, ...]:
    """From the summary's ``('vel', 'NDArray (Float32, 1 × ? × 64)')``; a dynamic axis becomes ``"?"``."""
    specs = []
    for name, text in described:
        found = re.fullmatch(r"NDArray \((\w+), ([\d? ×]+)\)", text)
        if not found:
            raise DamagedBundleError(f"{name} is described as {text!r}, which is no tensor of this model")
        sizes = tuple(int(size) if size.isdigit() else size for size in found[2].split(" × "))
        specs.append(TensorSpec(name, found[1].lower(), sizes))
    return tuple(specs)


def match_graph(
    label: str, function: str, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]
) -> GraphSpec:
    """Which graph of the contract this is, by its input names, with its sizes and its dtype filled in.

    Raises ``ContractError`` if it is none of them or differs in a dtype, a rank or a size.
    """
    label = label if function == MAIN else f"{label}, function {function}"
    names = {tensor.name for tensor in inputs}
    candidates = [graph for graph in (*GRAPHS, *DIT_FUNCTIONS) if graph.function == function]
    spec = next((graph for graph in candidates if {tensor.name for tensor in graph.inputs} == names), None)
    if spec is None:
        known = "; ".join(f"{graph.kind} {[tensor.name for tensor in graph.inputs]}" for graph in candidates)
        raise ContractError(f"{label} takes {sorted(names)}, which is none of the graphs of this model: {known}")
    found = {tensor.name: tensor for tensor in (*inputs, *outputs)}
    sizes: dict[str, int] = {}
    for tensor in (*spec.inputs, *spec.outputs):
        actual = found.get(tensor.name)
        dtypes = COMPUTE_DTYPES if tensor.dtype == COMPUTE else (tensor.dtype,)
        if actual is None or actual.dtype not in dtypes or len(actual.shape) != len(tensor.shape):
            raise ContractError(f"{label}: {tensor.name} is {actual}, the contract says {tensor}")
        for size, axis in zip(actual.shape, tensor.shape, strict=True):
            known_size = sizes.get(axis, size) if isinstance(axis, str) else axis
            if size != known_size or (size == "?") != (axis in spec.limits):
                raise ContractError(f"{label}: {tensor.name} is {actual}, the contract says {tensor}")
            if isinstance(axis, str) and isinstance(size, int):
                sizes[axis] = size
    compute = {tensor.dtype for tensor in found.values() if tensor.name in spec.computed}
    if len(compute) > 1:
        raise ContractError(f"{label} mixes {sorted(compute)} in {sorted(spec.computed)}: {GET_AGAIN}")
    return spec.bind(sizes, *compute)


def _with_limits(spec: GraphSpec, metadata: dict[str, Any]) -> GraphSpec:
    """A bundle exported with narrower axes than the contract's says so in its metadata."""
    limits = metadata.get("limits", {})
    if not isinstance(limits, dict) or not all(_is_pair(pair) for pair in limits.values()):
        raise DamagedBundleError(
            f"the limits in the metadata are {limits!r}, not pairs of a lower and an upper end: {GET_AGAIN}"
        )
    own = {axis: tuple(pair) for axis, pair in limits.items() if axis in spec.limits}
    return replace(spec, limits={**spec.limits, **own})


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and [type(size) for size in value] == [int, int] and 1 <= value[0] <= value[1]
