"""CONDITIONING and an empty or real LATENT to a LATENT, with the model set's diffusion transformer."""

from typing import Any

from ..host.latents import MAX_SEED, initial_noise
from ..host.pipeline import MAX_STEPS, Sampling
from . import comfy
from .comfy import io


class CoreAIDiTSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CoreAIDiTSampler",
            display_name="Core AI DiT Sampler",
            category=comfy.CATEGORY,
            description="Denoises latents with Euler's method on the model's own schedule.",
            inputs=[
                comfy.model_input(),
                io.Conditioning.Input("positive", tooltip="What to draw, from Core AI Text Encode."),
                io.Conditioning.Input(
                    "negative",
                    optional=True,
                    tooltip="What to move away from. Needed for, and used at, a cfg other than 1.",
                ),
                io.Latent.Input(
                    "latent_image",
                    tooltip="An empty latent of any model gives the size and the batch. A latent of this model is "
                    "where a denoise below 1 starts.",
                ),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=MAX_SEED,
                    control_after_generate=True,
                    tooltip="The seed of the noise.",
                ),
                io.Int.Input(
                    "steps", default=40, min=1, max=MAX_STEPS, tooltip="Denoising steps; the model's own is 40."
                ),
                io.Float.Input(
                    "cfg",
                    default=1.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    round=0.01,
                    tooltip="True classifier-free guidance. 1 is off; other values take twice as long.",
                ),
                io.Float.Input(
                    "denoise",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="How much of the latent is drawn anew: 1 is all of it.",
                ),
            ],
            outputs=[io.Latent.Output(tooltip="The sampled latents, in the VAE space that native nodes expect.")],
        )

    @classmethod
    def fingerprint_inputs(cls, model: str, **_: Any) -> str:
        return comfy.fingerprint(model)

    @classmethod
    def execute(
        cls,
        model: str,
        positive: list[list[Any]],
        latent_image: dict[str, Any],
        seed: int,
        steps: int,
        cfg: float,
        denoise: float,
        negative: list[list[Any]] | None = None,
    ) -> io.NodeOutput:
        model_set = comfy.model_set(model)
        statistics = model_set.latent_statistics
        start = comfy.read_start(latent_image, statistics)
        batch, _, height, width = start.latents.shape
        sampling = Sampling(
            model_set,
            positive=comfy.from_conditioning(positive, "positive"),
            negative=None if negative is None else comfy.from_conditioning(negative, "negative"),
            noise=initial_noise(seed, height, width, batch, start.batch_index),
            latents=start.latents,
            mask=start.mask,
            steps=steps,
            cfg=cfg,
            denoise=denoise,
        )
        comfy.sample_with_progress(sampling.run(), sampling.total_steps, (height, width))
        return io.NodeOutput(comfy.write_latent(latent_image, sampling.tokens, (height, width), statistics))
