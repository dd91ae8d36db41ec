"""Our bundles in ComfyUI's accounting, so that native models and ours make room for each other.

ComfyUI unloads what ``current_loaded_models`` lists: when a native model needs memory, when "unload
models" is pressed, at ``/free``. One patcher stands there for all of our bundles. Its size is what
they take, unloading it releases them, and a bundle that is loaded first asks ComfyUI for room.
"""

from functools import cache
from typing import Any

import comfy.model_management as management
import torch
from comfy.model_patcher import ModelPatcher

from ..host import residency
from .comfy_events import report_memory


class CoreAIBundles(torch.nn.Module):
    """What the log and the list of loaded models call our bundles. The weights are Core AI's, not torch's."""


class BundlePatcher(ModelPatcher):
    """All loaded bundles, as one model that is whole in memory at all times."""

    def __init__(self) -> None:
        device = management.get_torch_device()  # the one that "unload models" empties
        super().__init__(CoreAIBundles(), load_device=device, offload_device=device)

    def model_size(self) -> int:
        return residency.resident_bytes()

    def loaded_size(self) -> int:
        return residency.resident_bytes()

    def current_loaded_device(self) -> torch.device:
        return self.load_device

    def partially_load(self, *_: Any, **__: Any) -> int:
        return 0  # the bundle is in memory already

    def partially_unload(self, device_to: torch.device, memory_to_free: int = 0, *_: Any, **__: Any) -> int:
        return residency.release(memory_to_free)

    def detach(self, unpatch_all: bool = True) -> torch.nn.Module:
        if unpatch_all:  # else ComfyUI is only about to list it anew
            residency.release_all()
        return self.model


@cache
def bundle_patcher() -> BundlePatcher:
    """This process's; made when the first bundle is loaded, as ComfyUI only keeps a weak reference."""
    return BundlePatcher()


class ComfyModels:
    """ComfyUI's models, as ``host.residency`` knows neighbours."""

    def make_room(self, needed: int) -> None:
        device = management.get_torch_device()
        if management.is_device_cpu(device) or management.is_device_mps(device):  # others have memory of their own
            management.free_memory(needed, device, keep_loaded=[management.LoadedModel(bundle_patcher())])

    def loaded(self) -> None:
        management.load_models_gpu([bundle_patcher()])
        report_memory()

    def released(self) -> None:
        report_memory()


def share_memory() -> None:
    """From here on the bundles of this process are in ComfyUI's accounting."""
    residency.neighbours = ComfyModels()
