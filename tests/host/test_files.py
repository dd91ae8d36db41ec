"""What is remembered about files, and how small files are written."""

import os
from pathlib import Path

import pytest

from coreai_rgba_image.host.files import CACHE_VARIABLE, hash_file, remembered, sha256_of, write_atomically


def test_a_value_is_computed_again_only_when_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    path, computed = tmp_path / "file", []
    path.write_text("one")

    def length() -> int:
        computed.append(path.stat().st_size)
        return computed[-1]

    assert [remembered(path, "length", length), remembered(path, "length", length)] == [3, 3]
    path.write_text("three")
    assert remembered(path, "length", length) == 5
    assert computed == [3, 5]
    first = sha256_of(path)
    os.utime(path, (1, 1))
    assert sha256_of(path) == first == hash_file(path)


@pytest.mark.parametrize("content", ["", "[", '{"stamp": 1}', "null"])
def test_a_damaged_memory_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    path = tmp_path / "file"
    path.write_text("one")
    assert remembered(path, "answer", lambda: 42) == 42
    [memory] = (tmp_path / "cache" / "remembered").iterdir()
    memory.write_text(content)
    assert remembered(path, "answer", lambda: 43) == 43
    assert remembered(path, "answer", lambda: 44) == 43


def test_a_cache_that_cannot_be_written_costs_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    path.write_text("one")
    monkeypatch.setenv(CACHE_VARIABLE, str(path / "below-a-file"))
    assert remembered(path, "answer", lambda: 42) == 42
    assert "cannot remember the answer" in caplog.text


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_atomically(tmp_path / "new" / "file", "text")
    write_atomically(tmp_path / "new" / "file", b"\xff")
    assert (tmp_path / "new" / "file").read_bytes() == b"\xff"
    (tmp_path / "folder" / "in-the-way").mkdir(parents=True)
    with pytest.raises(OSError, match="folder"):
        write_atomically(tmp_path / "folder", "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "new"]
