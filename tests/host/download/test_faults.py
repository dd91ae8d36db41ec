"""Downloading a model set from a local hub, with everything that can go wrong on the way.

After every fault: a message that tells what to do, nothing in the models folder that a command
would take for a model set, and the next run succeeds.
"""

import json
import re
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coreai_rgba_image.host.download import LICENCE_NOTICE, NAME
from coreai_rgba_image.host.model_set import ModelSet
from coreai_rgba_image.host.published import DOWNLOAD_RECORD

from ..hub_server import HubServer
from .runs import (
    LICENCE,
    PROGRAM,
    REPOSITORY,
    SECONDS,
    Run,
    arguments_for,
    command_for,
    contents,
    flipped,
    process,
)  # fmt: skip

Check = Callable[[], None]
Stop = Callable[[int], tuple[int, str]]


def test_a_set_arrives_whole_says_where_it_is_from_and_what_is_next(
    hub: HubServer, run: Run, models: Path, arrives: Check
) -> None:
    arrives()
    assert json.loads((models / NAME / DOWNLOAD_RECORD).read_text()) == {"repository": REPOSITORY, "revision": hub.main}
    assert list(ModelSet(models / NAME).vae_decoders) == [(256, 256)]
    assert len(hub.asked(PROGRAM)) == 1
    _, out, _ = run(*arguments_for(models))
    assert out.endswith(f"next: coreai-rgba compile {models / NAME}\n")


def test_what_is_there_is_not_fetched_again(hub: HubServer, arrives: Check) -> None:
    arrives()
    hub.requests.clear()
    arrives()
    assert [request.file for request in hub.requests] == [""], "one look at the listing"


def test_the_token_goes_to_the_hub_and_not_to_where_it_redirects(hub: HubServer, arrives: Check) -> None:
    arrives()
    assert all(request.authorized for request in hub.asked("LICENSE"))
    assert not any(request.authorized for request in hub.asked(PROGRAM))


