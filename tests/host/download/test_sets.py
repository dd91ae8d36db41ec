"""What a download does with a set that is there already, with repositories that are odd, and as a library."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import huggingface_hub.constants
import pytest

from coreai_rgba_image.host import hub as hub_module
from coreai_rgba_image.host.cli import MODELS_VARIABLE
from coreai_rgba_image.host.cli.download import default_folder
from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.download import NAME, DownloadRequest, LicenceError, Progress, download
from coreai_rgba_image.host.hub import import_hub
from coreai_rgba_image.host.published import DOWNLOAD_RECORD

from ..hub_server import Entry, HubServer
from .runs import DIT, LICENCE, PROGRAM, REPOSITORY, VAE, Run, arguments_for, contents, flipped

Check = Callable[[], None]


def stamps(folder: Path, *but: str) -> dict[str, tuple[int, int]]:
    """Which file each is, and when it was written: unchanged if nobody touched it."""
    files = {path.relative_to(folder).as_posix(): path.stat() for path in folder.rglob("*") if path.is_file()}
    return {name: (status.st_ino, status.st_mtime_ns) for name, status in files.items() if name not in but}


def test_what_is_missing_or_changed_in_a_set_is_fetched_and_the_rest_not_touched(
    hub: HubServer, run: Run, models: Path, published: Path, arrives: Check
) -> None:
    arrives()
    own = models / NAME
    compiled = own / "aot" / "x" / "x.h16c.aimodelc"
    compiled.parent.mkdir(parents=True)
    compiled.write_text("somebody's own")
    (own / PROGRAM).write_bytes(flipped((own / PROGRAM).read_bytes()))
    shutil.rmtree(own / VAE)
    before = stamps(own, PROGRAM)
    hub.requests.clear()
    status, _, err = run(*arguments_for(models))
    assert (status, err) == (0, "")
    assert {request.file for request in hub.requests} == {
        "",
        PROGRAM,
        *(f"{VAE}/{name}" for name in contents(published / VAE)),
    }
    assert contents(own) == {**contents(published), "aot/x/x.h16c.aimodelc": b"somebody's own"}
    assert before.items() <= stamps(own).items()


def test_a_repair_that_fails_leaves_the_set_as_it_was(hub: HubServer, run: Run, models: Path, arrives: Check) -> None:
    arrives()
    own = models / NAME
    (own / VAE / "main.hash").unlink()
    (own / PROGRAM).unlink()
    before = stamps(own)
    hub.fault(PROGRAM, change=flipped)
    assert run(*arguments_for(models))[0] == 1
    assert stamps(own) == before
    hub.heal()
    arrives()


def test_a_set_fetched_by_other_means_is_taken_as_it_is(
    hub: HubServer, run: Run, models: Path, published: Path, arrives: Check
) -> None:
    shutil.copytree(published, models / NAME)
    (models / NAME / ".gitattributes").unlink()
    before = stamps(models / NAME)
    arrives()
    assert [request.file for request in hub.requests] == [""]
    assert stamps(models / NAME, DOWNLOAD_RECORD) == before


@pytest.mark.parametrize("name", ["own.aimodel", DOWNLOAD_RECORD])
def test_another_set_of_that_name_is_left_alone(name: str, run: Run, models: Path, arrives: Check) -> None:
    own = models / NAME / name
    own.parent.mkdir(parents=True)
    own.write_text('{"repository": "some/other", "revision": "1"}')
    status, _, err = run(*arguments_for(models))
    assert (status, "choose another NAME, or remove what is there" in err) == (1, True)
    assert [path.name for path in models.rglob("*")] == [NAME, name]
    shutil.rmtree(models / NAME)
    arrives()


@pytest.mark.parametrize("text", ["", "{}", "[]"])
def test_a_damaged_record(text: str, run: Run, models: Path, arrives: Check) -> None:
    arrives()
    record = models / NAME / DOWNLOAD_RECORD
    record.write_text(text)
    status, _, err = run(*arguments_for(models))
    assert (status, f"{record} is damaged" in err, "remove it" in err) == (1, True, True)
    record.unlink()
    arrives()


def test_a_file_or_a_dead_link_in_the_way(run: Run, models: Path, arrives: Check, tmp_path: Path) -> None:
    models.mkdir(parents=True)
    (models / NAME).write_text("in the way")
    status, _, err = run(*arguments_for(models))
    assert (status, "is a file, so no model set can be there" in err) == (1, True)
    (models / NAME).unlink()
    (models / NAME).symlink_to(tmp_path / "unplugged" / "set")
    status, _, err = run(*arguments_for(models))
    assert (status, "connect that disk, or remove the link" in err) == (1, True)
    assert not (tmp_path / "unplugged").exists()
    (models / NAME).unlink()
    arrives()


def test_a_link_leads_to_the_disk_that_the_set_goes_to(run: Run, models: Path, published: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    (disk / "set").mkdir(parents=True)
    models.mkdir(parents=True)
    (models / NAME).symlink_to(disk / "set")
    assert run(*arguments_for(models))[0] == 0
    assert (models / NAME).is_symlink()
    assert contents(disk / "set") == contents(published)
    assert [path.name for path in disk.iterdir()] == ["set"]


def test_what_is_left_of_another_choice_does_not_become_part_of_the_set(
    hub: HubServer, run: Run, models: Path, published: Path, tmp_path: Path
) -> None:
    hub.fault(PROGRAM, cut_after=0)
    assert run(*arguments_for(models))[0] == 1
    staging = models / f".download-{NAME}"
    (staging / "old.aimodel").mkdir()
    (staging / "old.aimodel" / "main.mlirb").write_text("of an older revision")
    hub.heal()
    newer = shutil.copytree(published, tmp_path / "newer")
    (newer / "NOTICE").write_text("Built with Qwen.\n")
    commit = hub.commit(newer)
    assert run(*arguments_for(models, "--revision", "main"))[0] == 0
    assert contents(models / NAME) == contents(newer)
    assert commit in (models / NAME / DOWNLOAD_RECORD).read_text()


def test_only_the_decoders_of_the_sizes_asked_for(
    hub: HubServer, run: Run, models: Path, published: Path, tmp_path: Path, arrives: Check
) -> None:
    more = shutil.copytree(published, tmp_path / "more")
    for size in ("384x256", "1024"):
        shutil.copytree(more / VAE, more / VAE.replace("256", size))
    hub.commit(more)
    status, _, err = run(*arguments_for(models, "--sizes", "256,512"))
    assert (status, "no VAE decoder of size 512: choose from 256, 1024, 384x256" in err) == (1, True)
    assert run(*arguments_for(models, "--sizes", "256"))[0] == 0
    assert contents(models / NAME) == contents(published)
    before = stamps(models / NAME)
    assert run(*arguments_for(models, "--sizes", "256,1024"))[0] == 0
    assert (models / NAME / VAE.replace("256", "1024")).is_dir()
    assert not (models / NAME / VAE.replace("256", "384x256")).exists()
    assert before.items() <= stamps(models / NAME).items()


@pytest.mark.parametrize("name", ["../outside", "/outside", "a/../../outside", "a\\..\\outside", "C:outside"])
def test_a_repository_cannot_write_outside_its_folder(
    name: str, hub: HubServer, run: Run, models: Path, arrives: Check, tmp_path: Path
) -> None:
    hub.commits[hub.main][name] = Entry(b"somewhere else")
    status, _, err = run(*arguments_for(models))
    assert (status, "would leave its folder: refused" in err) == (1, True)
    assert list(tmp_path.iterdir()) == []
    hub.forget()
    arrives()


def test_a_repository_without_bundles_is_no_model_set(hub: HubServer, run: Run, models: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.safetensors").write_bytes(b"weights")
    hub.commit(tmp_path / "other")
    status, _, err = run(*arguments_for(models))
    assert (status, "holds no .aimodel bundle, so it is no model set: check --repo" in err) == (1, True)


def test_a_bundle_that_was_published_damaged_does_not_become_a_set(
    hub: HubServer, run: Run, models: Path, published: Path, tmp_path: Path, nothing_there: Check, arrives: Check
) -> None:
    broken = shutil.copytree(published, tmp_path / "broken")
    (broken / PROGRAM).write_bytes(flipped((broken / PROGRAM).read_bytes()))
    first, bad = hub.main, hub.commit(broken)
    status, _, err = run(*arguments_for(models, "--revision", bad))
    assert (status, f"{DIT} is as " in err, "choose another --revision" in err) == (1, True, True)
    nothing_there()
    assert run(*arguments_for(models, "--revision", first))[0] == 0
    arrives()


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a\\b", "C:"])
def test_a_name_that_cannot_be_a_folder_of_model_sets(name: str, tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="cannot be the name of a model set: give one without slashes"):
        DownloadRequest(tmp_path, name)


def test_the_folder_is_the_first_that_commands_look_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODELS_VARIABLE, f"{tmp_path / 'a'}:{tmp_path / 'b'}")
    assert default_folder() == tmp_path / "a"
    monkeypatch.delenv(MODELS_VARIABLE)
    with pytest.raises(ContractError, match=f"with --to, or set {MODELS_VARIABLE}"):
        default_folder()


@pytest.mark.parametrize("version", ["", "0.36.0", "2.4.0"])
def test_without_huggingface_hub_or_with_another_one(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if version:
        monkeypatch.setattr("huggingface_hub.__version__", version)
    else:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ContractError, match="pip install 'huggingface_hub>=1,<2'"):
        import_hub()


@pytest.fixture
def request_here(hub: HubServer, models: Path, monkeypatch: pytest.MonkeyPatch) -> DownloadRequest:
    """A request in this process, where huggingface_hub was imported before the server had an address."""
    template = hub.url + huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(
        huggingface_hub.constants.ENDPOINT
    )
    for constant, value in (
        ("ENDPOINT", hub.url), ("HUGGINGFACE_CO_URL_TEMPLATE", template), ("HF_HUB_OFFLINE", False)
    ):  # fmt: skip
        monkeypatch.setattr(huggingface_hub.constants, constant, value)
    monkeypatch.setattr(hub_module, "FIRST_WAIT", 0)
    return DownloadRequest(models, repository=REPOSITORY, accept_license=True)


def test_progress_grows_to_the_bytes_of_the_set_also_over_a_cut(
    request_here: DownloadRequest, hub: HubServer, published: Path
) -> None:
    told: list[Progress] = []
    hub.fault(PROGRAM, cut_after=1_000_000, times=1)
    assert download(request_here, told.append) == request_here.path
    total = sum(len(content) for content in contents(published).values())
    done = [progress.done for progress in told]
    assert done == sorted(done)
    assert (done[0], done[-1], {progress.total for progress in told}) == (0, total, {total})
    assert {progress.stage for progress in told} == {"fetch", "check"}


def test_raising_from_the_report_cancels_and_the_next_call_goes_on(
    request_here: DownloadRequest, hub: HubServer, nothing_there: Check, arrives: Check
) -> None:
    class Cancelled(Exception):  # noqa: N818
        """What a caller raises."""

    def cancel(progress: Progress) -> None:
        if progress.file == PROGRAM and progress.done > 2_000_000:
            raise Cancelled

    with pytest.raises(Cancelled):
        download(request_here, cancel)
    nothing_there()
    arrives()
    assert hub.asked(PROGRAM)[-1].start > 1_000_000


def test_the_licence_is_handed_to_who_asks(request_here: DownloadRequest, models: Path) -> None:

    with pytest.raises(LicenceError) as caught:
        download(DownloadRequest(models, repository=REPOSITORY))
    assert caught.value.text == LICENCE
