"""Core AI RGBA Image: pictures with real transparency in ComfyUI. Registers the nodes, imports nothing heavy."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from comfy_api.latest import ComfyExtension


WEB_DIRECTORY = "./web"
"""What the browser may ask for: help pages by this name, scripts by another (``nodes/comfy_events.py``)."""


async def comfy_entrypoint() -> "ComfyExtension":
    """What ComfyUI calls once, at start."""
    from .nodes import CoreAIRGBAExtension

    return CoreAIRGBAExtension()