FAULTS: dict[str, tuple[list[tuple[str, dict[str, Any]]], str]] = {
    "the connection cut again and again": (
        [(PROGRAM, {"cut_after": 1_000_000, "times": 1}), (PROGRAM, {"cut_after": 0})],
        "the connection to .* failed .*check the network.*goes on where it stopped",
    ),
    "a server out of order": ([(PROGRAM, {"status": 503})], r"does not serve .* now \(.*503.*run the same command"),
    "a listing out of order": ([("", {"status": 500})], r"does not serve .* now \(.*500.*run the same command"),
    "a login page in the way": ([("", {"change": lambda listing: b"<html>"})], "is not the Hugging Face hub: log in"),
    "a gated repository": (
        [(PROGRAM, {"status": 403, "error_code": "GatedRepo"})],
        "open only to those who asked.*ask for it on .*hf auth login",
    ),
    "a forbidden file": ([(PROGRAM, {"status": 403})], r"forbids .*403.*in a browser, log in with hf auth login"),
    "a file that is gone": (
        [(PROGRAM, {"status": 404, "error_code": "EntryNotFound"})], "does not give .*choose another --revision"
    ),
    "another content of the same size": ([(PROGRAM, {"change": flipped})], "arrived damaged.*run the same command"),
    "a small file changed": ([("host/scheduler.json", {"change": flipped})], "scheduler.json arrived damaged"),
    "too short a file": ([(PROGRAM, {"change": lambda content: content[:-1000]})], r"does not give .*416"),
    "too long a file": ([(PROGRAM, {"change": lambda content: content + b"more"})], "arrived damaged"),
    "no room for the download": (
        [(PROGRAM, {"listed_size": 10**15})], r"GB free; the download needs 1,000,00\d\.\d GB more and .*--to"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("faults", "message"), FAULTS.values(), ids=FAULTS)
def test_a_fault_ends_in_a_message_and_the_next_run_succeeds(
    faults: list[tuple[str, dict[str, Any]]],
    message: str,
    hub: HubServer,
    run: Run,
    models: Path,
    arrives: Check,
    nothing_there: Check,
) -> None:
    for file, fault in faults:
        hub.fault(file, **fault)
    status, out, err = run(*arguments_for(models))
    assert (status, out) == (1, "")
    assert err.startswith("coreai-rgba: ")
    assert "Traceback" not in err
    assert re.search(message, err), err
    nothing_there()
    hub.heal()
    arrives()


def test_a_repository_or_revision_that_is_not_there(run: Run, models: Path, arrives: Check) -> None:
    status, _, err = run("download", "--repo", "nobody/nothing", "--to", models, "--accept-license")
    assert (status, "there is no repository nobody/nothing" in err, "check --repo" in err) == (1, True, True)
    status, _, err = run("download", "--repo", "a/b/c", "--to", models, "--accept-license")
    assert (status, "give OWNER/NAME with --repo" in err) == (1, True)
    status, _, err = run(*arguments_for(models, "--revision", "0" * 40))
    assert (status, "has no revision" in err, "leave --revision out" in err) == (1, True, True)
    assert not models.exists()
    arrives()


def test_without_accepting_the_licence_it_is_shown_and_nothing_is_fetched(
    hub: HubServer, run: Run, models: Path, arrives: Check
) -> None:
    status, out, err = run("download", "--repo", REPOSITORY, "--to", models)
    assert (status, out) == (1, LICENCE + "\n")
    assert err.endswith(f"{command_for(models)}\n")
    assert {request.file for request in hub.requests} == {"", "LICENSE"}
    assert not models.exists()
    arrives()


def test_the_published_set_comes_with_its_licence_in_one_line(hub: HubServer, run: Run, models: Path) -> None:
    status, out, _ = run("download", "--to", models)
    assert (status, out) == (1, LICENCE_NOTICE + "\n"), "the hub of the tests does not have that repository"


def test_room_for_the_compiled_copies_is_needed_too(hub: HubServer, run: Run, models: Path, arrives: Check) -> None:
    hub.fault(PROGRAM, listed_size=int(0.4 * shutil.disk_usage(models.parents[1]).free))
    status, _, err = run(*arguments_for(models))
    assert status == 1
    needed = re.search(r"has ([\d,.]+) GB free; the download needs ([\d,.]+) GB more and .* another ([\d,.]+) GB", err)
    assert needed, err
    free, fetched, compiled = (float(number.replace(",", "")) for number in needed.groups())
    assert fetched < free < fetched + compiled
    assert compiled == pytest.approx(2 * fetched, rel=0.05), "the DiT doubles"
    hub.heal()
    arrives()


def test_a_cut_connection_goes_on_by_itself(hub: HubServer, published: Path, arrives: Check) -> None:
    hub.fault(PROGRAM, cut_after=1_000_000, times=3)
    hub.fault(PROGRAM, status=503, times=1)
    arrives()
    starts = [request.start for request in hub.asked(PROGRAM)]
    assert starts == sorted(starts)
    assert starts[-1] > 2_500_000
    assert hub.bytes_sent(PROGRAM) < (published / PROGRAM).stat().st_size + 4 * 70_000


def test_a_server_that_ignores_ranges_sends_all_again(hub: HubServer, arrives: Check) -> None:
    hub.fault(PROGRAM, cut_after=1_000_000, times=1)
    hub.fault(PROGRAM, ignore_range=True)
    arrives()


def test_after_kill_9_only_the_rest_is_fetched_of_the_same_commit(
    hub: HubServer,
    run: Run,
    models: Path,
    published: Path,
    tmp_path: Path,
    arrives: Check,
    nothing_there: Check,
    stopped: Stop,
) -> None:
    status, _ = stopped(signal.SIGKILL)
    assert status == -signal.SIGKILL
    nothing_there()
    newer = shutil.copytree(published, tmp_path / "newer")
    (newer / "LICENSE").write_text("Another licence.\n")
    first = hub.main
    assert hub.commit(newer) != first
    hub.requests.clear()
    arrives()
    [rest] = hub.asked(PROGRAM)
    assert rest.start > 900_000
    assert rest.sent == (published / PROGRAM).stat().st_size - rest.start
    assert json.loads((models / NAME / DOWNLOAD_RECORD).read_text())["revision"] == first
    status, _, err = run(*arguments_for(models, "--revision", "main"))
    assert (status, f"holds {REPOSITORY} at revision {first}" in err, "choose another NAME" in err) == (1, True, True)
    assert contents(models / NAME) == contents(published)


def test_ctrl_c_says_how_to_go_on(
    hub: HubServer, models: Path, arrives: Check, nothing_there: Check, stopped: Stop
) -> None:
    status, err = stopped(signal.SIGINT)
    assert status == 130
    assert f"what has arrived stays in {models / f'.download-{NAME}'}; to go on: {command_for(models)}\n" in err
    assert "Traceback" not in err
    nothing_there()
    arrives()
    assert hub.asked(PROGRAM)[-1].start > 900_000


def test_two_downloads_of_a_set_at_once(
    hub: HubServer, run: Run, environment: dict[str, str], models: Path, published: Path, arrives: Check
) -> None:
    hub.fault(PROGRAM, hold_after=1_000_000, times=1)
    first = process(environment, arguments_for(models))
    hub.wait_until_held()
    status, _, err = run(*arguments_for(models))
    assert (status, "is being downloaded by another process: wait for it" in err) == (1, True)
    hub.heal()
    assert first.wait(SECONDS) == 0
    assert contents(models / NAME) == contents(published)
    arrives()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set.*unset HF_HUB_OFFLINE"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "the connection to http://127.0.0.1:9 failed.*check the network"),
    ],
)
def test_no_network(
    changed: dict[str, str], message: str, environment: dict[str, str], models: Path, arrives: Check
) -> None:
    child = process({**environment, **changed}, arguments_for(models))
    _, err = child.communicate(timeout=SECONDS)
    assert child.returncode == 1
    assert re.search(message, err), err
    assert not models.exists()
    arrives()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_the_disk_fills_up_while_downloading(
    hub: HubServer, run: Run, models: Path, arrives: Check, nothing_there: Check
) -> None:
    """The part goes to /dev/full, which takes no byte, as a full disk does."""
    hub.fault(PROGRAM, cut_after=0)
    assert run(*arguments_for(models))[0] == 1
    hub.heal()
    [part] = models.rglob("*.part")
    part.unlink()
    part.symlink_to("/dev/full")
    status, _, err = run(*arguments_for(models))
    assert (status, f"the disk of {models} is full: free space, then run the same command again" in err) == (1, True)
    nothing_there()
    part.unlink()
    arrives()


def test_a_file_system_that_takes_no_large_files(
    environment: dict[str, str], models: Path, arrives: Check, nothing_there: Check
) -> None:
    limit = 2_000_000
    child = process(
        environment, arguments_for(models), preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    )
    _, err = child.communicate(timeout=SECONDS)
    assert (child.returncode, f"the file system of {models} takes no file this large" in err) == (1, True)
    nothing_there()
    arrives()


def test_a_folder_that_cannot_be_written(run: Run, models: Path, arrives: Check) -> None:
    models.parent.write_text("a file in the way")
    status, _, err = run(*arguments_for(models))
    assert (status, "cannot write to " in err, "choose another --to" in err) == (1, True, True)
    models.parent.unlink()
    arrives()
