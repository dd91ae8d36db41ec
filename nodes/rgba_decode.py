"""LATENT to pictures with alpha, with the model set's VAE decoder."""

from typing import Any

from ..host.pipeline import decode
from ..host.tiling import ANY_TILE
from . import comfy
from .comfy import io


class CoreAIRGBADecode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CoreAIRGBADecode",
            display_name="Core AI RGBA Decode",
            category=comfy.CATEGORY,
            description="Decodes latents to pictures with real transparency.",
            inputs=[
                comfy.model_input(),
                io.Latent.Input(
                    "samples",
                    tooltip="Latents of this model. Each picture size needs its own VAE bundle, or 'tiled'.",
                ),
                comfy.keep_input(),
                io.Boolean.Input(
                    "tiled",
                    default=False,
                    optional=True,
                    tooltip="Draw a size that has no VAE bundle of its own from overlapping tiles of one that has: "
                    "nearly the same picture.",
                ),
            ],
            outputs=[
                io.Image.Output("rgb", display_name="IMAGE", tooltip="The colours alone, not multiplied by alpha."),
                io.Mask.Output(
                    "mask",
                    display_name="MASK",
                    tooltip="1 where the picture is transparent, as Join Image with Alpha takes it. Where a mask "
                    "chooses what to keep, as in ImageCompositeMasked, put InvertMask before it.",
                ),
                io.Image.Output(
                    "rgba", display_name="RGBA", tooltip="Colours and alpha: Save Image writes it as a transparent PNG."
                ),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, model: str, **_: Any) -> str:
        return comfy.fingerprint(model)

    @classmethod
    def execute(
        cls, model: str, samples: dict[str, Any], keep_loaded: str = "auto", tiled: bool = False
    ) -> io.NodeOutput:
        model_set = comfy.model_set(model)
        tokens = comfy.read_tokens(samples, model_set.latent_statistics)
        height, width = samples["samples"].shape[-2:]
        images = decode(model_set, tokens, height, width, keep_loaded, ANY_TILE if tiled else None)
        rgb, mask, rgba = comfy.to_pictures(images, len(tokens))
        return io.NodeOutput(rgb, mask, rgba, ui=comfy.pictures_ui(rgba))
