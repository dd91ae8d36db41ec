"""Nothing private is left in a text, however it was written."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest

from coreai_rgba_image.host.privacy import scrubbed

HOSTILE = [
    "alice",
    "o'brien",
    'a"b\\c',
    "x.*[y]+(",
    "Jörg Müller",
    "李",
    "al",
    "a b",
    "ROOT",
    "\\1",
    "new\nline",
    "%41",
]


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Be the user of that name, at home in a folder of that name."""

    def be(name: str) -> Path:
        monkeypatch.setenv("HOME", f"/homes/{name}")
        for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
            monkeypatch.setenv(variable, name)
        return Path("/homes", name)

    return be


@pytest.mark.parametrize("name", HOSTILE)
def test_the_home_folder_and_the_name_are_gone(become: Callable[[str], Path], name: str) -> None:
    home = become(name)
    path = home / "models" / "a set"
    for written in (str(path), repr(str(path)), ascii(str(path)), json.dumps(str(path)), shlex.quote(str(path))):
        assert "~/models" in scrubbed(f"[Errno 2] No such file: {written}").replace("\\\\", "/"), written
    disk = f"/Volumes/{name}/x, /media/{name.upper()}/x and {quote(f'/Users/{name}')}/x, {f'/Users/{name}/x'!r}"
    clean = scrubbed(disk)
    forms = (name, name.upper(), repr(name)[1:-1], ascii(name)[1:-1], quote(name))
    assert [form for form in forms if f"/{form}/" in clean] == []
    assert clean.count("USER") == 4


def test_a_name_in_a_word_is_found_unless_it_is_short(become: Callable[[str], Path]) -> None:
    become("alice")
    assert scrubbed("Alice's Disk, malice, alice2_backup") == "USER's Disk, mUSER, USER2_backup"
    become("max")
    assert scrubbed("Apple M4 Max, max_shift, /Users/max/x, /Users/maxim") == (
        "Apple M4 Max, max_shift, /Users/USER/x, /Users/maxim"
    )


def test_another_users_folder_is_not_taken_for_ones_own(become: Callable[[str], Path]) -> None:
    home = become("al")
    assert scrubbed(f"{home}/x {home}ice/x {home}") == f"~/x {home}ice/x ~"


def test_the_machines_name_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Alices-MacBook.local")
    assert scrubbed("on Alices-MacBook.local, alices-macbook:8188") == "on HOST, HOST:8188"


def test_a_text_without_private_things_stays(become: Callable[[str], Path]) -> None:
    become("somebody")
    text = "- model sets: 2, macOS 27.0 (26A428), localhost:8188\n"
    assert scrubbed(text) == text


def test_no_home_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/")
    assert scrubbed("/a/b: c") == "/a/b: c"
