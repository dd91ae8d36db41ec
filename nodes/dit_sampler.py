"""CONDITIONING and an empty or real LATENT to a LATENT, with the model set's diffusion transformer."""

from typing import Any

from ..host.denoiser import TEXT_REUSE, Shortcuts
from ..host.latents import MAX_SEED, initial_noise
from ..host.sampler import SAMPLERS
from ..host.sampling import Sampling, Settings
from ..host.step_cache import LARGEST_SHARE
from . import comfy
from .comfy import io


def _optional_inputs() -> list[io.Input]:
    """What a graph need not set: how the steps are spaced and taken, and what may be left out."""
    return [
        io.Combo.Input(
            "sampler",
            options=list(SAMPLERS),
            default="euler",
            optional=True,
            tooltip="euler is the model's own. The others need fewer steps: adams_bashforth_2m half as many; "
            "dpmpp_2m too, with the schedule unstretched.",
        ),
        comfy.schedule_input(optional=True),
        io.Sigmas.Input("sigmas", optional=True, tooltip="Noise levels of your own, in place of schedule and steps."),
        io.Combo.Input(
            "text_reuse",
            options=list(TEXT_REUSE),
            default="on",
            optional=True,
            tooltip="The text's keys and values once per prompt, which changes nothing but the time; 'off' "
            "computes them in every step, 'check' compares both.",
        ),
        io.Float.Input(
            "step_cache",
            default=0.0,
            min=0.0,
            max=LARGEST_SHARE,
            step=0.05,
            round=0.01,
            optional=True,
            tooltip="Approximate. This share of the steps takes the velocity of the step before. 0 is off; 0.25 is 1.3 "
            "times as fast, 51 dB from the exact picture (the demo model, 25 steps).",
        ),
        io.Float.Input(
            "first_block_cache",
            default=0.0,
            min=0.0,
            max=1.0,
            step=0.01,
            round=0.001,
            optional=True,
            tooltip="Approximate. Blocks are skipped while the first one's change differs by less than this. 0 is off; "
            "0.25 is 1.65 times as fast, 43 dB from the exact picture (the demo model, 25 steps).",
        ),
    ]


class CoreAIDiTSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CoreAIDiTSampler",
            display_name="Core AI DiT Sampler",
            category=comfy.CATEGORY,
            description="Denoises latents on the model's own schedule.",
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
                comfy.steps_input(),
                io.Float.Input(
                    "cfg",
                    default=1.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    round=0.01,
                    tooltip="True classifier-free guidance. 1 is off; other values take twice as long.",
                ),
                comfy.denoise_input(),
                *_optional_inputs(),
                comfy.keep_input(),
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
        sampler: str = "euler",
        schedule: str = "model",
        sigmas: Any = None,
        text_reuse: str = "on",
        step_cache: float = 0.0,
        first_block_cache: float = 0.0,
        keep_loaded: str = "auto",
    ) -> io.NodeOutput:
        model_set = comfy.model_set(model)
        statistics = model_set.latent_statistics
        start = comfy.read_start(latent_image, statistics)
        batch, _, height, width = start.latents.shape
        shortcuts = Shortcuts(text_reuse, first_block_cache, step_cache)
        sampling = Sampling(
            model_set,
            positive=comfy.from_conditioning(positive, "positive"),
            negative=None if negative is None else comfy.from_conditioning(negative, "negative"),
            noise=initial_noise(seed, height, width, batch, start.batch_index),
            settings=Settings(steps, cfg, sampler, schedule, comfy.from_sigmas(sigmas), shortcuts),
            latents=start.latents,
            mask=start.mask,
            denoise=denoise,
            keep_loaded=keep_loaded,
        )
        ui = comfy.sample_with_progress(sampling.run(), sampling.total_steps, (height, width), model_set.preview_map)
        return io.NodeOutput(comfy.write_latent(latent_image, sampling.tokens, (height, width), statistics), ui=ui)
