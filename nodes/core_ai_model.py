"""A model set as MODEL, CLIP and VAE, for ComfyUI's own nodes."""

from . import comfy
from .comfy import io
from .comfy_native import load_native


class CoreAIModel(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CoreAIModel",
            display_name="Core AI Model",
            category=comfy.CATEGORY,
            description="A model set for ComfyUI's own nodes: text encoders, samplers, schedulers and decoders.",
            inputs=[comfy.model_input(), comfy.keep_input()],
            outputs=[
                io.Model.Output(
                    tooltip="For KSampler, guiders and schedulers. Start from Core AI Empty Latent. LoRAs, ControlNets "
                    "and attention patches cannot change a compiled graph."
                ),
                io.Clip.Output(tooltip="For CLIP Text Encode. The prompt is text as typed, (word:1.2) weighs nothing."),
                io.Vae.Output(tooltip="For VAE Decode, whose IMAGE then has four channels. It cannot encode."),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, model: str, **_: str) -> str:
        return comfy.fingerprint(model)

    @classmethod
    def execute(cls, model: str, keep_loaded: str = "auto") -> io.NodeOutput:
        return io.NodeOutput(*load_native(comfy.model_set(model), keep_loaded))
