"""Which model sets a command can name."""

import os
from pathlib import Path

from ..contract import ContractError
from ..model_set import ModelSet, available_model_sets, choose_model_set

MODELS_VARIABLE = "COREAI_RGBA_MODELS"
PREFERRED_SIZE = 512


def model_folders() -> list[Path]:
    """``$COREAI_RGBA_MODELS``, and ``models/coreai`` of the ComfyUI this pack is installed in."""
    configured = [Path(folder) for folder in os.environ.get(MODELS_VARIABLE, "").split(os.pathsep) if folder]
    custom_nodes = Path(__file__).parents[3]
    installed = [custom_nodes.parent / "models" / "coreai"] if custom_nodes.name == "custom_nodes" else []
    return configured + installed


def choose(name: str) -> ModelSet:
    """A model set by its name or by the path of its folder."""
    sets = available_model_sets(model_folders())
    if name not in sets and Path(name).is_dir():
        return ModelSet(Path(name))
    return choose_model_set(name, sets)


def default_size(model: ModelSet) -> tuple[int, int]:
    """(width, height): 512 x 512 where the set has it, else its largest picture."""
    sizes = list(model.vae_decoders)
    if not sizes:
        raise ContractError(f"{model.path} holds no VAE decoder: run coreai-rgba models to see what it lacks")
    height, width = (PREFERRED_SIZE,) * 2 if (PREFERRED_SIZE,) * 2 in sizes else max(sizes, key=lambda s: s[0] * s[1])
    return width, height
