"""LoRA files on the DiT at export, as low-rank branches beside the weights (``graphs.layers.LoraLinear``).

A layer's update is ``strength * alpha / rank * B A``. Merged into bf16 weights, an update of 0.5 % of
their norm comes out with 32 % of error: a third of its elements are less than half a step of bf16. A
and B that are rounded to bf16 by themselves keep it within 0.3 %, fp32 within its own precision. So
they are stored in the dtype the DiT computes in, the one they would be rounded to on use.

Sources: PEFT's checkpoint format for ``lora_A``, ``lora_B`` and ``lora_alpha``; diffusers' loader of
Qwen-Image LoRAs for the prefixes and for ``lora_down``, ``lora_up`` and ``alpha``.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..contract import ContractError
from ..files import hash_file
from ..graphs.dit import DiT
from ..graphs.layers import Linear, LoraLinear
from .checkpoint import some

KEY = re.compile(
    r"(?:base_model\.model\.)?(?:transformer\.|diffusion_model\.)?(?P<layer>.+)"
    r"\.(?:lora_(?P<half>A|B|down|up)(?:\.default)?\.weight|alpha)"
)
HALVES = {"A": "down", "down": "down", "B": "up", "up": "up", None: "alpha"}
STRENGTH = re.compile(r"(.+):([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)", re.DOTALL)

DIFFUSERS_SETTINGS = "lora_adapter_metadata"
PEFT_WEIGHTS, PEFT_SETTINGS = "adapter_model.safetensors", "adapter_config.json"
CHANGED_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Values of PEFT's ``init_lora_weights`` that also change the weights a LoRA belongs to."""

Update = tuple[Tensor, Tensor]
"""A ``[rank, in]`` and B ``[out, rank]``, float32, every scale in B."""
Pair = dict[str, Tensor]
"""What a file holds for one layer: ``down`` (A), ``up`` (B) and maybe ``alpha``."""


@dataclass(frozen=True)
class Lora:
    """A LoRA file and how strongly it acts: 1 as trained, 0 not at all, below 0 the other way."""

    path: Path
    strength: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.strength):
            raise ContractError(f"the strength of {self.path} is {self.strength}: choose a finite number, 1 as trained")

    @classmethod
    def parse(cls, text: str) -> "Lora":
        """``FILE`` or ``FILE:STRENGTH``. What follows the last colon is a strength if it is a number, else a name."""
        found = STRENGTH.fullmatch(text)
        return cls(Path(found[1]), float(found[2])) if found else cls(Path(text))

    def describe(self) -> dict[str, Any]:
        """What a bundle tells of it: the file's name, the strength, the file's SHA-256."""
        return {"file": self.path.name, "strength": self.strength, "sha256": hash_file(self.path)}


def apply_loras(model: DiT, loras: Iterable[Lora]) -> None:
    """Give the layers of ``model`` the branches of ``loras``; several on one layer add up in one branch.

    Call it once, with all of them. Raises ``ContractError`` for a file that cannot be read or does
    not fit, and ``model`` is then as it was.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    shapes = {name: layer.weight.shape for name, layer in layers.items()}
    stacks: dict[str, list[Update]] = {}
    for lora in loras:
        for name, update in read_lora(lora, shapes).items():
            stacks.setdefault(name, []).append(update)
    for name, stack in stacks.items():
        down = torch.cat([down for down, _ in stack], dim=0)
        up = torch.cat([up for _, up in stack], dim=1)
        branch = LoraLinear(layers[name], down.to(model.compute_dtype), up.to(model.compute_dtype))
        model.set_submodule(name, branch)


def read_lora(lora: Lora, shapes: Mapping[str, torch.Size]) -> dict[str, Update]:
    """What a file adds to each layer, as it is to be added. ``shapes`` are the weights', ``[out, in]``, by layer.

    Raises ``ContractError`` that lists the keys that do not fit, and says what does.
    """
    tensors, settings = _read(lora.path)
    updates = {}
    for name, pair in _pairs(lora.path, tensors, shapes).items():
        up = pair["up"].float() * (lora.strength * settings.scale(name, pair))
        updates[name] = (pair["down"].float(), up)
        if not all(half.isfinite().all() for half in updates[name]):
            raise ContractError(
                f"{lora.path} at strength {lora.strength:g} makes numbers for {name} that are not finite: "
                "download the file again or lower the strength"
            )
    return updates


@dataclass(frozen=True)
class _Settings:
    """What PEFT's settings say of the scale, for files without ``alpha`` tensors."""

    lora_alpha: float | None = None
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    use_rslora: bool = False

    @classmethod
    def from_json(cls, text: str | bytes) -> "_Settings":
        """Raises ``ValueError`` if these are no settings, ``ContractError`` if this LoRA needs other weights."""
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
        # diffusers names the network in front of each setting, PEFT does not.
        content = {name.removeprefix("transformer."): value for name, value in content.items()}
        if str(start := content.get("init_lora_weights")).startswith(CHANGED_BASE):
            raise ContractError(
                f"was started with {start}, which changed the weights it belongs to: convert it to a plain LoRA "
                "(PEFT's path_initial_model_for_weight_conversion)"
            )
        alpha, patterns = content.get("lora_alpha"), content.get("alpha_pattern") or {}
        try:
            patterns = {str(re.compile(pattern).pattern): float(value) for pattern, value in patterns.items()}
            return cls(None if alpha is None else float(alpha), patterns, content.get("use_rslora") is True)
        except (AttributeError, TypeError, re.error) as error:
            raise ValueError(error) from error

    def scale(self, name: str, pair: Pair) -> float:
        """What B A is multiplied by: alpha / rank, 1 where nothing tells alpha."""
        rank = len(pair["down"])
        if "alpha" in pair:
            return float(pair["alpha"].item()) / rank
        matching = (pattern for pattern in self.alpha_pattern if re.fullmatch(rf"(.*\.)?({pattern})", name))
        pattern = next(matching, None)
        alpha = self.lora_alpha if pattern is None else self.alpha_pattern[pattern]
        if alpha is None:
            return 1.0
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _read(path: Path) -> tuple[dict[str, Tensor], _Settings]:
    """A file's tensors, and the settings in it or, for a file named as PEFT names it, beside it."""
    if not path.is_file():
        raise ContractError(f"there is no LoRA file {path}: pass FILE.safetensors or FILE.safetensors:STRENGTH")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
    except Exception as error:  # safetensors raises its own class for a damaged file, OSError for an unreadable one
        raise ContractError(f"cannot read {path} ({error}): download it again") from error
    beside = path.with_name(PEFT_SETTINGS)
    try:
        if DIFFUSERS_SETTINGS in metadata:
            return tensors, _Settings.from_json(metadata[DIFFUSERS_SETTINGS])
        if "lora_alpha" in metadata:
            return tensors, _Settings(float(metadata["lora_alpha"]))
        if path.name == PEFT_WEIGHTS and beside.is_file():
            return tensors, _Settings.from_json(beside.read_bytes())
    except ContractError as error:
        raise ContractError(f"{path} {error}") from error
    except (OSError, ValueError) as error:
        raise ContractError(f"the LoRA settings of {path} cannot be read ({error}): download it again") from error
    return tensors, _Settings()


