"""A server on this machine that speaks as much of the Hugging Face hub's protocol as downloads need.

It serves a folder as a repository, large files through a redirect to a second host name as the hub
does, remembers what was asked of it, and plays faults::

    with HubServer(folder, "owner/name") as hub:
        hub.fault("model.bin", cut_after=1000, times=1)
        ...  # a process with hub.environment, which holds HF_ENDPOINT
        assert hub.bytes_sent("model.bin") == ...
"""

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = 100_000
"""Bytes from which on a file is in Git LFS here."""
PIECE = 65_536
SECONDS_HELD = 60


@dataclass(frozen=True)
class Fault:
    """What goes wrong with a file, ``times`` times (``None``: always)."""

    status: int | None = None
    error_code: str | None = None
    cut_after: int | None = None
    hold_after: int | None = None
    change: Callable[[bytes], bytes] | None = None
    ignore_range: bool = False
    listed_size: int | None = None
    times: int | None = None


@dataclass
class Request:
    """One request: for which file (the empty name is the repository's listing), from which byte, and what was sent."""

    file: str
    path: str
    start: int
    authorized: bool
    sent: int = 0


@dataclass(frozen=True)
class Entry:
    """A file of a commit."""

    content: bytes

    @property
    def is_large(self) -> bool:
        return len(self.content) >= LARGE

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def blob(self) -> str:
        """Git's own hash."""
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()

    @property
    def digest(self) -> str:
        return self.sha256 if self.is_large else self.blob


