"""Which model sets a command can name."""

import os
from pathlib import Path

from ..contract import ContractError
from ..model_set import ModelSet, available_model_sets, choose_model_set
from ..published import hub_snapshot

MODELS_VARIABLE = "COREAI_RGBA_MODELS"
PREFERRED_SIZE = 512


def model_folders() -> list[Path]:
    """``$COREAI_RGBA_MODELS``, and ``models/coreai`` of the ComfyUI this pack is installed in."""
    configured = [Path(folder) for folder in os.environ.get(MODELS_VARIABLE, "").split(os.pathsep) if folder]
    comfyui = comfyui_folder()
    return configured + ([comfyui / "models" / "coreai"] if comfyui else [])


def comfyui_folder() -> Path | None:
    """The ComfyUI this pack is installed in, if it is."""
    custom_nodes = Path(__file__).parents[3]
    return custom_nodes.parent if custom_nodes.name == "custom_nodes" else None


def choose(name: str) -> ModelSet:
    """A model set by its name or by the path of its folder, which may be a repository in the Hugging Face cache."""
    sets = available_model_sets(model_folders())
    if name not in sets and Path(name).is_dir():
        return ModelSet(hub_snapshot(Path(name)))
    if Path(name).is_absolute():
        raise ContractError(f"there is no folder {name}: if it is on another disk, connect that disk")
    return choose_model_set(name, sets)


def default_size(model: ModelSet) -> tuple[int, int]:
    """(width, height): 512 x 512 where the set has it, else its largest picture."""
    sizes = list(model.vae_decoders)
    if not sizes:
        raise ContractError(f"{model.path} holds no VAE decoder: run coreai-rgba models to see what it lacks")
    height, width = (PREFERRED_SIZE,) * 2 if (PREFERRED_SIZE,) * 2 in sizes else max(sizes, key=lambda s: s[0] * s[1])
    return width, height
