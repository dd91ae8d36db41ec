"""Downloads and compiles that go on while their caller does something else: one at a time, watched, stopped."""

import atexit
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from .bundle import CoreAIUnavailableError
from .compiler import Progress, compile_set
from .contract import ContractError
from .download import DownloadRequest, download
from .model_set import ModelSet
from .process import SECONDS_TO_END, CancelledError

SECONDS_BETWEEN_REPORTS = 0.2

Task = Literal["download", "compile"]
Report = Callable[[str, int, int], None]
"""What a job calls often: with what the command line would say, and how many bytes or bundles of how many are ready.

It raises ``CancelledError`` if the job is to stop.
"""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """``work`` does it and returns its last words; ``name`` is the model set's."""

    task: Task
    name: str
    work: Callable[[Report], str]


def download_job(request: DownloadRequest) -> Job:
    def work(report: Report) -> str:
        try:
            path = download(request, lambda now: report(f"{now.stage} {now.file}", now.done, now.total))
        except CancelledError as error:
            raise CancelledError(request.how_to_go_on) from error
        return f"{path} is whole"

    return Job("download", request.name, work)


def compile_job(name: str, model: ModelSet) -> Job:
    def work(report: Report) -> str:
        bundles = model.whole()

        def tell(now: Progress) -> None:
            report(f"{now.bundle.path.name}: {now.text}", bundles.index(now.bundle), len(bundles))

        copies = compile_set(bundles, report=tell)
        return f"compiled: {', '.join(copy.name for copy in copies) or 'nothing'}"

    return Job("compile", name, work)


@dataclass(frozen=True)
class JobState:
    """How far a job is, or how it ended; ``total`` is 0 while nobody knows. See ``Report``."""

    task: Task
    name: str
    outcome: Literal["running", "stopping", "done", "failed", "cancelled"] = "running"
    text: str = ""
    done: int = 0
    total: int = 0

    @property
    def running(self) -> bool:
        return self.outcome in ("running", "stopping")


class Jobs:
    """Runs one job at a time, in a thread of its own.

    ``tell`` hears of every change, but only a few times a second of those that are mere numbers.
    """

    def __init__(self, tell: Callable[[JobState], object] = lambda state: None) -> None:
        self.state: JobState | None = None
        """Of the job that runs, else of the last one."""
        self._tell = tell
        self._told = 0.0
        self._lock = threading.Lock()
        self._thread = threading.Thread()

    def start(self, job: Job) -> None:
        """Raises ``ContractError`` if another one runs."""
        with self._lock:
            if self.state is not None and self.state.running:
                raise ContractError(
                    f"the {self.state.task} of {self.state.name} is running, and only one can at a time: wait until it "
                    "has ended, or cancel it"
                )
            self._change(JobState(job.task, job.name))
            self._thread = threading.Thread(target=self._run, args=(job,), name=f"coreai-rgba {job.task}", daemon=True)
            self._thread.start()
        atexit.register(self.close)  # the program that a compile starts would outlive us

    def cancel(self) -> None:
        """Tell the job that runs, if one does, to stop; it does at its next report."""
        with self._lock:
            if self.state is not None and self.state.running:
                self._change(replace(self.state, outcome="stopping"))

    def wait(self, seconds: float | None = None) -> None:
        """Until the job has ended, at most ``seconds``."""
        if self._thread.is_alive():
            self._thread.join(seconds)

    def close(self) -> None:
        atexit.unregister(self.close)
        self.cancel()
        self.wait(2 * SECONDS_TO_END)

    def _run(self, job: Job) -> None:
        try:
            ended: dict[str, Any] = {"outcome": "done", "text": job.work(self._report)}
        except CancelledError as error:
            ended = {"outcome": "cancelled", "text": str(error)}
        except (ContractError, CoreAIUnavailableError) as error:
            ended = {"outcome": "failed", "text": str(error)}
        except Exception as error:
            logger.exception("the %s of %s failed", job.task, job.name)
            ended = {"outcome": "failed", "text": f"{type(error).__name__}: {error}. The log has more"}
        with self._lock:
            self._change(replace(self._current, **ended))

    def _report(self, text: str, done: int, total: int) -> None:
        with self._lock:
            state = self._current
            if state.outcome == "stopping":
                raise CancelledError(f"the {state.task} of {state.name} was cancelled")
            self._change(replace(state, text=text, done=done, total=total), often=text == state.text)

    @property
    def _current(self) -> JobState:
        if self.state is None:
            raise RuntimeError("no job was started")
        return self.state

    def _change(self, state: JobState, *, often: bool = False) -> None:
        self.state = state
        now = time.monotonic()
        if not often or now - self._told >= SECONDS_BETWEEN_REPORTS:
            self._told = now
            self._tell(state)
