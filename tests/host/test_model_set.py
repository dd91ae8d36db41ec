"""Finding model sets and telling what each holds."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from coreai_rgba_image.host.bundle import DamagedBundleError
from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.latents import QWEN_IMAGE_21
from coreai_rgba_image.host.model_set import ModelSet, choose_model_set, find_model_sets
from coreai_rgba_image.host.rope import axis_tables
from coreai_rgba_image.host.schedule import SchedulerConfig

ENCODER = "qi21_encoder_dynL_w16a32_ids_iofp32.aimodel"
DIT = "qi21_dit_full_w16a32_dyn_iofp32.aimodel"


@pytest.fixture
def own_set(tiny_set: Path, tmp_path: Path) -> Path:
    """A copy of the tiny set to change; its bundles are links."""
    own = tmp_path / "own"
    own.mkdir()
    for entry in tiny_set.iterdir():
        if entry.suffix == ".aimodel":
            (own / entry.name).symlink_to(entry)
        elif entry.is_dir():
            shutil.copytree(entry, own / entry.name)
    return own


def make_set(folder: Path) -> Path:
    """Enough to be listed: listing looks at names only."""
    (folder / "dit.aimodel").mkdir(parents=True)
    return folder


def test_a_set_tells_what_it_holds(tiny_set: Path) -> None:
    model = ModelSet(tiny_set)
    assert (model.text_encoder.path.name, model.dit.path.name) == (ENCODER, DIT)
    assert list(model.vae_decoders) == [(128, 192), (144, 176), (256, 256)]
    assert model.vae_decoder(8, 12).path.name == "qi21_vae_192x128_fp32.aimodel"
    assert model.dit.spec.inputs[1].shape == (1, "L", 64)
    assert model.tokenizer.encode("hello").drop_idx > 0
    assert model.scheduler_config == SchedulerConfig()
    assert model.latent_statistics == QWEN_IMAGE_21


def test_a_size_without_a_decoder_lists_the_sizes_and_the_command(tiny_set: Path) -> None:
    message = (
        f"no VAE decoder for 128x192 pixels in {tiny_set}; it has: 192x128, 176x144, 256x256. "
        "Choose one of these sizes, or draw it from tiles: 'tiled' in Core AI RGBA Decode, --tiled on the command "
        "line. To make it from the checkpoint: "
        f"coreai-rgba export --checkpoint CHECKPOINT --out {tiny_set} vae --size 128x192"
    )
    with pytest.raises(ContractError) as caught:
        ModelSet(tiny_set).vae_decoder(12, 8)
    assert str(caught.value) == message


@pytest.mark.parametrize(("name", "part", "kind"), [(ENCODER, "encoder", "text encoder"), (DIT, "dit", "DiT")])
def test_a_missing_bundle_is_named_with_the_command(own_set: Path, name: str, part: str, kind: str) -> None:
    (own_set / name).unlink()
    model = ModelSet(own_set)
    with pytest.raises(ContractError, match=f"holds no {kind} bundle.*coreai-rgba export .* {part}$"):
        _ = model.text_encoder if part == "encoder" else model.dit


def test_two_bundles_of_a_kind_are_refused(own_set: Path) -> None:
    (own_set / "second.aimodel").symlink_to((own_set / DIT).resolve())
    with pytest.raises(ContractError, match=r"holds 2 DiT bundles.*keep one"):
        _ = ModelSet(own_set).dit


def test_a_damaged_bundle_is_named(own_set: Path) -> None:
    source = (own_set / DIT).resolve()
    (own_set / DIT).unlink()
    shutil.copytree(source, own_set / DIT)
    with (own_set / DIT / "main.mlirb").open("r+b") as program:
        program.seek(2000)
        program.write(b"damage")
    message = f"{DIT}.*damaged: download or export it again. To make it .*: coreai-rgba export .* dit$"
    with pytest.raises(DamagedBundleError, match=message):
        _ = ModelSet(own_set).dit


def test_hidden_bundles_are_not_part_of_a_set(own_set: Path) -> None:
    (own_set / f"._{DIT}").write_bytes(b"left behind by macOS")
    assert ModelSet(own_set).dit.path.name == DIT


def test_a_sets_scheduler_json_overrides_the_defaults(own_set: Path) -> None:
    path = own_set / "host" / "scheduler.json"
    path.write_text(json.dumps({"max_shift": 1.15, "shift_terminal": 0.1}), encoding="utf-8")
    assert ModelSet(own_set).scheduler_config == SchedulerConfig(max_shift=1.15, shift_terminal=0.1)
    path.unlink()
    assert ModelSet(own_set).scheduler_config == SchedulerConfig()


def test_a_sets_rope_tables_are_used_checked_and_equal_the_computed_ones(own_set: Path) -> None:
    tables = ModelSet(own_set).rope_tables
    assert tables is not None
    for read, computed in zip(tables, axis_tables(), strict=True):
        assert np.array_equal(read, computed)
    (own_set / "host" / "rope_axis1_sin.f32").write_bytes(b"short")
    with pytest.raises(ContractError, match=r"rope_axis1_sin.f32 has 5 bytes, a table has 1032192"):
        _ = ModelSet(own_set).rope_tables
    shutil.rmtree(own_set / "host")
    assert ModelSet(own_set).rope_tables is None


def test_a_set_without_a_tokenizer_says_so(own_set: Path) -> None:
    shutil.rmtree(own_set / "tokenizer")
    with pytest.raises(ContractError, match=r"no tokenizer at .*a model set needs tokenizer/tokenizer.json"):
        _ = ModelSet(own_set).tokenizer


def test_the_fingerprint_changes_with_any_file(own_set: Path) -> None:
    model = ModelSet(own_set)
    seen = {model.fingerprint}
    assert model.fingerprint in seen
    for path in (own_set / "host" / "scheduler.json", own_set / "tokenizer" / "tokenizer.json"):
        path.write_text("{}", encoding="utf-8")
        assert model.fingerprint not in seen
        seen.add(model.fingerprint)
    source = (own_set / DIT).resolve()
    (own_set / DIT).unlink()
    shutil.copytree(source, own_set / DIT)
    seen.add(model.fingerprint)
    os.utime(own_set / DIT / "main.mlirb", ns=(1, 1))
    assert model.fingerprint not in seen


def test_the_fingerprint_does_not_see_what_macos_leaves_behind(own_set: Path) -> None:
    before = ModelSet(own_set).fingerprint
    for name in ("host/._scheduler.json", "tokenizer/.DS_Store", f"._{DIT}"):
        (own_set / name).write_bytes(b"junk")
    assert ModelSet(own_set).fingerprint == before
    (own_set / "host" / "broken").symlink_to("nowhere")
    assert ("host/broken", -1, -1) in ModelSet(own_set).fingerprint


def test_sets_are_found_by_their_relative_name(tmp_path: Path) -> None:
    for name in ("one", "maker/two", "maker/deep/er/three", "with spaces é"):
        make_set(tmp_path / name)
    (tmp_path / "empty").mkdir()
    make_set(tmp_path / ".hidden")
    found = find_model_sets([tmp_path])
    assert list(found) == ["maker/deep/er/three", "maker/two", "one", "with spaces é"]
    assert found["maker/two"].path == tmp_path / "maker" / "two"


def test_the_first_folder_wins_and_missing_ones_have_no_sets(tmp_path: Path) -> None:
    make_set(tmp_path / "a" / "same")
    make_set(tmp_path / "b" / "same")
    make_set(tmp_path / "b" / "other")
    found = find_model_sets([tmp_path / "unplugged", tmp_path / "a", tmp_path / "b"])
    assert {name: model.path for name, model in found.items()} == {
        "other": tmp_path / "b" / "other",
        "same": tmp_path / "a" / "same",
    }


def test_symlinks_are_followed_and_loops_end(tmp_path: Path) -> None:
    make_set(tmp_path / "disk" / "far")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "linked").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "back").symlink_to(tmp_path / "models")
    (tmp_path / "models" / "broken").symlink_to(tmp_path / "nowhere")
    assert list(find_model_sets([tmp_path / "models"])) == ["linked/far"]


def test_a_set_that_is_itself_a_link_is_found(tmp_path: Path) -> None:
    make_set(tmp_path / "disk" / "far")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "near").symlink_to(tmp_path / "disk" / "far")
    assert list(find_model_sets([tmp_path / "models"])) == ["near"]


def test_two_links_to_one_set_are_both_listed(tmp_path: Path) -> None:
    make_set(tmp_path / "models" / "real")
    (tmp_path / "models" / "alias").symlink_to(tmp_path / "models" / "real")
    assert list(find_model_sets([tmp_path / "models"])) == ["alias", "real"]


def test_bundles_loose_in_the_folder_are_no_set(tmp_path: Path) -> None:
    make_set(tmp_path)
    make_set(tmp_path / "proper")
    assert list(find_model_sets([tmp_path])) == ["proper"]


def test_a_new_set_appears_when_asked_again(tmp_path: Path) -> None:
    assert find_model_sets([tmp_path]) == {}
    make_set(tmp_path / "new")
    assert list(find_model_sets([tmp_path])) == ["new"]


@pytest.mark.parametrize("name", ["", "../one", "/etc", "two", "one/.."])
def test_only_found_names_can_be_chosen(tmp_path: Path, name: str) -> None:
    make_set(tmp_path / "one")
    sets = find_model_sets([tmp_path])
    assert choose_model_set("one", sets).path == tmp_path / "one"
    with pytest.raises(ContractError, match=r"no model set is called .*: there are 'one'"):
        choose_model_set(name, sets)
    with pytest.raises(ContractError, match="there are none"):
        choose_model_set(name, {})
