"""Workflows of ComfyUI's own nodes on ``CoreAIModel``."""

from typing import Any

from .server import Workflow
from .workflows import TEXT, Link, node


def native(text: str = TEXT, *, model: str = "tiny", width: int = 192, height: int = 128, batch: int = 1) -> Workflow:
    """Nodes ``model``, ``text`` and ``start``: what every native sampler begins with."""
    return {
        "model": node("CoreAIModel", model=model),
        "text": node("CLIPTextEncode", clip=["model", 1], text=text),
        "start": node("CoreAIEmptyLatent", model=model, width=width, height=height, batch_size=batch),
    }


def k_sampler(name: str = "sampler", **inputs: Any) -> Workflow:
    """A KSampler on the nodes of ``native``."""
    links: dict[str, Link] = {
        "model": ["model", 0],
        "positive": ["text", 0],
        "negative": ["text", 0],
        "latent_image": ["start", 0],
    }
    settings = {"seed": 7, "steps": 2, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    return {name: node("KSampler", **links | settings | inputs)}


def custom_sampler(guider: Workflow | None = None, **sigmas: Any) -> Workflow:
    """SamplerCustomAdvanced with euler and ``CoreAISigmas`` on the nodes of ``native``; its latents are saved."""
    settings = {"model": "tiny", "steps": 2, "width": 192, "height": 128, "schedule": "model", "denoise": 1.0}
    return {
        "noise": node("RandomNoise", noise_seed=7),
        "guider": node("BasicGuider", model=["model", 0], conditioning=["text", 0]),
        "euler": node("KSamplerSelect", sampler_name="euler"),
        "sigmas": node("CoreAISigmas", **settings | sigmas),
        "sampler": node(
            "SamplerCustomAdvanced",
            noise=["noise", 0],
            guider=["guider", 0],
            sampler=["euler", 0],
            sigmas=["sigmas", 0],
            latent_image=["start", 0],
        ),
        **(guider or {}),
        **saved("sampler"),
    }


def saved(name: str) -> Workflow:
    """The latents of a node, saved by ``save_latents``."""
    return {"save_latents": node("SaveLatent", samples=[name, 0], filename_prefix="native")}
