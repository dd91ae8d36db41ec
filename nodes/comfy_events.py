"""What the nodes tell the browser beside ComfyUI's own progress: how sampling goes, and what is in memory.

``coreai_rgba.sampling`` goes to whoever queued the prompt, after each step. ``coreai_rgba.memory`` goes
to everybody, whenever a bundle was loaded or released; a page that comes later asks for it. What a
node's panel is to show again after a reload is in the node's ``ui`` output, which history keeps, under
a key of the pack's own: ComfyUI draws what it finds under its own keys itself.
"""

import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from comfy_api.latest import ui
from comfy_execution.progress import get_progress_state
from comfy_execution.utils import get_executing_context
from server import PromptServer

from ..host import residency

WEB = Path(__file__).parents[1] / "web"
SCRIPTS = "rgba-by-core-ai"
"""Name under which the browser finds our scripts. ComfyUI's page takes every address with "extensions/core" in it for
its own and loads none of them, so the name of the pack's folder, which also serves them, does not do."""

UI_KEY = "coreai_rgba"
SAMPLING_EVENT = "coreai_rgba.sampling"
MEMORY_EVENT = "coreai_rgba.memory"

Ui = dict[str, list[dict[str, Any]]]


class SamplingReport:
    """Tells the browser how far a node's sampling is.

    ``seconds`` are those since it began, loading included; ``seconds_per_step`` is the mean of all
    steps but the first, which may include loading: ``None`` until there is one.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.began = time.monotonic()
        self.first_ended = self.began
        self._send(0)

    def step(self, done: int) -> None:
        """After each step, ``done`` counts from 1."""
        if done == 1:
            self.first_ended = time.monotonic()
        self._send(done)

    def _send(self, done: int) -> None:
        now = time.monotonic()
        self.state = {
            "step": done,
            "total": self.total,
            "seconds": now - self.began,
            "seconds_per_step": (now - self.first_ended) / (done - 1) if done > 1 else None,
        }
        context = get_executing_context()
        if context is not None:
            node = get_progress_state().dynprompt.get_display_node_id(context.node_id)
            server = PromptServer.instance
            about = {"prompt_id": context.prompt_id, "node": node}
            server.send_sync(SAMPLING_EVENT, about | self.state, server.client_id)

    @property
    def ui(self) -> Ui:
        return {UI_KEY: [self.state]}


def pictures_ui(rgba: torch.Tensor) -> Ui:
    """The pictures of an IMAGE ``[B, H, W, 4]`` of ``k / 255``, as exact PNG files in ComfyUI's temp folder."""
    return {UI_KEY: [{"pictures": ui.PreviewImage(rgba).as_dict()["images"]}]}


def report_memory() -> None:
    """Tell every browser what is loaded now."""
    PromptServer.instance.send_sync(MEMORY_EVENT, memory())


def memory() -> dict[str, Any]:
    """The loaded bundles, and the bytes each takes."""
    return {
        "bundles": [
            {"name": resident.bundle.path.stem, "kind": resident.bundle.spec.kind, "bytes": resident.size}
            for resident in residency.loaded()
        ]
    }


import_module("nodes").EXTENSION_WEB_DIRS[SCRIPTS] = str(WEB)  # by name: for a type checker "nodes" is this package
