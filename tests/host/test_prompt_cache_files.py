"""The cache's memory and files by themselves: what is written, read, refused and removed."""

import hashlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from coreai_rgba_image.host.prompt_cache import DiskCache, Entry, MemoryCache

SHAPE = (1, 8, 4)
NUMBER_BYTES = 8 * 4 * 4
FILE_BYTES = 32 + NUMBER_BYTES
"""Of an entry of that shape: the checksum and the numbers."""

DRAW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def numbers(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE, dtype=np.float32)


def entry(seed: int) -> Entry:
    return Entry(hashlib.sha256(str(seed).encode()).hexdigest(), SHAPE)


def put(cache: DiskCache, seed: int, used: int) -> None:
    """An entry last used so many seconds after 1970."""
    cache.put(entry(seed), numbers(seed))
    os.utime(cache.path(entry(seed)), (used, used))


def kept(cache: DiskCache, seeds: range) -> set[int]:
    return {seed for seed in seeds if cache.path(entry(seed)).exists()}


def assert_whole(cache: DiskCache, seed: int) -> None:
    found = cache.get(entry(seed))
    assert found is not None
    assert found.tobytes() == numbers(seed).tobytes()


@DRAW
@given(
    array=arrays.arrays(
        np.float32,
        st.tuples(st.just(1), st.integers(1, 40), st.integers(1, 64)),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    ),
    key=st.binary(min_size=32, max_size=32),
)
def test_any_shape_and_any_finite_numbers_come_back_bit_for_bit(tmp_path: Path, array: np.ndarray, key: bytes) -> None:
    cache, where = DiskCache(tmp_path, 10**9), Entry(key.hex(), array.shape)
    cache.put(where, array)
    found = cache.get(where)
    assert found is not None
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())


@DRAW
@given(position=st.integers(0, FILE_BYTES - 1), bit=st.integers(0, 7))
def test_no_flipped_bit_goes_unnoticed(tmp_path: Path, position: int, bit: int) -> None:
    cache = DiskCache(tmp_path, 10**6)
    cache.put(entry(0), numbers(0))
    path = cache.path(entry(0))
    content = bytearray(path.read_bytes())
    assert len(content) == FILE_BYTES
    content[position] ^= 1 << bit
    path.write_bytes(content)
    assert cache.get(entry(0)) is None


def test_what_is_read_cannot_be_written_to(tmp_path: Path) -> None:
    """It is what memory keeps from then on."""
    cache = DiskCache(tmp_path, FILE_BYTES)
    put(cache, 0, used=1)
    found = cache.get(entry(0))
    assert found is not None
    assert not found.flags.writeable


def test_the_least_recently_used_files_go_when_the_limit_is_passed(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "prompts", 3 * FILE_BYTES)
    for seed, used in enumerate((300, 100, 200)):
        put(cache, seed, used)
    assert kept(cache, range(4)) == {0, 1, 2}
    assert_whole(cache, 1)  # now the one last used
    put(cache, 3, used=400)
    assert kept(cache, range(4)) == {0, 1, 3}
    cache.touch(entry(0))
    os.utime(cache.path(entry(1)), (500, 500))
    put(cache, 4, used=600)
    assert kept(cache, range(5)) == {0, 1, 4}
    for seed in (0, 1, 4):
        assert_whole(cache, seed)
    DiskCache(cache.folder, FILE_BYTES).put(entry(5), numbers(5))
    assert kept(cache, range(6)) == {5}


def test_a_file_larger_than_the_limit_is_not_written_and_pushes_nothing_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(DiskCache(tmp_path, FILE_BYTES), 0, used=1)
    cache = DiskCache(tmp_path, FILE_BYTES - 1)
    cache.put(entry(1), numbers(1))
    assert kept(cache, range(2)) == {0}
    assert "COREAI_RGBA_PROMPT_CACHE_MB allows" in caplog.text


