"""A program that takes minutes: started in a group of its own, watched, and ended with all it started."""

import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .contract import ContractError
from .files import cache_folder

SECONDS_BETWEEN_REPORTS = 0.5
SECONDS_TO_END = 5
"""How long a program that is told to end may take to clean up after itself."""


class CancelledError(Exception):
    """The caller no longer wants the result."""


@dataclass(frozen=True)
class Ended:
    """How a program ended: its exit status, or minus the number of the signal it died by, and all it printed."""

    status: int
    output: str


def run(
    command: Sequence[str],
    report: Callable[[float], object] = lambda seconds: None,
    cancelled: Callable[[], bool] = lambda: False,
    *,
    time_limit: float = math.inf,
    keep_open: Sequence[int] = (),
) -> Ended:
    """Run it to its end, calling ``report`` with the seconds so far and asking ``cancelled`` twice a second.

    ``keep_open`` are file descriptors that the program inherits. Raises ``CancelledError``,
    ``TimeoutError`` after ``time_limit`` seconds, and ``OSError`` if it cannot be started. When this
    is left by an exception, the program and all it started have ended.
    """
    started = time.monotonic()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True, pass_fds=keep_open,
    ) as process:  # fmt: skip
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):  # what was read so far is kept for the next try
                    output, _ = process.communicate(timeout=SECONDS_BETWEEN_REPORTS)
                    return Ended(process.returncode, output.decode(errors="replace"))
                seconds = time.monotonic() - started
                report(seconds)
                if cancelled():
                    raise CancelledError(f"{command[0]} was stopped after {seconds:.0f} s")
                if seconds > time_limit:
                    raise TimeoutError(f"{command[0]} did not end within {time_limit:.0f} s")
        finally:
            if process.returncode is None:
                _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    _signal_group(process, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(SECONDS_TO_END)
    _signal_group(process, signal.SIGKILL)
    process.wait()


def _signal_group(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    # Neither is an error: nobody is left, which macOS reports as a lack of permission.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


@contextlib.contextmanager
def only_one(what: str) -> Iterator[int]:
    """Compiling and trying copies, one at a time on this machine: two jobs on the GPU hung a driver.

    Yields a file descriptor; a program that inherits it holds the lock as well, should it outlive
    us. Raises ``ContractError`` if another process is at it; ``what`` is what that would be told.
    """
    import fcntl  # not on Windows

    path = cache_folder() / "compile.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise ContractError(
                f"only one can compile or check at a time, and {file.read()} now: wait until it has ended"
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} {what}")
        file.flush()
        yield file.fileno()
