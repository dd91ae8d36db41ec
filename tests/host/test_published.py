"""A model set as it is published, wherever it is kept, and what is told of one that lacks something."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from coreai_rgba_image.host.cli import MODELS_VARIABLE
from coreai_rgba_image.host.cli.sets import choose
from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.denoiser import Shortcuts
from coreai_rgba_image.host.model_set import ModelSet, find_model_sets
from coreai_rgba_image.host.pipeline import Event, generate
from coreai_rgba_image.host.published import command_for, hub_name, hub_snapshot
from coreai_rgba_image.host.sampling import Settings

from .published_set import COMMIT, DIT, ENCODER, LAYOUTS, REPOSITORY, in_hub_cache

PROMPT = "a red apple"
NAMES = {"plain": "plain", "a link": "linked", "the hub's cache": REPOSITORY, "with junk": "with junk"}


def picture_of(model: ModelSet, report: Callable[[Event], object] = lambda event: None) -> np.ndarray:
    return generate(model, PROMPT, 192, 128, Settings(1), seed=5, report=report)


@pytest.fixture(scope="module")
def picture(tiny_set: Path) -> np.ndarray:
    """What the exported set draws by the function ``main`` alone."""
    settings = Settings(1, shortcuts=Shortcuts(text_reuse="off"))
    return generate(ModelSet(tiny_set), PROMPT, 192, 128, settings, seed=5)


@pytest.fixture
def own_set(published_set: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(published_set, tmp_path / "disk" / "own"))


def test_roles_limits_and_sizes_are_read_from_the_graphs(published_set: Path) -> None:
    model = ModelSet(published_set)
    assert (model.text_encoder.path.name, model.dit.path.name) == (ENCODER, DIT)
    assert list(model.vae_decoders) == [(128, 192), (144, 176), (256, 256)]
    assert list(model.dit.functions) == ["main"]
    assert model.dit.metadata == {}
    assert model.dit.spec.limits == {"L": (8, 512), "N": (64, 4096)}
    assert model.licence == "FOR RESEARCH"


def test_names_do_not_matter(published_set: Path, tmp_path: Path, picture: np.ndarray) -> None:
    (tmp_path / "set").mkdir()
    for number, entry in enumerate(sorted(published_set.iterdir(), reverse=True)):
        name = f"{number}.aimodel" if entry.suffix == ".aimodel" else entry.name
        (tmp_path / "set" / name).symlink_to(entry)
    assert np.array_equal(picture_of(ModelSet(tmp_path / "set")), picture)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_picture_wherever_the_set_is(
    published_set: Path, tmp_path: Path, picture: np.ndarray, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    folder = LAYOUTS[layout](published_set, tmp_path)
    found = find_model_sets([tmp_path])
    assert list(found) == [NAMES[layout]]
    assert np.array_equal(picture_of(found[NAMES[layout]]), picture)
    assert np.array_equal(picture_of(choose(str(folder))), picture)
    monkeypatch.setenv(MODELS_VARIABLE, str(tmp_path))
    assert choose(NAMES[layout]).path == found[NAMES[layout]].path


def test_another_disk_draws_the_same_picture(published_set: Path, tmp_path: Path, picture: np.ndarray) -> None:
    disk = Path("/dev/shm")
    if not disk.is_dir() or disk.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second disk here")
    copied = disk / f"coreai-rgba-tests-{os.getpid()}"
    try:
        assert np.array_equal(picture_of(ModelSet(Path(shutil.copytree(published_set, copied)))), picture)
    finally:
        shutil.rmtree(copied, ignore_errors=True)


@pytest.mark.parametrize("stage", ["encode", "sample"])
def test_a_disk_unplugged_in_a_run_is_told_and_the_next_run_draws(
    own_set: Path, tmp_path: Path, picture: np.ndarray, stage: str
) -> None:
    disk, elsewhere = own_set.parent, tmp_path / "unplugged"

    def unplug(event: Event) -> None:
        if event.stage == stage and disk.exists():
            disk.rename(elsewhere)

    with pytest.raises(ContractError, match=r"own.* is gone: connect its disk again"):
        picture_of(ModelSet(own_set), unplug)
    with pytest.raises(ContractError, match=r"own.* is gone: connect its disk again"):
        picture_of(ModelSet(own_set))
    with pytest.raises(ContractError, match=r"no folder .*own: if it is on another disk, connect that disk"):
        choose(str(own_set))
    assert find_model_sets([disk]) == {}
    elsewhere.rename(disk)
    assert np.array_equal(picture_of(choose(str(own_set))), picture)


def test_a_repository_of_the_hub_is_its_newest_revision(published_set: Path, tmp_path: Path) -> None:
    repository = in_hub_cache(published_set, tmp_path)
    assert hub_snapshot(repository) == repository / "snapshots" / COMMIT
    assert list(find_model_sets([repository])) == [REPOSITORY], "its own folder may be a folder of model sets too"
    older, newer = (repository / "snapshots" / name for name in ("0" * 40, COMMIT))
    (repository / "refs" / "main").unlink()  # as after a download of a commit by its hash
    os.utime(older, (2e9, 2e9))
    assert hub_snapshot(repository) == older
    (repository / "refs" / "main").write_text("../../..", encoding="utf-8")
    assert hub_snapshot(repository) == older, "a name that is not there, and surely no path"
    (repository / "refs" / "main").write_text(f"{COMMIT}\n", encoding="utf-8")
    assert hub_snapshot(repository) == newer
    assert hub_snapshot(newer) == newer
    shutil.rmtree(repository / "snapshots")
    assert find_model_sets([tmp_path]) == {}


def test_one_content_of_two_files_is_one_blob(published_set: Path, tmp_path: Path) -> None:
    """All bundles have the same metadata, so their files are links to one: nothing may be remembered by that."""
    snapshot = hub_snapshot(in_hub_cache(published_set, tmp_path))
    assert len({(bundle / "metadata.json").resolve() for bundle in snapshot.glob("*.aimodel")}) == 1
    model = ModelSet(snapshot)
    assert len({bundle.sha256 for bundle in model.bundles}) == 5


@pytest.mark.parametrize(
    ("folder", "name"), [("models--a--b", "a/b"), ("models--b", "b"), ("models--a--b-c.d", "a/b-c.d"), ("own", "own")]
)
def test_names_of_the_hub(folder: str, name: str) -> None:
    assert hub_name(folder) == name


def overwrite(name: str, content: str | bytes | None) -> Callable[[Path], object]:
    """Change a file of a set, or remove it."""
    if content is None:
        return lambda folder: (folder / name).unlink()
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def change_json(name: str, **changes: object) -> Callable[[Path], object]:
    """Change values of a JSON file; ``None`` removes one."""

    def change(folder: Path) -> None:
        values = json.loads((folder / name).read_text(encoding="utf-8")) | changes
        kept = {key: value for key, value in values.items() if value is not None}
        (folder / name).write_text(json.dumps(kept), encoding="utf-8")

    return change


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "config of another model": (
        change_json("config.json", context_in_dim=4096),
        r"config.json describes another model: context_in_dim is 4096, qi21_dit.* has 64",
    ),
    "config that is no config": (overwrite("config.json", "[]"), "config.json holds no JSON object"),
    "config cut short": (overwrite("config.json", '{"num_lay'), "config.json is not JSON"),
    "no tokenizer": (overwrite("tokenizer/tokenizer.json", None), "no tokenizer at .*tokenizer"),
    "a tokenizer that is none": (overwrite("tokenizer/tokenizer.json", "{}"), "is not a tokenizer"),
    "scheduler without a key": (
        change_json("host/scheduler.json", max_shift=None, steps=None), "scheduler.json lacks max_shift, steps",
    ),
    "scheduler of text": (change_json("host/scheduler.json", base_shift="a"), "base_shift is 'a': it must be a number"),
    "a short RoPE table": (overwrite("host/rope_axis1_sin.f32", bytes(8)), "rope_axis1_sin.f32 has 8 bytes, a table"),
    "a RoPE table too few": (overwrite("host/rope_axis2_cos.f32", None), "rope_axis2_cos.f32 is missing"),
    "a damaged DiT": (overwrite(f"{DIT}/main.mlirb", bytes(5000)), f"{DIT}.* is damaged"),
    "an unfinished encoder": (overwrite(f"{ENCODER}/main.mlirb", None), f"{ENCODER} has no main.mlirb"),
    "no DiT": (lambda folder: shutil.rmtree(folder / DIT), "holds no DiT bundle"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_ends_in_the_command_that_mends_it(
    own_set: Path, published_set: Path, picture: np.ndarray, fault: str
) -> None:
    damage, message = FAULTS[fault]
    damage(own_set)
    with pytest.raises(ContractError, match=message) as caught:
        picture_of(ModelSet(own_set))
    command = f"coreai-rgba download own --to {own_set.parent} --accept-license"
    assert str(caught.value).endswith(f"To get it again: {command}")
    shutil.rmtree(own_set)
    shutil.copytree(published_set, own_set)
    assert np.array_equal(picture_of(ModelSet(own_set)), picture)


def test_what_is_not_needed_need_not_be_whole(own_set: Path, picture: np.ndarray) -> None:
    (own_set / "qi21_vae_1024_fp32.aimodel" / "main.mlirb").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    model = ModelSet(own_set)
    assert np.array_equal(picture_of(model), picture)
    [error] = model.errors()
    assert "git lfs pull" in str(error)
    with pytest.raises(ContractError, match=r"no VAE decoder for 176x144 .*Not read: .*1024.*git lfs pull"):
        model.vae_decoder(9, 11)


@contextmanager
def as_an_ordinary_user() -> Iterator[None]:
    """Root may read everything."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize(
    "name", ["", ENCODER, f"{DIT}/main.mlirb", f"{DIT}/main.hash", "host", "tokenizer", "config.json"]
)
def test_what_may_not_be_read_is_told_and_how_to_allow_it(published_set: Path, picture: np.ndarray, name: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(shutil.copytree(published_set, Path(temporary) / "own"))
        Path(temporary).chmod(0o755)
        mode = (folder / name).stat().st_mode
        (folder / name).chmod(0)
        message = r"may not be read: allow it with chmod -R u\+rX .*/own|cannot read .*Permission denied"
        with as_an_ordinary_user(), pytest.raises(ContractError, match=message):
            picture_of(ModelSet(folder))
        (folder / name).chmod(mode)
        assert np.array_equal(picture_of(ModelSet(folder)), picture)


def test_a_folder_that_may_not_be_read_hides_no_other() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        for name in ("closed", "open"):
            (Path(temporary) / name / "a.aimodel").mkdir(parents=True)
        (Path(temporary) / "link").symlink_to(Path(temporary) / "closed" / "a.aimodel")
        Path(temporary).chmod(0o755)
        (Path(temporary) / "closed").chmod(0)
        with as_an_ordinary_user():
            assert list(find_model_sets([temporary])) == ["open"]
        (Path(temporary) / "closed").chmod(0o755)


def test_two_decoders_of_a_size_are_one_too_many(own_set: Path) -> None:
    (own_set / "another.aimodel").symlink_to(own_set / "qi21_vae_256_fp32.aimodel")
    with pytest.raises(ContractError, match=r"two VAE decoders for 256x256 pixels, another.* and qi21.*: keep one"):
        picture_of(ModelSet(own_set))


def test_each_set_is_mended_by_the_command_that_made_it(own_set: Path, published_set: Path, tmp_path: Path) -> None:
    to = own_set.parent
    assert command_for(own_set, "dit") == f"coreai-rgba download own --to {to} --accept-license"
    assert command_for(own_set, "vae --size 512x512") == f"coreai-rgba download own --to {to} --accept-license"
    assert command_for(own_set, "vae --size 384x256").startswith("coreai-rgba export "), "no such size is published"
    (own_set / "download.json").write_text('{"repository": "other/port", "revision": "1"}', encoding="utf-8")
    assert "--repo other/port --accept-license" in command_for(own_set, "dit")
    snapshot = hub_snapshot(in_hub_cache(published_set, tmp_path))
    (tmp_path / "link").symlink_to(snapshot)
    for path in (snapshot, tmp_path / "link"):
        assert command_for(path, "dit") == (
            f"hf download {REPOSITORY} --cache-dir {tmp_path} --include 'qi21_dit_*' --force-download"
        )
    exported = tmp_path / "it's mine"
    assert command_for(exported, "dit") == (
        f"coreai-rgba export --checkpoint CHECKPOINT --out '{tmp_path}/it'\"'\"'s mine' dit"
    )