@dataclass
class HubServer:
    """The repository ``name`` with the files of ``folder`` as its first commit; up within a ``with`` block."""

    folder: Path
    name: str
    requests: list[Request] = field(default_factory=list)
    commits: dict[str, dict[str, Entry]] = field(default_factory=dict)
    main: str = ""

    def __enter__(self) -> "HubServer":
        self.held, self._released = threading.Event(), threading.Event()
        self._faults: list[tuple[str, Fault]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.commit(self.folder)
        return self

    def __exit__(self, *error: object) -> None:
        self.heal()
        self._server.shutdown()
        self._server.server_close()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """For a process that downloads from here and nowhere else, whatever is set where the tests run."""
        return {
            "HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost",
        }  # fmt: skip

    def commit(self, folder: Path) -> str:
        """A new commit with the files of ``folder``; ``main`` is it from now on. Its id."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        entries = {path.relative_to(folder).as_posix(): Entry(path.read_bytes()) for path in files}
        listing = json.dumps({name: entry.digest for name, entry in entries.items()})
        self.main = hashlib.sha1(listing.encode()).hexdigest()
        self.commits[self.main] = entries
        return self.main

    def fault(self, file: str, **fault: Any) -> None:
        """Play a ``Fault`` for ``file``; for the empty name, when the repository is listed."""
        self._faults.append((file, Fault(**fault)))

    def heal(self) -> None:
        """No more faults; answers that were held go on."""
        self._faults.clear()
        self._released.set()
        self._released, self.held = threading.Event(), threading.Event()

    def forget(self) -> None:
        """Heal, and forget all requests and all commits but the first."""
        self.heal()
        self.requests.clear()
        self.commits.clear()
        self.commit(self.folder)

    def asked(self, file: str) -> list[Request]:
        return [request for request in self.requests if request.file == file]

    def bytes_sent(self, file: str) -> int:
        return sum(request.sent for request in self.asked(file))

    def wait_until_held(self) -> None:
        if not self.held.wait(SECONDS_HELD):
            raise TimeoutError("nobody asked for the file whose answer is to be held")

    def current_fault(self, file: str) -> Fault:
        for place, (name, fault) in enumerate(self._faults):
            if name == file and fault.times != 0:
                left = None if fault.times is None else fault.times - 1
                self._faults[place] = (name, Fault(**{**vars(fault), "times": left}))
                return fault
        return Fault()

    def hold(self) -> None:
        released = self._released
        self.held.set()
        released.wait(SECONDS_HELD)

    def revision(self, name: str) -> str | None:
        commit = self.main if name == "main" else name
        return commit if commit in self.commits else None

    def siblings(self, commit: str) -> Iterator[dict[str, Any]]:
        for name, entry in self.commits[commit].items():
            listed = next((fault.listed_size for at, fault in self._faults if at == name), None)
            size = len(entry.content) if listed is None else listed
            lfs = {"sha256": entry.sha256, "size": size, "pointerSize": 130}
            yield {"rfilename": name, "size": size, "blobId": entry.blob, **({"lfs": lfs} if entry.is_large else {})}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def do_GET(self) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._answer()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *values: object) -> None:
        """Quiet: what matters is in ``requests``."""

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        api, files = f"/api/models/{self.hub.name}", f"/{self.hub.name}/resolve/"
        if path == api or path.startswith(f"{api}/revision/"):
            self._list(path.removeprefix(api).removeprefix("/revision/") or "main")
        elif path.startswith(files):
            self._resolve(*path.removeprefix(files).split("/", 1))
        elif path.startswith("/lfs/"):
            self._send_file(*path.removeprefix("/lfs/").split("/", 1))
        else:
            self._refuse(404, "RepoNotFound")

    def _list(self, revision: str) -> None:
        request, fault = self._note(""), self.hub.current_fault("")
        commit = self.hub.revision(revision)
        if fault.status:
            self._refuse(fault.status, fault.error_code)
        elif commit is None:
            self._refuse(404, "RevisionNotFound")
        else:
            answer = {"id": self.hub.name, "sha": commit, "siblings": list(self.hub.siblings(commit))}
            body = json.dumps(answer).encode()
            body = fault.change(body) if fault.change else body
            self._start(200, {"Content-Type": "application/json", "Content-Length": str(len(body))})
            self._send(request, body)

    def _resolve(self, revision: str, name: str) -> None:
        commit = self.hub.revision(revision)
        entry = None if commit is None else self.hub.commits[commit].get(name)
        if commit is None or entry is None:
            self._refuse(404, "RevisionNotFound" if commit is None else "EntryNotFound")
        elif entry.is_large:
            location = f"http://localhost:{self.hub.port}/lfs/{commit}/{name}"
            linked = {"X-Linked-Etag": f'"{entry.sha256}"', "X-Linked-Size": str(len(entry.content))}
            self._start(302, {"Location": location, "X-Repo-Commit": commit, "Content-Length": "0", **linked})
        else:
            self._send_file(commit, name)

    def _send_file(self, commit: str, name: str) -> None:
        entry, request, fault = self.hub.commits[commit][name], self._note(name), self.hub.current_fault(name)
        if fault.status:
            self._refuse(fault.status, fault.error_code)
            return
        content = fault.change(entry.content) if fault.change else entry.content
        start = 0 if fault.ignore_range else request.start
        headers = {"ETag": f'"{entry.digest}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if start >= len(content) > 0:
            self._start(416, {"Content-Range": f"bytes */{len(content)}", "Content-Length": "0"})
            return
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._start(206 if start else 200, {**headers, "Content-Length": str(len(content) - start)})
        if self.command == "HEAD":
            return
        stop = fault.cut_after if fault.cut_after is not None else fault.hold_after
        if stop is None:
            self._send(request, content[start:])
            return
        self._send(request, content[start : start + stop])
        if fault.hold_after is not None:
            self.hub.hold()
            self._send(request, content[start + stop :])
        else:
            self.close_connection = True

    def _note(self, file: str) -> Request:
        asked = self.headers.get("Range", "")
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        self.hub.requests.append(Request(file, self.path, start, "Authorization" in self.headers))
        return self.hub.requests[-1]

    def _send(self, request: Request, content: bytes) -> None:
        for at in range(0, len(content), PIECE):
            piece = content[at : at + PIECE]
            self.wfile.write(piece)
            request.sent += len(piece)

    def _refuse(self, status: int, error_code: str | None) -> None:
        self._start(status, {"Content-Length": "0", **({"X-Error-Code": error_code} if error_code else {})})

    def _start(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
