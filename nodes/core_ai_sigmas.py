"""SIGMAS of the exact schedule, for ComfyUI's own samplers on ``CoreAIModel``."""

from typing import Any

from ..host.pipeline import grid_of
from ..host.sampling import Settings
from . import comfy
from .comfy import io
from .comfy_native import size_inputs, to_sigmas


class CoreAISigmas(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CoreAISigmas",
            display_name="Core AI Sigmas",
            category=comfy.CATEGORY,
            description="The noise levels of Core AI DiT Sampler, which depend on the picture's size, for "
            "SamplerCustomAdvanced.",
            inputs=[
                comfy.model_input(),
                comfy.steps_input(),
                *size_inputs(),
                comfy.schedule_input(),
                comfy.denoise_input(),
                io.Latent.Input(
                    "latent", optional=True, tooltip="Gives the size of the picture, in place of width and height."
                ),
            ],
            outputs=[io.Sigmas.Output(tooltip="Noise levels from 1, or less with a denoise below 1, to 0.")],
        )

    @classmethod
    def fingerprint_inputs(cls, model: str, **_: Any) -> str:
        return comfy.fingerprint(model)

    @classmethod
    def execute(
        cls,
        model: str,
        steps: int,
        width: int,
        height: int,
        schedule: str,
        denoise: float,
        latent: dict[str, Any] | None = None,
    ) -> io.NodeOutput:
        model_set = comfy.model_set(model)
        grid = grid_of(width, height)
        if latent is not None:
            grid = comfy.read_start(latent, model_set.latent_statistics).latents.shape[2:]
        found = Settings(steps, schedule=schedule).schedule_for(model_set, grid[0] * grid[1], denoise)
        return io.NodeOutput(to_sigmas(found))
