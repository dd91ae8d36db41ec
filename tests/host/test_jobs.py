"""Long tasks in the background: what is told of them, that there is one at a time, and how they end."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from coreai_rgba_image.host.cli import main
from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.jobs import Job, Jobs, JobState, Report, compile_job
from coreai_rgba_image.host.model_set import ModelSet

SECONDS = 30


class Work:
    """Reports once, then waits to be let go and reports again, as a download does piece by piece."""

    def __init__(self, then: Callable[[], str] = lambda: "it is whole") -> None:
        self.then = then
        self.reported, self.go_on = threading.Event(), threading.Event()

    def __call__(self, report: Report) -> str:
        report("fetch a", 1, 10)
        self.reported.set()
        self.go_on.wait(SECONDS)
        report("fetch b", 9, 10)
        return self.then()

    def job(self) -> Job:
        return Job("download", "a-set", self)


@pytest.fixture
def told() -> list[JobState]:
    return []


@pytest.fixture
def jobs(told: list[JobState]) -> Jobs:
    return Jobs(told.append)


def ended(jobs: Jobs) -> JobState:
    jobs.wait(SECONDS)
    assert jobs.state is not None
    return jobs.state


def test_a_job_is_told_of_from_its_begin_to_its_end(jobs: Jobs, told: list[JobState]) -> None:
    work = Work()
    jobs.start(work.job())
    assert work.reported.wait(SECONDS)
    assert jobs.state == JobState("download", "a-set", "running", "fetch a", 1, 10)
    work.go_on.set()
    assert ended(jobs) == JobState("download", "a-set", "done", "it is whole", 9, 10)
    assert (told[0], told[-1]) == (JobState("download", "a-set"), jobs.state)


def test_reports_in_quick_succession_are_not_all_told(jobs: Jobs, told: list[JobState]) -> None:
    def work(report: Report) -> str:
        for number in range(10_000):
            report("fetch", number, 10_000)
        return "done"

    jobs.start(Job("download", "a-set", work))
    assert ended(jobs).done == 9_999
    assert len(told) < 100


def test_only_one_runs_at_a_time(jobs: Jobs) -> None:
    work = Work()
    jobs.start(work.job())
    with pytest.raises(ContractError, match=r"the download of a-set is running.*wait until it has ended, or cancel it"):
        jobs.start(Job("compile", "another", lambda report: ""))
    work.go_on.set()
    assert ended(jobs).outcome == "done"
    jobs.start(Job("compile", "another", lambda report: "compiled"))
    assert ended(jobs) == JobState("compile", "another", "done", "compiled")


def test_a_cancelled_job_stops_at_its_next_report(jobs: Jobs, told: list[JobState]) -> None:
    work = Work()
    jobs.cancel()  # nothing runs: nothing happens
    jobs.start(work.job())
    assert work.reported.wait(SECONDS)
    jobs.cancel()
    assert told[-1].outcome == "stopping"
    work.go_on.set()
    state = ended(jobs)
    assert (state.outcome, state.done) == ("cancelled", 1)
    jobs.cancel()
    assert jobs.state == state


def fail(error: Exception) -> Callable[[], str]:
    def then() -> str:
        raise error

    return then


@pytest.mark.parametrize(
    ("error", "text", "logged"),
    [(ContractError("make room"), "make room", 0), (KeyError("x"), "KeyError: 'x'. The log has more", 1)],
)
def test_a_failed_job_says_why(
    jobs: Jobs, caplog: pytest.LogCaptureFixture, error: Exception, text: str, logged: int
) -> None:
    work = Work(fail(error))
    work.go_on.set()
    jobs.start(work.job())
    assert (ended(jobs).outcome, ended(jobs).text) == ("failed", text)
    assert len([record for record in caplog.records if record.exc_info]) == logged


def test_compiling_without_the_tools_says_what_to_install(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        jobs.start(compile_job("a-set", ModelSet(tmp_path / "empty")))
        state = ended(jobs)
    assert (state.task, state.name, state.outcome) == ("compile", "a-set", "failed")
    assert "no xcrun on PATH: this needs a Mac with Xcode 27" in state.text


def test_a_damaged_bundle_is_not_passed_over_by_a_compile(
    jobs: Jobs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a-set" / "qi21_dit_bf16.aimodel").mkdir(parents=True)
    jobs.start(compile_job("a-set", ModelSet(tmp_path / "a-set")))
    assert ended(jobs).outcome == "failed"
    assert "qi21_dit_bf16.aimodel has no main.mlirb" in ended(jobs).text
    assert main(["compile", str(tmp_path / "a-set")]) == 1
    assert capsys.readouterr().err == f"coreai-rgba: {ended(jobs).text}\n"


EXIT = """
import sys, time
from pathlib import Path
from coreai_rgba_image.host.jobs import Job, Jobs

def work(report):
    try:
        while True:
            report("working", 0, 0)
            time.sleep(0.05)
    finally:
        Path(sys.argv[1]).write_text("cleaned up")

Jobs().start(Job("compile", "a-set", work))
"""


def test_a_process_that_ends_lets_its_job_clean_up(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", EXIT, str(tmp_path / "end")], check=True, timeout=SECONDS)
    assert (tmp_path / "end").read_text(encoding="utf-8") == "cleaned up"
