"""Workflows in API format, put together from nodes."""

from typing import Any

from .server import Workflow

Link = list[str | int]

TEXT = "a red apple"


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def picture(
    text: str = TEXT,
    *,
    model: str = "tiny",
    width: int = 192,
    height: int = 128,
    batch: int = 1,
    latent_image: Link | None = None,
    **sampler: Any,
) -> Workflow:
    """Prompt to saved RGBA picture: nodes ``prompt``, ``empty``, ``sampler``, ``decode`` and ``save``."""
    return {
        **latents(text, model=model, width=width, height=height, batch=batch, latent_image=latent_image, **sampler),
        "decode": node("CoreAIRGBADecode", model=model, samples=["sampler", 0]),
        "save": node("SaveImage", images=["decode", 2], filename_prefix="picture"),
    }


def latents(
    text: str = TEXT,
    *,
    model: str = "tiny",
    width: int = 192,
    height: int = 128,
    batch: int = 1,
    latent_image: Link | None = None,
    **sampler: Any,
) -> Workflow:
    """Prompt to sampled latents, saved by ``save_latents``."""
    settings = {"seed": 7, "steps": 2, "cfg": 1.0, "denoise": 1.0, **sampler}
    return {
        "prompt": node("CoreAITextEncode", model=model, text=text),
        "empty": node("EmptyLatentImage", width=width, height=height, batch_size=batch),
        "sampler": node(
            "CoreAIDiTSampler",
            model=model,
            positive=["prompt", 0],
            latent_image=latent_image or ["empty", 0],
            **settings,
        ),
        "save_latents": node("SaveLatent", samples=["sampler", 0], filename_prefix="latents"),
    }
