"""Uses of the engine that may kill a process, so each runs in one of its own.

``python engine.py CASE PATH`` runs a function of this file and prints its result as JSON.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil

from coreai_rgba_image.host import runtime
from coreai_rgba_image.host.bundle import read_bundle
from coreai_rgba_image.host.contract import GraphSpec
from coreai_rgba_image.host.runtime import LoadedFunction

WARM_UP = 30
IDS = np.arange(512, dtype=np.int32)[None] % 250


@dataclass(frozen=True)
class Memory:
    """Resident MB of the process, and the part of it that is pages of libraries.

    The kernel takes cold pages of libraries away and gives them back as it likes, tens of MB at any
    time. They are bounded by the libraries' size, so growth is looked for in the rest.
    """

    resident: float
    libraries: float

    @classmethod
    def now(cls) -> "Memory":
        time.sleep(0.2)  # the runtime unmaps what was released a moment later
        mappings = psutil.Process().memory_maps(grouped=False) if sys.platform == "linux" else []
        libraries = sum(mapping.rss for mapping in mappings if ".so" in Path(mapping.path).name)
        return cls(psutil.Process().memory_info().rss / 1e6, libraries / 1e6)


def repeated_calls(path: Path, count: int = 300) -> list[dict[str, float]]:
    """Memory before and after so many calls of 8.4 MB of output each."""
    with runtime.load(read_bundle(path)) as encoder:
        for _ in range(WARM_UP):
            encoder(input_ids=IDS)
        before = Memory.now()
        for _ in range(count):
            encoder(input_ids=IDS)
        return [asdict(before), asdict(Memory.now())]


def repeated_calls_on_a_plain_loop(path: Path) -> list[dict[str, float]]:
    """The same on the event loop that asyncio gives to everybody, 100 times."""
    with patch.object(runtime, "_ForgetfulLoop", asyncio.SelectorEventLoop):
        return repeated_calls(path, 100)


def repeated_loads(path: Path) -> list[dict[str, float]]:
    """Memory after each of ten cycles of load, calls that touch every weight, and release."""
    bundle, after = read_bundle(path), []
    for _ in range(10):
        with runtime.load(bundle) as encoder:
            for ids in np.arange(25_000, dtype=np.int32).reshape(1, -1, 500).swapaxes(0, 1):
                encoder(input_ids=ids)
        after.append(asdict(Memory.now()))
    return after


def one_call(path: Path) -> str:
    """The outputs' SHA-256; the process exits at once."""
    with runtime.load(read_bundle(path)) as encoder:
        return hashlib.sha256(encoder(input_ids=IDS)["hidden"].tobytes()).hexdigest()


def exit_during_a_call(path: Path) -> str:
    """The main thread leaves while a daemon thread is inside a slow call."""
    dit = runtime.load(read_bundle(path))
    threading.Thread(target=lambda: dit(**inputs_for(dit.spec, N=4096)), daemon=True).start()
    time.sleep(0.02)
    return "left"


def control_c(path: Path) -> dict[str, int]:
    """SIGINT soon after a slow call began: the caller sees KeyboardInterrupt, the next call works."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
    dit = runtime.load(read_bundle(path))
    inputs = inputs_for(dit.spec, N=4096)
    interrupted = finished = 0
    for delay in (0.0, 0.001, 0.005, 0.01, 0.02):
        with NativeCalls(threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start) as calls:
            try:
                dit(**inputs)
                time.sleep(1)  # the call was over before the signal came
            except KeyboardInterrupt:
                interrupted += calls.running
        finished += int(np.isfinite(dit(**inputs)["vel"]).all())
    return {"interrupted": interrupted, "finished": finished}


class NativeCalls:
    """Counts the calls that reach Core AI, and how many of them at one time."""

    def __init__(self, on_call: Callable[[], object] = lambda: None) -> None:
        self.total = self.running = self.most_at_once = 0
        self.on_call = on_call

    def __enter__(self) -> "NativeCalls":
        native = LoadedFunction._call

        async def counted(function: LoadedFunction, *arguments: Any) -> dict[str, Any]:
            self.total += 1
            self.running += 1
            self.most_at_once = max(self.most_at_once, self.running)
            self.on_call()
            try:
                return await native(function, *arguments)
            finally:
                self.running -= 1

        self._patch = patch.object(LoadedFunction, "_call", counted)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


def stopped_sampling(path: Path) -> dict[str, int]:
    """Native calls of a run closed after its second step, of one stopped by an exception, of a whole one."""
    from coreai_rgba_image.host.model_set import ModelSet  # here, because torch comes with it
    from coreai_rgba_image.host.sampling import Sampling, Settings

    rng = np.random.default_rng(0)
    noise = rng.standard_normal((1, 64, 8, 8), np.float32)
    prompt = rng.standard_normal((1, 8, 64), np.float32)

    def new_run() -> Sampling:
        return Sampling(ModelSet(path), prompt, noise, Settings(5))

    with NativeCalls() as closed:
        steps = new_run().run()
        next(steps), next(steps)
        steps.close()
    with NativeCalls() as raised, contextlib.suppress(InterruptedError):
        for step in new_run().run():
            if step.index == 2:
                raise InterruptedError
    with NativeCalls() as whole:
        list(new_run().run())
    return {"closed": closed.total, "raised": raised.total, "whole": whole.total}


def calls_from_threads(path: Path) -> dict[str, int]:
    """Eight threads, ten calls each: how many were right, and the most native calls at one time."""
    encoder = runtime.load(read_bundle(path))
    table = encoder(input_ids=np.arange(250, dtype=np.int32)[None])["hidden"][0]

    def right_calls(seed: int) -> int:
        rng = np.random.default_rng(seed)
        prompts = [rng.integers(0, 250, (1, rng.integers(16, 512)), np.int32) for _ in range(10)]
        return sum(np.array_equal(encoder(input_ids=ids)["hidden"][0], table[ids[0]]) for ids in prompts)

    with NativeCalls() as calls, ThreadPoolExecutor(8) as threads:
        right = sum(threads.map(right_calls, range(8)))
    return {"right": right, "most_at_once": calls.most_at_once}


def fork(path: Path) -> str:
    """What a forked child is told."""
    encoder = runtime.load(read_bundle(path))
    encoder(input_ids=IDS)
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            encoder(input_ids=IDS)
        except RuntimeError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    encoder(input_ids=IDS)  # the parent is not harmed
    return os.read(read, 1000).decode()


def compile_and_call(path: Path) -> dict[str, object]:
    """Whether loading had to compile, and the output's SHA-256."""
    with patch.object(runtime, "_write_manifest", wraps=runtime._write_manifest) as compiled:
        digest = one_call(path)
    return {"compiled": compiled.called, "sha256": digest}


def inputs_for(spec: GraphSpec, **sizes: int) -> dict[str, np.ndarray]:
    """Arrays the graph takes, each dynamic axis at its lower end unless ``sizes`` says otherwise."""
    axes = {axis: low for axis, (low, _) in spec.limits.items()} | sizes
    shapes = {
        tensor: [axis if isinstance(axis, int) else axes[axis] for axis in tensor.shape] for tensor in spec.inputs
    }
    return {tensor.name: np.ones(shape, tensor.dtype) for tensor, shape in shapes.items()}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](Path(sys.argv[2]))))