def test_what_a_killed_process_left_behind_goes_like_any_other_file(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 2 * FILE_BYTES)
    left = cache.path(entry(0)).with_name(f"{cache.path(entry(0)).name}.0123456789abcdef")
    left.write_bytes(bytes(FILE_BYTES))
    os.utime(left, (1, 1))
    foreign = tmp_path / "README"
    foreign.write_bytes(bytes(10 * FILE_BYTES))
    (tmp_path / "folder.f32").mkdir()
    put(cache, 1, used=100)
    assert left.exists()
    put(cache, 2, used=200)
    assert not left.exists()
    assert kept(cache, range(3)) == {1, 2}
    assert foreign.exists()


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Within, writing more than ``size`` bytes into a file fails half way, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_gets_full_while_writing_is_a_warning_and_leaves_what_was_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = DiskCache(tmp_path, 10**6)
    put(cache, 0, used=1)
    with files_of_at_most(FILE_BYTES // 2):
        cache.put(entry(0), numbers(7))
        cache.put(entry(1), numbers(1))
    assert caplog.text.count("the disk is full or cannot be written") == 2
    assert str(tmp_path) in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == [cache.path(entry(0)).name]
    assert_whole(cache, 0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_read_only_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = DiskCache(tmp_path, 10**6)
    put(cache, 0, used=1)
    tmp_path.chmod(0o500)
    try:
        assert_whole(cache, 0)
        cache.put(entry(1), numbers(1))
        assert cache.get(entry(1)) is None
    finally:
        tmp_path.chmod(0o700)
    assert "the disk is full or cannot be written" in caplog.text


def test_a_use_that_cannot_be_noted_is_a_use_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    cache = DiskCache(tmp_path, 10**6)
    put(cache, 0, used=1)
    monkeypatch.setattr(os, "utime", read_only)
    assert_whole(cache, 0)


def test_memory_keeps_what_was_used_last_within_its_limit() -> None:
    memory = MemoryCache()
    for seed in range(3):
        memory.put(str(seed), numbers(seed), 3 * NUMBER_BYTES)
    assert memory.get("0") is not None
    memory.put("3", numbers(3), 3 * NUMBER_BYTES)
    assert [memory.get(str(seed)) is not None for seed in range(4)] == [True, False, True, True]
    memory.put("4", np.zeros((1, 17, 4), np.float32), 2 * NUMBER_BYTES)
    assert memory.get("4") is None
    assert memory.get("3") is not None
    memory.put("2", numbers(9), 3 * NUMBER_BYTES)
    again = memory.get("2")
    assert again is not None
    assert np.array_equal(again, numbers(9))
    memory.put("5", numbers(5), NUMBER_BYTES)
    assert [seed for seed in range(6) if memory.get(str(seed)) is not None] == [5]


WRITERS = """
import sys
from pathlib import Path
import numpy as np
sys.path.insert(0, sys.argv[1])
from {module} import DiskCache, entry, exercise
exercise(DiskCache(Path(sys.argv[2]), int(sys.argv[3])), int(sys.argv[4]))
"""


def exercise(cache: DiskCache, seed: int) -> None:
    """Writes and reads dozens of entries in an order of its own; whatever is read must be whole."""
    for number in np.random.default_rng(seed).integers(0, 24, 200).tolist():
        found = cache.get(entry(number))
        if found is None:
            cache.put(entry(number), numbers(number))
        else:
            assert found.tobytes() == numbers(number).tobytes()


def test_threads_and_processes_that_write_at_once_leave_whole_files_within_the_limit(tmp_path: Path) -> None:
    limit = 12 * FILE_BYTES
    cache = DiskCache(tmp_path, limit)
    code = WRITERS.replace("{module}", Path(__file__).stem)
    arguments = [str(Path(__file__).parent), str(tmp_path), str(limit)]
    processes = [subprocess.Popen([sys.executable, "-c", code, *arguments, str(seed)]) for seed in range(2)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda seed: exercise(cache, seed), range(2, 6)))
    assert [process.wait(120) for process in processes] == [0, 0]
    files = list(tmp_path.iterdir())
    assert {path.suffix for path in files} == {".f32"}
    assert 0 < len(files) <= 12
    for number in kept(cache, range(24)):
        assert_whole(cache, number)
