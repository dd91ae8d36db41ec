"""Taking what is private out of a text that goes into a bug report.

A user's or a machine's name stands in paths, and paths stand in error messages, quoted in many ways.
So nothing is trusted to be clean: the finished text is searched for all of them.
"""

import contextlib
import getpass
import json
import os
import platform
import re
import shlex
import socket
import unicodedata
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import quote

SHORT = 4
"""Letters below which a name is only looked for in paths: it would be found in too many words."""
NOT_PRIVATE = {"", "localhost"}


def scrubbed(text: str) -> str:
    """``text`` with "~" for the home folder, and USER and HOST for the names of the user and the machine."""
    for home in _longest_first(_home_folders()):
        text = re.sub(f"(?<![^\\W_]){re.escape(home)}(?![^\\W_])", "~", text, flags=re.IGNORECASE)
    for names, stand_in in ((_user_names(), "USER"), (_host_names(), "HOST")):
        for name in _longest_first(names):
            before, after = (r"(?<=[/\\@:])", r"(?![^\W_])") if len(name) < SHORT else ("", "")
            text = re.sub(f"{before}{re.escape(name)}{after}", stand_in, text, flags=re.IGNORECASE)
    return text


def _longest_first(values: Iterable[str]) -> list[str]:
    """Every way to write each value, so that no part of a long one is left when a short one is replaced."""
    return sorted({form for value in values for form in _forms(value)}, key=len, reverse=True)


def _forms(value: str) -> set[str]:
    """As it is, in either normal form of Unicode, and quoted by Python, JSON, the shell and URLs, in one line."""
    written = {unicodedata.normalize(form, value) for form in ("NFC", "NFD")} | {value}
    quoters: tuple[Callable[[str], str], ...] = (
        lambda text: repr(text)[1:-1],
        lambda text: ascii(text)[1:-1],
        lambda text: json.dumps(text)[1:-1],
        lambda text: shlex.quote(f" {text}")[2:-1],
        lambda text: quote(text, errors="replace"),
        lambda text: " ".join(text.splitlines()),
    )
    return written | {quoter(text) for text in written for quoter in quoters}


def _home_folders() -> set[str]:
    homes = {*map(Path, _account("pw_dir"))}
    with contextlib.suppress(RuntimeError):  # nobody knows of one
        homes.add(Path.home())
    return {str(path) for home in homes for path in (home, home.resolve()) if path != Path(path.anchor)}


def _user_names() -> set[str]:
    names = {*_account("pw_name"), *(Path(home).name for home in _home_folders())}
    with contextlib.suppress(KeyError, OSError, ImportError):  # a user without an account and without a name
        names.add(getpass.getuser())
    return names - NOT_PRIVATE


def _account(field: str) -> list[str]:
    try:
        import pwd

        return [getattr(pwd.getpwuid(os.getuid()), field)]
    except (ImportError, KeyError):  # Windows has no such accounts, a container may have none
        return []


def _host_names() -> set[str]:
    names = {socket.gethostname(), platform.node()}
    return ({*names, *(name.split(".")[0] for name in names)}) - NOT_PRIVATE
