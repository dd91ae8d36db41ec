"""Prompts encoded through the cache: never other numbers than the encoder's, and no exception of the cache's own."""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coreai_rgba_image.host import prompt, prompt_cache, runtime
from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.files import cache_folder
from coreai_rgba_image.host.model_set import ModelSet
from coreai_rgba_image.host.pipeline import encode_prompt, encode_prompts
from coreai_rgba_image.host.prompt import PromptTokenizer, PromptTokens
from coreai_rgba_image.host.prompt_cache import DISK_VARIABLE, MEMORY_VARIABLE, DiskCache, Entry, MemoryCache

PROMPT = "a red apple on a wooden table"
DRAW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def model(tiny_set: Path) -> ModelSet:
    return ModelSet(tiny_set)


@pytest.fixture
def folder() -> Path:
    return cache_folder() / "prompts"


@pytest.fixture
def restart(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """What is in memory goes, as when the process ends."""
    return lambda: monkeypatch.setattr(prompt_cache, "_memory", MemoryCache())


@pytest.fixture(autouse=True)
def _nothing_kept(restart: Callable[[], None], folder: Path) -> Iterator[None]:
    restart()
    remove(folder)
    yield
    remove(folder)


def remove(path: Path) -> None:
    path.unlink() if path.is_file() else shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of the bundles that are loaded, in order."""
    kinds: list[str] = []
    load = runtime.load

    def noting(bundle: Any) -> Any:
        kinds.append(bundle.spec.kind)
        return load(bundle)

    monkeypatch.setattr(runtime, "load", noting)
    return kinds


def uncached(model: ModelSet, text: str) -> np.ndarray:
    """What the encoder itself says, without any of the cache's code."""
    tokens = model.tokenizer.encode(text)
    with runtime.load(model.text_encoder) as encoder:
        return encoder(input_ids=tokens.ids)["hidden"][:, tokens.drop_idx :]


def numbers(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def same_bits(first: np.ndarray, second: np.ndarray) -> bool:
    return (first.dtype, first.shape, first.tobytes()) == (second.dtype, second.shape, second.tobytes())


# What is found


@pytest.mark.parametrize("text", [PROMPT, "", "🍎\r\n一只 {}", "word " * 100])
def test_a_prompt_is_encoded_once_and_its_numbers_stay_the_same(
    model: ModelSet, loaded: list[str], restart: Callable[[], None], text: str
) -> None:
    results = [encode_prompt(model, text), encode_prompt(model, text)]
    restart()
    results.append(encode_prompt(model, text))
    results.append(encode_prompt(ModelSet(model.path), text))
    assert loaded == ["text encoder"]
    expected = uncached(model, text)
    assert all(same_bits(result, expected) for result in results)


def test_only_prompts_that_are_missing_are_encoded_and_each_once(
    model: ModelSet, loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    call = runtime.LoadedGraph.__call__

    def noting(graph: Any, **inputs: Any) -> Any:
        encoded.append(inputs["input_ids"].shape[1])
        return call(graph, **inputs)

    monkeypatch.setattr(runtime.LoadedGraph, "__call__", noting)
    encode_prompts(model, ["one", "two", "one"])
    assert (len(loaded), len(encoded)) == (1, 2)
    results = encode_prompts(model, ["three", "two", "four 4", "three"])
    assert (len(loaded), len(encoded)) == (2, 4)
    for text, result in zip(["three", "two", "four 4", "three"], results, strict=True):
        assert same_bits(result, uncached(model, text))
    assert encode_prompts(model, []) == []


def test_a_caller_that_writes_into_its_array_changes_nobody_elses(model: ModelSet, restart: Callable[[], None]) -> None:
    expected = uncached(model, PROMPT)
    for source in ("encoder", "memory", "disk", "memory"):
        if source == "disk":
            restart()
        first, second = encode_prompts(model, [PROMPT, PROMPT])
        assert same_bits(first, expected)
        first[:] = 7
        assert same_bits(second, expected)


def test_a_prompt_that_is_found_in_memory_stays_young_on_disk(model: ModelSet, folder: Path) -> None:
    encode_prompt(model, PROMPT)
    [file] = folder.iterdir()
    os.utime(file, (1, 1))
    encode_prompt(model, PROMPT)
    assert file.stat().st_mtime > 1


def edited_tokenizer(path: Path) -> None:
    """Two letters change places in the vocabulary."""
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["e"] = vocabulary["e"], vocabulary["a"]
    path.write_text(json.dumps(content), encoding="utf-8")


def test_another_tokenizer_or_template_is_another_entry(
    model: ModelSet, loaded: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in model.path.iterdir():
        if part.name != "tokenizer":
            (tmp_path / part.name).symlink_to(part)
    shutil.copytree(model.path / "tokenizer", tmp_path / "tokenizer")
    other = ModelSet(tmp_path)
    encode_prompt(model, PROMPT)
    encode_prompt(other, PROMPT)
    assert len(loaded) == 1  # the same encoder, the same ids: where the set lies does not matter
    edited_tokenizer(tmp_path / "tokenizer" / "tokenizer.json")
    result = encode_prompt(other, PROMPT)
    assert len(loaded) == 2
    assert same_bits(result, uncached(other, PROMPT))
    assert not np.array_equal(result, uncached(model, PROMPT))
    monkeypatch.setattr(prompt, "USER_PART", "<|im_start|>somebody\n")
    loaded.clear()
    assert same_bits(encode_prompt(model, PROMPT), uncached(model, PROMPT))
    assert len(loaded) == 2


def test_everything_that_shapes_the_numbers_is_in_the_key(model: ModelSet, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, tokens = model.text_encoder, PromptTokens(np.arange(40, dtype=np.int32)[None], 12)
    one_more = PromptTokens(np.arange(41, dtype=np.int32)[None], 12)
    other_id = PromptTokens(np.where(tokens.ids == 20, 21, tokens.ids), 12)
    keys = [Entry.of(bundle, tokens).key for tokens in (tokens, one_more, other_id, replace(tokens, drop_idx=13))]
    keys.append(Entry.of(replace(bundle, sha256="0" * 64), tokens).key)
    for module, name, value in (
        (prompt_cache, "version", lambda _: "1.0.0b2"),
        (prompt_cache.platform, "machine", lambda: "riscv64"),
        (prompt_cache.platform, "mac_ver", lambda: ("27.1", ("", "", ""), "")),
        (prompt_cache.sys, "platform", "darwin"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, value)
            keys.append(Entry.of(bundle, tokens).key)
    assert len(set(keys)) == len(keys) == 9
    assert Entry.of(ModelSet(model.path).text_encoder, PromptTokens(tokens.ids.copy(), 12)).key == keys[0]


@DRAW
@given(texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=60), max_size=6), data=st.data())
def test_any_texts_in_any_order_give_what_encode_gives(
    model: ModelSet, tiny_tokenizer: PromptTokenizer, restart: Callable[[], None], texts: list[str], data: st.DataObject
) -> None:
    def encode(missing: list[PromptTokens]) -> list[np.ndarray]:
        assert missing
        asked.extend(tokens.ids.tobytes() for tokens in missing)
        return [numbers(int(tokens.ids.sum()), (1, tokens.text_length, 64)) for tokens in missing]

    asked: list[bytes] = []
    tokenized = [tiny_tokenizer.encode(text) for text in texts]
    for _ in range(2):
        chosen = data.draw(st.permutations(tokenized))
        results = prompt_cache.embed(model.text_encoder, chosen, encode)
        expected = [numbers(int(tokens.ids.sum()), (1, tokens.text_length, 64)) for tokens in chosen]
        assert all(same_bits(*pair) for pair in zip(results, expected, strict=True))
        restart()
    assert len(set(asked)) == len(asked)


def test_the_text_is_not_written(model: ModelSet, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    encode_prompt(model, "xylophone quetzal")
    [file] = folder.iterdir()
    for word in (b"xylophone", b"quetzal"):
        assert word not in file.read_bytes()
        assert word.decode() not in file.name + caplog.text


# What is damaged


def packed(where: Entry, data: bytes) -> bytes:
    return prompt_cache._digest(where, data) + data


def flipped(content: bytes, position: int, bit: int = 0) -> bytes:
    return content[:position] + bytes([content[position] ^ 1 << bit]) + content[position + 1 :]


DAMAGES: dict[str, Callable[[Entry, bytes], bytes]] = {
    "empty": lambda where, content: b"",
    "truncated": lambda where, content: content[: len(content) // 2],
    "without its last number": lambda where, content: content[:-4],
    "one byte too long": lambda where, content: content + b"\0",
    "garbage": lambda where, content: np.random.default_rng(0).bytes(len(content)),
    "zeros": lambda where, content: bytes(len(content)),
    "a byte of the checksum flipped": lambda where, content: flipped(content, 5),
    "a byte of the numbers flipped": lambda where, content: flipped(content, len(content) // 2),
    "another shape": lambda where, content: packed(where, content[32 : 32 + 64 * 4]),
    "another dtype": lambda where, content: packed(where, np.frombuffer(content[32:], "f4").astype("f8").tobytes()),
    "half a number": lambda where, content: packed(where, content[32:-2]),
    "NaN": lambda where, content: packed(where, content[32:-4] + np.float32("nan").tobytes()),
    "infinity": lambda where, content: packed(where, content[32:-4] + np.float32("inf").tobytes()),
    "another prompt's": lambda where, content: packed(replace(where, key="0" * 64), content[32:]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_encoded_again_and_replaced(
    model: ModelSet, loaded: list[str], folder: Path, restart: Callable[[], None], caplog: Any, damage: str
) -> None:
    expected = encode_prompt(model, PROMPT)
    [file] = folder.iterdir()
    whole = file.read_bytes()
    damaged = DAMAGES[damage](Entry.of(model.text_encoder, model.tokenizer.encode(PROMPT)), whole)
    assert damaged != whole
    file.write_bytes(damaged)
    restart()
    assert same_bits(encode_prompt(model, PROMPT), expected)
    assert len(loaded) == 2
    [record] = caplog.records
    assert (record.levelname, str(file) in record.message) == ("WARNING", True)
    assert "encoded again" in record.message
    assert file.read_bytes() == whole
    restart()
    assert same_bits(encode_prompt(model, PROMPT), expected)
    assert len(loaded) == 2


def test_a_folder_in_an_entrys_place_harms_nothing(model: ModelSet, loaded: list[str], folder: Path) -> None:
    (DiskCache(folder, 0).path(Entry.of(model.text_encoder, model.tokenizer.encode(PROMPT))) / "x").mkdir(parents=True)
    assert same_bits(encode_prompt(model, PROMPT), encode_prompt(model, PROMPT))
    assert len(loaded) == 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_handed_on_and_not_kept(
    model: ModelSet, folder: Path, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = model.tokenizer.encode(PROMPT)
    wrong = np.full((1, tokens.text_length, 64), value, np.float32)
    for _ in range(2):
        [result] = prompt_cache.embed(model.text_encoder, [tokens], lambda missing: [wrong for _ in missing])
        assert same_bits(result, wrong)
    assert caplog.text.count("not finite") == 2
    assert not folder.exists()


# Where nothing can be kept, or shall be


def test_a_disk_that_cannot_be_written_costs_a_warning_and_no_picture(
    model: ModelSet, loaded: list[str], folder: Path, restart: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("a file where the folder would be", encoding="utf-8")
    expected = uncached(model, PROMPT)
    loaded.clear()
    assert same_bits(encode_prompt(model, PROMPT), expected)
    assert "the disk is full or cannot be written" in caplog.text
    assert "COREAI_RGBA_CACHE" in caplog.text
    assert same_bits(encode_prompt(model, PROMPT), expected)
    assert loaded == ["text encoder"]
    restart()
    assert same_bits(encode_prompt(model, PROMPT), expected)
    assert len(loaded) == 2


def test_a_limit_of_0_turns_the_cache_off(
    model: ModelSet, loaded: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = encode_prompt(model, "kept before")
    monkeypatch.setenv(DISK_VARIABLE, "0")
    for _ in range(2):
        assert same_bits(encode_prompt(model, "kept before"), kept)
        encode_prompt(model, PROMPT)
    assert len(loaded) == 5
    assert len(list(folder.iterdir())) == 1


def test_a_memory_limit_of_0_leaves_the_disk(
    model: ModelSet, loaded: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MEMORY_VARIABLE, "0")
    encode_prompts(model, [PROMPT])
    encode_prompts(model, [PROMPT])
    assert len(loaded) == 1
    remove(folder)
    encode_prompts(model, [PROMPT])
    assert len(loaded) == 2


def test_the_limits_are_in_megabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    default = prompt_cache.PromptCache.configured()
    assert (default.disk.limit, default.memory_limit) == (512_000_000, 64_000_000)
    monkeypatch.setenv(DISK_VARIABLE, "1.5")
    monkeypatch.setenv(MEMORY_VARIABLE, "")
    changed = prompt_cache.PromptCache.configured()
    assert (changed.disk.limit, changed.memory_limit) == (1_500_000, 64_000_000)


@pytest.mark.parametrize("variable", [DISK_VARIABLE, MEMORY_VARIABLE])
@pytest.mark.parametrize("text", ["-1", "much", "nan", "inf", "1 GB"])
def test_a_limit_that_is_no_size_is_refused_before_anything_is_loaded(
    model: ModelSet, loaded: list[str], monkeypatch: pytest.MonkeyPatch, variable: str, text: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ContractError, match=f"{variable} is '{text}': set it to a number of megabytes"):
        encode_prompt(model, PROMPT)
    assert loaded == []
