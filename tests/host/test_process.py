"""Programs that are watched, ended with all they started, and kept from running side by side."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from coreai_rgba_image.host import process
from coreai_rgba_image.host.contract import ContractError

FAMILY = """
import signal, subprocess, sys, time
from pathlib import Path
child = subprocess.Popen(["sleep", "100"])
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(100)
"""
"""A program that starts another and writes down which; a stubborn one does not end when it is told to."""

HOLDER = """
import subprocess
from coreai_rgba_image.host import process
with process.only_one("compiles a.aimodel") as lock:
    child = subprocess.Popen(["sleep", "100"], pass_fds=[lock])
    print(child.pid, flush=True)
    child.wait()
"""


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def has_ended(number: int) -> bool:
    try:
        return psutil.Process(number).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(100):
        if condition():
            return
        time.sleep(0.1)
    pytest.fail("nothing happened for ten seconds")


@pytest.mark.parametrize(("code", "status"), [("exit(3)", 3), ("import os; os.kill(os.getpid(), 4)", -signal.SIGILL)])
def test_how_it_ended_is_told(code: str, status: int) -> None:
    assert process.run(python(code)) == process.Ended(status, "")


def test_all_it_prints_is_kept_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SECONDS_BETWEEN_REPORTS", 0.02)
    seconds: list[float] = []
    code = "import time\nfor _ in range(5): print('x' * 100_000, flush=True); time.sleep(0.05)"
    ended = process.run(python(code), seconds.append)
    assert ended.output.count("x") == 500_000
    assert len(seconds) > 3
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("manner", ["obedient", "stubborn"])
@pytest.mark.parametrize("reason", ["cancelled", "time limit", "exception"])
def test_nothing_it_started_is_left(tmp_path: Path, manner: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SECONDS_BETWEEN_REPORTS", 0.05)
    monkeypatch.setattr(process, "SECONDS_TO_END", 0.2)
    family = tmp_path / "family"
    error = {"cancelled": process.CancelledError, "time limit": TimeoutError, "exception": KeyboardInterrupt}[reason]

    def report(_: float) -> None:
        if reason == "exception" and family.exists():
            raise KeyboardInterrupt

    with pytest.raises(error):
        process.run(
            python(FAMILY, str(family), manner), report,
            lambda: reason == "cancelled" and family.exists(),
            time_limit=0.5 if reason == "time limit" else 60,
        )  # fmt: skip
    wait_for(lambda: has_ended(int(family.read_text())))


def test_only_one_process_at_a_time_and_the_next_is_told_which() -> None:
    with subprocess.Popen(python(HOLDER), stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        child = psutil.Process(int(holder.stdout.readline()))
        with pytest.raises(ContractError, match=f"process {holder.pid} compiles a.aimodel"), process.only_one("checks"):
            pass
        holder.kill()
        holder.wait()
        # What it started goes on, and holds the lock with it.
        with pytest.raises(ContractError, match="wait until it has ended"), process.only_one("checks"):
            pass
        child.kill()
    wait_for(lambda: has_ended(child.pid))
    with process.only_one("checks"), pytest.raises(ContractError, match="checks now"), process.only_one("again"):
        pass
