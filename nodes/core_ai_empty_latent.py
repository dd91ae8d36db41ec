"""An empty LATENT of a picture's size, for ComfyUI's own samplers on ``CoreAIModel``."""

from ..host.pipeline import grid_of
from . import comfy
from .comfy import io
from .comfy_native import empty_latent, size_inputs


class CoreAIEmptyLatent(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CoreAIEmptyLatent",
            display_name="Core AI Empty Latent",
            category=comfy.CATEGORY,
            description="An empty latent for KSampler and other native samplers on Core AI Model. Core AI DiT Sampler "
            "takes any empty latent.",
            inputs=[
                comfy.model_input(),
                *size_inputs(),
                io.Int.Input("batch_size", default=1, min=1, max=4096, tooltip="The number of pictures."),
            ],
            outputs=[io.Latent.Output(tooltip="An empty latent of this size.")],
        )

    @classmethod
    def fingerprint_inputs(cls, model: str, **_: int) -> str:
        return comfy.fingerprint(model)

    @classmethod
    def execute(cls, model: str, width: int, height: int, batch_size: int) -> io.NodeOutput:
        statistics = comfy.model_set(model).latent_statistics
        return io.NodeOutput(empty_latent(grid_of(width, height), batch_size, statistics))
