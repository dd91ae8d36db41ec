"""Prompt to CONDITIONING."""

from typing import Any

from ..host.pipeline import encode_prompt
from . import comfy
from .comfy import io


class CoreAITextEncode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CoreAITextEncode",
            display_name="Core AI Text Encode",
            category=comfy.CATEGORY,
            description="Encodes a prompt with the model set's text encoder.",
            inputs=[
                comfy.model_input(),
                io.String.Input(
                    "text",
                    multiline=True,
                    dynamic_prompts=True,
                    tooltip="The prompt. For a transparent picture say so: 'This is an RGBA image with transparency. … "
                    "The image has alpha channel and the background is transparent.'",
                ),
                comfy.keep_input(),
            ],
            outputs=[io.Conditioning.Output(tooltip="The encoded prompt, for the Core AI sampler.")],
        )

    @classmethod
    def fingerprint_inputs(cls, model: str, **_: Any) -> str:
        return comfy.fingerprint(model)

    @classmethod
    def execute(cls, model: str, text: str, keep_loaded: str = "auto") -> io.NodeOutput:
        return io.NodeOutput(comfy.to_conditioning(encode_prompt(comfy.model_set(model), text, keep_loaded)))
