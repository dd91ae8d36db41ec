"""The Core AI engine: load a checked bundle, call it, release it.

What shapes this module are the runtime's habits, each of them fatal or leaking: a call whose
event loop closes kills the process, cancelling does not stop native work, exiting right after a
call aborts, and every awaited result stays referenced by the loop that awaited it. Hence one
daemon thread with one loop that is never closed, calls one at a time, and a short wait at exit.
"""

import asyncio
import atexit
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from contextvars import Context
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVarTuple

import numpy as np

from . import compiled, mac
from .bundle import MAIN, Bundle, import_coreai
from .contract import ContractError, GraphSpec, HeldArray
from .files import cache_folder, hash_file, sha256_of

Arguments = TypeVarTuple("Arguments")

logger = logging.getLogger(__name__)

UNUSED_DAYS = 30


class _ForgetfulLoop(asyncio.SelectorEventLoop):
    """Drops a callback and its arguments once it ran, and skips futures that are already done.

    The runtime keeps the handle of each ``call_soon_threadsafe`` alive, and with it the outputs
    of the call: 8.4 MB a call were never freed.
    """

    def call_soon_threadsafe(
        self, callback: Callable[[*Arguments], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.Handle:
        waiting = [(callback, args)]

        def run_and_forget() -> None:
            call, values = waiting.pop()
            future = getattr(call, "__self__", None)
            if not (isinstance(future, asyncio.Future) and future.done()):
                call(*values)

        return super().call_soon_threadsafe(run_and_forget, context=context)


class _Worker:
    """The one thread that Core AI runs on."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._loop = _ForgetfulLoop()
        self._one_at_a_time = asyncio.Lock()
        self._idle = threading.Condition()
        self._in_flight = 0
        threading.Thread(target=self._loop.run_forever, name="core-ai", daemon=True).start()
        atexit.register(self._drain)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run it to its end and return its result. Native work cannot be cancelled, so nothing here does."""
        if os.getpid() != self._process:
            coroutine.close()
            raise RuntimeError("Core AI does not survive a fork: start the process with 'spawn' instead")
        return asyncio.run_coroutine_threadsafe(self._guarded(coroutine), self._loop).result()

    async def _guarded(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        with self._idle:
            self._in_flight += 1
        try:
            async with self._one_at_a_time:
                return await coroutine
        finally:
            with self._idle:
                self._in_flight -= 1
                self._idle.notify_all()

    def _drain(self) -> None:
        """At exit: wait for calls in flight, then for native threads to settle; else the process aborts."""
        if os.getpid() != self._process:
            return
        with self._idle:
            self._idle.wait_for(lambda: self._in_flight == 0)
        time.sleep(0.05)


_worker: _Worker | None = None
_worker_lock = threading.Lock()


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    global _worker
    with _worker_lock:
        if _worker is None:
            _worker = _Worker()
    return _worker.run(coroutine)


class LoadedFunction:
    """One function of a loaded bundle, callable with named arrays."""

    def __init__(self, spec: GraphSpec, model: Any):
        self.spec = spec
        self._ndarray = import_coreai()[0].NDArray
        self._native = model.load_function(spec.function)

    def __call__(self, **arrays: np.ndarray | HeldArray) -> dict[str, np.ndarray]:
        """Run it once. Arrays must be exactly what ``spec`` says, else ``ContractError``."""
        return self._checked_call(arrays, lambda output: np.array(output.numpy()))

    def hold(self, **arrays: np.ndarray | HeldArray) -> dict[str, HeldArray]:
        """Run it once and leave the outputs in the runtime, in their own dtype, for another function."""
        dtypes = {tensor.name: tensor.dtype for tensor in self.spec.outputs}
        outputs = self._checked_call(arrays, lambda output: output)
        return {name: HeldArray(output, dtypes[name], tuple(output.shape)) for name, output in outputs.items()}

    def _checked_call(self, arrays: dict[str, np.ndarray | HeldArray], keep: Callable[[Any], Any]) -> dict[str, Any]:
        if self._native is None:
            raise RuntimeError(f"the {self.spec.kind} was released: load it again")
        self.spec.check(arrays)
        sources = {
            name: array if isinstance(array, HeldArray) else np.ascontiguousarray(array)
            for name, array in arrays.items()
        }
        return _run(self._call(sources, keep))

    async def _call(self, arrays: dict[str, np.ndarray | HeldArray], keep: Callable[[Any], Any]) -> dict[str, Any]:
        # The sources stay referenced by `arrays` until the call returns: the runtime may not have copied them.
        inputs = {
            name: array.array if isinstance(array, HeldArray) else self._ndarray(array)
            for name, array in arrays.items()
        }
        outputs = await self._native(inputs)
        return {tensor.name: keep(outputs[tensor.name]) for tensor in self.spec.outputs}

    def release(self) -> None:
        self._native = None


class LoadedGraph:
    """A bundle in memory. Calling it calls its main function; ``graph["step"]`` is another of its functions.

    Use it as a context manager: leaving releases it.
    """

    def __init__(self, bundle: Bundle, model: Any):
        self.bundle = bundle
        self._model = model
        self._functions: dict[str, LoadedFunction] = {}

    @property
    def spec(self) -> GraphSpec:
        return self.bundle.spec

    def __call__(self, **arrays: np.ndarray | HeldArray) -> dict[str, np.ndarray]:
        return self[MAIN](**arrays)

    def __getitem__(self, name: str) -> LoadedFunction:
        """A function of the bundle, loaded on first use."""
        if self._model is None:
            raise RuntimeError(f"the {self.spec.kind} was released: load it again")
        if name not in self._functions:
            self._functions[name] = LoadedFunction(self.bundle.functions[name], self._model)
        return self._functions[name]

    def release(self) -> None:
        """Give the memory back. Safe to call twice."""
        for function in self._functions.values():
            function.release()
        self._functions.clear()
        self._model = None

    def __enter__(self) -> "LoadedGraph":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def load(bundle: Bundle) -> LoadedGraph:
    """Load a bundle that ``read_bundle`` accepted.

    On a Mac this is its compiled copy, tried in a process of its own if it is new; elsewhere the form that is
    compiled on first use. Raises ``ContractError`` where loading would kill the process or the disk is too full.
    """
    return load_compiled(bundle, compiled.path_to_load(bundle) if mac.on_mac() else None)


def load_compiled(bundle: Bundle, path: Path | None) -> LoadedGraph:
    """Load what ``path`` holds, compiled from ``bundle``, without any check; None compiles it for Linux."""
    return LoadedGraph(bundle, _run(_load(bundle, path)))


async def _load(bundle: Bundle, path: Path | None) -> Any:
    runtime, _ = import_coreai()
    started = time.perf_counter()
    source = path or compiled_for_linux(bundle)
    model = await runtime.AIModel.load(source, mac.load_options(runtime))
    logger.info("loaded %s in %.1f s", source, time.perf_counter() - started)
    return model


def compiled_for_linux(bundle: Bundle) -> Path:
    """The runtime's own compiled form, made on first use and kept in the cache.

    Compiling is what takes time on Linux: it grows with the number of operations, squared.
    """
    cache = cache_folder() / "compiled"
    folder = cache / f"{bundle.sha256[:32]}-coreai-core-{version('coreai-core')}"
    if not _is_complete(folder):
        cache.mkdir(parents=True, exist_ok=True)
        _check_free_disk(cache, bundle)
        _remove_unused(cache)
        temporary = Path(tempfile.mkdtemp(dir=cache))
        try:
            import_coreai()[1].AIModelAsset.load(bundle.path)._write_odix(temporary)
            _write_manifest(temporary)
            _move_into_place(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    os.utime(folder)  # the time of last use, for _remove_unused
    return folder


def _check_free_disk(cache: Path, bundle: Bundle) -> None:
    needed, free = 2 * bundle.size, shutil.disk_usage(cache).free
    if free < needed:
        raise ContractError(
            f"compiling {bundle.path.name} needs {needed / 1e9:.1f} GB in {cache}, {free / 1e9:.1f} GB are free: "
            "make room, or point COREAI_RGBA_CACHE to another disk"
        )


def _move_into_place(temporary: Path, folder: Path) -> None:
    try:
        temporary.rename(folder)
    except OSError:  # there is one: another process was first, and may be loading it, or it is damaged
        if not _is_complete(folder):
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)


def _write_manifest(folder: Path) -> None:
    manifest = {path.name: hash_file(path) for path in folder.iterdir()}
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def _is_complete(folder: Path) -> bool:
    """Whether every file is as it was written: a truncated compiled form kills the process on load."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        return all(sha256_of(folder / name) == digest for name, digest in manifest.items())
    except (OSError, ValueError):
        return False


def _remove_unused(cache: Path) -> None:
    oldest = time.time() - UNUSED_DAYS * 86400
    for folder in cache.iterdir():
        if folder.is_dir() and folder.stat().st_mtime < oldest:
            shutil.rmtree(folder, ignore_errors=True)
