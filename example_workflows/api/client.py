"""Queues a workflow in API format on a running ComfyUI, says how far it is, and saves the pictures it makes.

python client.py sticker.json --set 1.text="a large blue ring sticker, transparent background"

Needs aiohttp, which ComfyUI brings. Ctrl+C stops the prompt on the server too.
"""

import argparse
import asyncio
import json
import uuid
from pathlib import Path
from typing import Any

import aiohttp

Workflow = dict[str, dict[str, Any]]


async def draw(address: str, workflow: Workflow, folder: Path) -> list[Path]:
    """Run ``workflow`` on the ComfyUI at ``address`` (host:port); the pictures its SaveImage nodes wrote, copied here.

    Raises ``SystemExit`` with ComfyUI's own message where it refuses the workflow or a node fails.
    """
    client_id = uuid.uuid4().hex
    async with (
        aiohttp.ClientSession(f"http://{address}") as session,
        session.ws_connect("/ws", params={"clientId": client_id}, max_msg_size=0) as messages,
    ):
        prompt_id = await _queue(session, workflow, client_id)
        try:
            files = await _follow(messages, prompt_id, workflow)
        except asyncio.CancelledError:
            await session.post("/queue", json={"delete": [prompt_id]})  # if it waits
            await session.post("/interrupt", json={"prompt_id": prompt_id})  # if it runs
            raise
        return [await _save(session, file, folder) for file in files]


async def _queue(session: aiohttp.ClientSession, workflow: Workflow, client_id: str) -> str:
    async with session.post("/prompt", json={"prompt": workflow, "client_id": client_id}) as answer:
        if answer.status == 400:
            raise SystemExit(f"ComfyUI refuses the workflow: {json.dumps(await answer.json(), indent=1)}")
        answer.raise_for_status()
        return (await answer.json())["prompt_id"]


async def _follow(
    messages: aiohttp.ClientWebSocketResponse, prompt_id: str, workflow: Workflow
) -> list[dict[str, str]]:
    """The files that a prompt saved, once it has ended. Binary messages are previews, which a program may show."""
    files = []
    async for message in messages:
        if message.type != aiohttp.WSMsgType.TEXT:
            continue
        told = json.loads(message.data)
        kind, data = told["type"], told.get("data", {})
        if data.get("prompt_id") != prompt_id:
            continue
        if kind == "progress":
            node = workflow.get(data["node"])  # none where a node has put others in its place
            name = node["class_type"] if node else data["node"]
            print(f"{name}: {data['value']} of {data['max']}", flush=True)
        elif kind == "executed" and data["output"]:
            files += [file for file in data["output"].get("images", []) if file["type"] == "output"]
        elif kind == "execution_success":
            return files
        elif kind == "execution_error":
            raise SystemExit(f"{data['node_type']}: {data['exception_message']}")
        elif kind == "execution_interrupted":
            raise SystemExit("the prompt was interrupted")
    raise SystemExit("ComfyUI closed the connection before the prompt had ended")


async def _save(session: aiohttp.ClientSession, file: dict[str, str], folder: Path) -> Path:
    async with session.get("/view", params=file) as answer:
        answer.raise_for_status()
        content = await answer.read()
    path = folder / file["subfolder"] / file["filename"]
    if not path.resolve().is_relative_to(folder.resolve()):
        raise SystemExit(f"ComfyUI names a file outside {folder}: {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def _change(workflow: Workflow, setting: str) -> None:
    """``NODE.INPUT=VALUE``, where the value is JSON, or text if it is not."""
    place, equals, value = setting.partition("=")
    node, _, name = place.partition(".")
    if not equals or name not in workflow.get(node, {}).get("inputs", {}):
        inputs = [f"{node}.{name}" for node, part in workflow.items() for name in part["inputs"]]
        raise SystemExit(f"--set {setting}: use NODE.INPUT=VALUE with one of {', '.join(inputs)}")
    try:
        workflow[node]["inputs"][name] = json.loads(value)
    except json.JSONDecodeError:
        workflow[node]["inputs"][name] = value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workflow", type=Path, help="a workflow in API format, such as those beside this file")
    parser.add_argument("--server", default="127.0.0.1:8188", help="host:port of ComfyUI (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the pictures (default: this one)")
    parser.add_argument("--set", action="append", default=[], metavar="NODE.INPUT=VALUE", help="change an input")
    options = parser.parse_args()
    workflow = json.loads(options.workflow.read_text(encoding="utf-8"))
    for setting in options.set:
        _change(workflow, setting)
    try:
        for path in asyncio.run(draw(options.server, workflow, options.out)):
            print(path)
    except aiohttp.ClientConnectionError as error:
        raise SystemExit(
            f"no ComfyUI answers at {options.server}: start it, or name it with --server ({error})"
        ) from error
    except aiohttp.ClientResponseError as error:
        raise SystemExit(f"ComfyUI answers {error.status} {error.message} to {error.request_info.url}") from error
    except KeyboardInterrupt:
        raise SystemExit("stopped") from None


if __name__ == "__main__":
    main()
