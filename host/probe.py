"""Trying a compiled copy in a process of its own, because one that does not fit kills the process that loads it.

What came of it is remembered for these files on this machine: a copy that loaded is not tried again, and one that
crashed is not either.
"""

import hashlib
import json
import logging
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from . import mac, process
from .bundle import read_bundle
from .child import command_of
from .contract import ContractError, GraphSpec
from .files import cache_folder, write_atomically

logger = logging.getLogger(__name__)

TIME_LIMIT = 1800
"""Seconds that a load and a first call may take; on an M4 Max they took 80."""

KILLED = 9
TOLD_TO_END = (KILLED, signal.SIGTERM, signal.SIGINT)
"""Signals that say nothing about the copy: memory ran out, or someone ended the process."""


def problem_of(
    bundle: Path,
    copy: Path,
    report: Callable[[float], object] = lambda seconds: None,
    cancelled: Callable[[], bool] = lambda: False,
    keep_open: Sequence[int] = (),
) -> str:
    """Empty if ``copy``, compiled from ``bundle``, loads and answers on this machine, else how it fails.

    Takes minutes unless it is remembered. Raises ``ContractError`` if it could not be found out, and
    ``process.CancelledError``; ``report``, ``cancelled`` and ``keep_open`` are as in ``process.run``.
    """
    if (tried := known(copy)) is not None:
        return tried
    logger.info("trying %s in a process of its own", copy)
    command = command_of("probe", str(bundle), str(copy))
    try:
        ended = process.run(command, report, cancelled, time_limit=TIME_LIMIT, keep_open=keep_open)
    except TimeoutError as error:
        raise ContractError(
            f"{copy.name} did not load within {TIME_LIMIT // 60} minutes: end what else uses the GPU and try again"
        ) from error
    if -ended.status in TOLD_TO_END:
        raise ContractError(
            f"the process that tried {copy.name} was killed, perhaps because memory ran out: close other programs "
            "and try again"
        )
    if ended.status > 0:  # not remembered: what did not crash may be tried again, and may have been bad luck
        return f"with {mac.last_words(ended.output, 1)}"
    problem = ""
    if ended.status < 0:
        problem = (
            f"the process dies by {signal.Signals(-ended.status).name}, its last words: {mac.last_words(ended.output)}"
        )
    _remember(copy, problem)
    return problem


def known(copy: Path) -> str | None:
    """What ``problem_of`` remembers, or None."""
    memory = _memory(copy)
    try:
        return str(json.loads(memory.read_text(encoding="utf-8"))["problem"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not tried here, or the memory is damaged: trying is the remedy for both


def _remember(copy: Path, problem: str) -> None:
    try:
        write_atomically(_memory(copy), json.dumps({"copy": copy.name, "problem": problem}))
    except OSError as error:
        logger.warning("cannot remember whether %s loads (%s): it is tried each time", copy, error)


def _memory(copy: Path) -> Path:
    """Named by the names, sizes and times of the copy's files, the chip and macOS, but not by the copy's place."""
    stamps = []
    for path in sorted(copy.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            status = path.stat()
            stamps.append([path.relative_to(copy).as_posix(), status.st_size, status.st_mtime_ns])
    identity = json.dumps([copy.name, stamps, mac.chip(), mac.os_build()])
    digest = hashlib.sha256(os.fsencode(identity)).hexdigest()[:32]
    return cache_folder() / "load-checks" / f"{digest}.json"


def main(bundle: str, copy: str) -> None:
    """In the process of its own: load every function of the copy, and call the main one once."""
    import resource  # not on Windows

    from . import runtime

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would be as large as the model
    status = 0
    try:
        graph = runtime.load_compiled(read_bundle(bundle), Path(copy))
        for name in graph.bundle.functions:
            graph[name]
        # Not the load but the first call is what aborts in a DiT that was compiled without frequent reshapes.
        graph(**smallest_inputs(graph.spec))
    except Exception as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", flush=True)
        status = 1
    os._exit(status)  # without an end of the runtime, which may abort and is not the question


def smallest_inputs(spec: GraphSpec) -> dict[str, np.ndarray]:
    """Zeros of the smallest shapes that the graph takes."""

    def size_of(axis: int | str) -> int:
        return spec.limits[axis][0] if isinstance(axis, str) else axis

    return {tensor.name: np.zeros([size_of(axis) for axis in tensor.shape], tensor.dtype) for tensor in spec.inputs}
