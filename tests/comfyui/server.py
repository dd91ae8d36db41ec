"""A ComfyUI server in a base folder of its own, and a client that drives it over its API."""

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
import websocket

REPOSITORY = Path(__file__).parents[2]
PACK = "coreai-rgba-image"
SECONDS_TO_START = 120
SECONDS_OF_SILENCE = 180
"""How long a prompt may go without a word from the server."""

Workflow = dict[str, dict[str, Any]]
FINAL = {"execution_success", "execution_error", "execution_interrupted"}


class RefusedError(Exception):
    """The server did not accept a prompt: HTTP 400."""

    def __init__(self, answer: dict[str, Any]):
        super().__init__(json.dumps(answer, indent=1))
        self.node_errors: dict[str, Any] = answer["node_errors"]


@dataclass
class Run:
    """What the server told about one prompt."""

    prompt_id: str
    messages: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    previews: list[bytes] = field(default_factory=list)
    preview_events: list[int] = field(default_factory=list)
    """The binary event type of each preview: 1, or 4 where metadata comes with it."""

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [data for told, data in self.messages if told == kind]

    @property
    def outcome(self) -> str:
        return self.messages[-1][0]

    @property
    def error(self) -> str:
        """What an ``execution_error`` said."""
        [data] = self.told("execution_error")
        return data["exception_message"]

    @property
    def cached(self) -> set[str]:
        """Nodes that were not run, because nothing about them changed."""
        return {node for data in self.told("execution_cached") for node in data["nodes"]}

    @property
    def progress(self) -> list[int]:
        return [data["value"] for data in self.told("progress")]

    def outputs(self, node: str, kind: str = "images") -> list[dict[str, str]]:
        return next(data["output"][kind] for data in self.told("executed") if data["node"] == node)


class Client:
    """One browser tab, so to speak."""

    def __init__(self, address: str, *, feature_flags: bool = True):
        self.address = address
        self.id = uuid.uuid4().hex
        self._socket = websocket.create_connection(f"ws://{address}/ws?clientId={self.id}", timeout=SECONDS_OF_SILENCE)
        if feature_flags:
            flags = {"type": "feature_flags", "data": {"supports_preview_metadata": True}}
            self._socket.send(json.dumps(flags))

    def close(self) -> None:
        self._socket.close()

    def submit(self, workflow: Workflow) -> str:
        """Queue a workflow in API format; its prompt id. Raises ``RefusedError``."""
        body = {"prompt": workflow, "client_id": self.id}
        answer = requests.post(f"http://{self.address}/prompt", json=body, timeout=30)
        if answer.status_code == 400:
            raise RefusedError(answer.json())
        answer.raise_for_status()
        return answer.json()["prompt_id"]

    def wait(self, prompt_id: str, listener: Callable[[str, dict[str, Any]], None] = lambda kind, data: None) -> Run:
        """Follow a prompt to its end. ``listener`` hears each message as it arrives."""
        run = Run(prompt_id)
        while not run.messages or run.outcome not in FINAL:
            message = self._socket.recv()
            if isinstance(message, bytes):
                run.previews.append(picture_in(message))
                run.preview_events.append(struct.unpack(">I", message[:4])[0])
                continue
            decoded = json.loads(message)
            kind, data = decoded["type"], decoded.get("data", {})
            if data.get("prompt_id") == prompt_id:
                run.messages.append((kind, data))
                listener(kind, data)
        return run

    def listen(self, kind: str) -> Iterator[dict[str, Any]]:
        """The data of each message of ``kind``, as they arrive."""
        while True:
            message = self._socket.recv()
            if isinstance(message, str) and (decoded := json.loads(message))["type"] == kind:
                yield decoded["data"]

    def run(self, workflow: Workflow) -> Run:
        return self.wait(self.submit(workflow))

    def interrupt(self, prompt_id: str) -> None:
        requests.post(f"http://{self.address}/interrupt", json={"prompt_id": prompt_id}, timeout=30).raise_for_status()

    def free(self, **flags: bool) -> None:
        """What "unload models" and "free model and node cache" ask for; done when the queue is empty."""
        requests.post(f"http://{self.address}/free", json=flags, timeout=30).raise_for_status()

    def history(self, prompt_id: str) -> dict[str, Any]:
        return self._get(f"history/{prompt_id}").json()[prompt_id]

    def queue(self) -> list[str]:
        """Prompt ids of what runs and of what waits."""
        queue = self._get("queue").json()
        return [entry[1] for entry in queue["queue_running"] + queue["queue_pending"]]

    def view(self, output: Mapping[str, str]) -> bytes:
        """A file that a node made."""
        return self._get("view", output).content

    def object_info(self, node: str) -> dict[str, Any]:
        return self._get(f"object_info/{node}").json()[node]

    def _get(self, path: str, query: Mapping[str, str] | None = None) -> requests.Response:
        answer = requests.get(f"http://{self.address}/{path}", params=query, timeout=30)
        answer.raise_for_status()
        return answer


def picture_in(message: bytes) -> bytes:
    """The encoded picture of a binary preview, which comes with JSON about it or without."""
    kind, size = struct.unpack(">II", message[:8])
    with_metadata = kind == 4
    return message[8 + size :] if with_metadata else message[8:]


@dataclass(frozen=True)
class Server:
    """A running server: where it listens, its base folder, its process, and what it logged."""

    address: str
    base: Path
    process_id: int

    @property
    def log(self) -> str:
        return (self.base / "server.log").read_text(encoding="utf-8", errors="replace")

    @property
    def model_sets(self) -> Path:
        return self.base / "models" / "coreai"


def make_base(base: Path) -> Path:
    """A base folder with the pack linked in, as somebody who works on it has it."""
    for name in ("custom_nodes", "input", "output", "temp", "user", "models/coreai"):
        (base / name).mkdir(parents=True)
    (base / "custom_nodes" / PACK).symlink_to(REPOSITORY, target_is_directory=True)
    return base


@contextlib.contextmanager
def running_server(
    comfyui: Path,
    base: Path,
    environment: Mapping[str, str] | None = None,
    previews: str = "auto",
    frontend: Path | None = None,
) -> Iterator[Server]:
    """A server on a free port, up when the block starts and gone when it ends.

    ``frontend`` is the folder of a page to show instead of the one that ComfyUI requires.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = "127.0.0.1:" + str(free.getsockname()[1])
    command = [sys.executable, "main.py", "--cpu", "--disable-auto-launch", "--port", address.split(":")[1]]
    command += ["--preview-method", previews]
    command += ["--base-directory", str(base), "--database-url", "sqlite:///:memory:"]
    if frontend:
        command += ["--front-end-root", str(frontend)]
    if (base / "extra_model_paths.yaml").exists():
        command += ["--extra-model-paths-config", str(base / "extra_model_paths.yaml")]
    with (base / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=comfyui, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
        )
    server = Server(address, base, process.pid)
    try:
        _wait_until_up(server, process)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_up(server: Server, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(requests.ConnectionError):
            requests.get(f"http://{server.address}/system_stats", timeout=30).raise_for_status()
            return
        time.sleep(0.2)
    raise RuntimeError(f"the server did not start (exit status {process.poll()}):\n{server.log[-5000:]}")