def _pairs(path: Path, tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, Pair]:
    """The tensors by layer. Raises ``ContractError`` unless each of them has its place."""
    # Trainers of ComfyUI LoRAs write a layer's name with underscores.
    layers = {f"lora_unet_{name.replace('.', '_')}": name for name in shapes} | {name: name for name in shapes}
    matches = {key: KEY.fullmatch(key) for key in tensors}
    if not any(matches.values()):
        raise ContractError(f"{path} holds no LoRA but {some(list(tensors))}. {_what_fits(shapes)}")
    keys: dict[str, dict[str, str]] = {}
    problems: dict[str, list[str]] = {"unknown": [], "given twice": [], "without its other half": []}
    for key, match in matches.items():
        if match is None or match["layer"] not in layers:
            problems["unknown"].append(key)
        elif keys.setdefault(layers[match["layer"]], {}).setdefault(HALVES[match["half"]], key) != key:
            problems["given twice"].append(key)
    for halves in keys.values():
        if not {"down", "up"} <= halves.keys():
            problems["without its other half"] += halves.values()
    pairs = {name: {half: tensors[key] for half, key in halves.items()} for name, halves in keys.items()}
    problems["of another shape"] = [text for name, pair in pairs.items() for text in _misfits(name, pair, shapes[name])]
    if any(problems.values()):
        listed = "; ".join(f"{len(found)} {problem}: {some(found)}" for problem, found in problems.items() if found)
        raise ContractError(f"{path} does not fit the DiT: {listed}. {_what_fits(shapes)}")
    return pairs


def _misfits(name: str, pair: Pair, shape: torch.Size) -> list[str]:
    """What is wrong with the shapes and dtypes of a pair, in words."""
    rank = len(pair["down"]) if "down" in pair and pair["down"].ndim else 0
    fitting = {"down": [rank or "rank", shape[1]], "up": [shape[0], rank or "rank"]}
    wrong = [
        f"{half} of {name} is {tensor.dtype} {list(tensor.shape)}, not floating-point [{', '.join(map(str, wanted))}]"
        for half, wanted in fitting.items()
        if (tensor := pair.get(half)) is not None and (list(tensor.shape) != wanted or not tensor.is_floating_point())
    ]
    if "alpha" in pair and pair["alpha"].numel() != 1:
        wrong.append(f"alpha of {name} has shape {list(pair['alpha'].shape)}, not one number")
    return wrong


def _what_fits(shapes: Mapping[str, torch.Size]) -> str:
    layers = sorted({re.sub(r"\.\d+\.", ".N.", name) for name in shapes})
    return (
        "What fits: LAYER.lora_A.weight [rank, in] with LAYER.lora_B.weight [out, rank], or lora_down with lora_up, "
        f"for LAYER one of {', '.join(layers)}"
    )
