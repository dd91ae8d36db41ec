"""A model set as ComfyUI's own MODEL, CLIP and VAE, so that ComfyUI's own nodes run the Core AI graphs.

Each is ComfyUI's class with the network taken out: MODEL asks the DiT for a velocity, CLIP the text encoder for
embeddings, VAE a decoder for pictures. Nothing is loaded before that. What needs the weights or the inside of a
network, which a compiled graph does not give, is refused where it is connected.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import comfy.conds
import comfy.latent_formats
import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.sample
import comfy.sd
import comfy.supported_models_base
import numpy as np
import torch
from comfy.model_sampling import CONST
from comfy.patcher_extension import WrappersMP

from ..host.contract import DIT, LATENT_CHANNELS, PIXELS_PER_TOKEN, ContractError
from ..host.latents import LatentStatistics, from_vae_space, to_vae_space
from ..host.model_set import ModelSet
from ..host.pipeline import decode, encode_tokens
from ..host.preview import PreviewMap
from ..host.prompt import PromptTokens
from ..host.sampling import check_embeddings
from ..host.schedule import HIGHEST_SIGMA, Schedule
from ..host.tiling import ANY_TILE, Grid
from ..host.velocity import VelocityRun
from .comfy import check_channels, check_conditioning, io, read_tokens, stop_if_interrupted, to_pictures

CPU = torch.device("cpu")
"""Where a native sampler's own arithmetic runs: the graphs take arrays in main memory."""

TOKENS = "coreai"
"""The name of our tokens in what CLIP's ``tokenize`` returns."""

TEXT_ALONE = "use CLIP Text Encode, which gives it text alone"

SIZES_ARE_KNOWN = "downscale_ratio_spacial" in inspect.signature(comfy.sample.fix_empty_latent_channels).parameters
"""Whether ComfyUI gives an empty latent of another model this one's size, as newer versions do."""

MAX_PIXELS = DIT.limits["N"][1] * PIXELS_PER_TOKEN
"""The longest side of a picture: one token high."""


def load_native(model_set: ModelSet, keep_loaded: str) -> "tuple[CoreAIPatcher, comfy.sd.CLIP, CoreAIVAE]":
    """MODEL, CLIP and VAE of a model set; its bundles are looked at, none is loaded."""
    model = CoreAIDiffusion(model_set, keep_loaded)
    patcher = CoreAIPatcher(model, load_device=CPU, offload_device=CPU)
    patcher.add_wrapper(WrappersMP.OUTER_SAMPLE, model.sample)
    return patcher, _clip(model_set, keep_loaded), CoreAIVAE(model_set, keep_loaded)


def size_inputs() -> list[io.Input]:
    """Width and height of a picture in pixels."""
    limits = {"default": 1024, "min": PIXELS_PER_TOKEN, "max": MAX_PIXELS, "step": PIXELS_PER_TOKEN}
    return [
        io.Int.Input(name, **limits, tooltip=f"The picture's {name} in pixels, a multiple of {PIXELS_PER_TOKEN}.")
        for name in ("width", "height")
    ]


def empty_latent(grid: tuple[int, int], batch_size: int, statistics: LatentStatistics) -> dict[str, torch.Tensor]:
    """A LATENT that is zero in model space: not zero in VAE space, so ComfyUI does not take it for another model's."""
    zeros = np.zeros((batch_size, LATENT_CHANNELS, *grid), dtype=np.float32)
    return {"samples": torch.from_numpy(to_vae_space(zeros, statistics))}


def to_sigmas(schedule: Schedule) -> torch.Tensor:
    """SIGMAS, none at all for no steps, as ComfyUI's schedulers have it."""
    return torch.from_numpy(schedule.sigmas if schedule.steps else schedule.sigmas[:0])


def _refused(what: str, instead: str) -> Callable[..., Any]:
    """A method that says why there is no such thing."""

    def refuse(self: Any, *_: Any, **__: Any) -> None:
        raise ContractError(f"a compiled Core AI graph cannot take {what}: {instead}")

    return refuse


no_look_inside = _refused("a node that looks into its network", "remove that node")


class Known(dict[str, Any]):
    """What nodes may look up of a model. What only other models have is refused, by a method of ``_refused``."""

    def __init__(self, known: dict[str, Any], refuse: Callable[..., Any]) -> None:
        super().__init__(known)
        self.refuse = refuse

    def __missing__(self, key: str) -> None:
        self.refuse(self)


class CoreAIPatcher(comfy.model_patcher.ModelPatcher):
    """ComfyUI's handle of a model without weights of its own: guidance may be changed, the network may not."""

    add_patches = add_hook_patches = _refused(
        "a LoRA or other weights", "bake a LoRA in with coreai-rgba export --lora, or remove that node"
    )
    get_key_patches = model_state_dict = add_weight_wrapper = _refused(
        "a node that reads or changes its weights", "remove that node"
    )
    set_model_patch = set_model_patch_replace = set_model_rope_options = _refused(
        "patches of its attention or blocks", "remove that node"
    )

    def get_model_object(self, name: str) -> Any:
        if name.split(".")[0] == "diffusion_model":
            no_look_inside(self)
        return super().get_model_object(name)

    def add_object_patch(self, name: str, obj: Any) -> None:
        """Only the noise schedule may be another one, of the same kind."""
        if name != "model_sampling":
            _refused(f"another {name}", "remove that node")(self)
        if not isinstance(obj, CONST):
            raise ContractError(
                "this is a flow-matching model, for which the node's kind of model sampling is wrong: use "
                "ModelSamplingSD3 or ModelSamplingAuraFlow, or remove that node"
            )
        super().add_object_patch(name, obj)

    def add_wrapper_with_key(self, wrapper_type: str, key: str, wrapper: Callable[..., Any]) -> None:
        if wrapper_type == WrappersMP.DIFFUSION_MODEL:
            _refused("a wrapper of its network", "remove that node; Core AI DiT Sampler has caches of its own")(self)
        super().add_wrapper_with_key(wrapper_type, key, wrapper)


class CoreAILatentFormat(comfy.latent_formats.LatentFormat):
    """The two spaces of latents, as ``host.latents`` has them."""

    latent_channels = LATENT_CHANNELS
    spacial_downscale_ratio = PIXELS_PER_TOKEN  # ComfyUI's spelling

    def __init__(self, statistics: LatentStatistics, preview: PreviewMap) -> None:
        self.statistics = statistics
        self.latent_rgb_factors = preview.weights[:-1, :3].tolist()  # native previews know no alpha
        self.latent_rgb_factors_bias = preview.weights[-1, :3].tolist()

    def process_in(self, latent: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(from_vae_space(latent.cpu().numpy(), self.statistics)).to(latent.device)

    def process_out(self, latent: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(to_vae_space(latent.cpu().numpy(), self.statistics)).to(latent.device)


class Prompt(comfy.conds.CONDConstant):
    """Embeddings that are never joined with others: texts differ in length, and the graph takes one at a time."""

    def can_concat(self, other: comfy.conds.CONDRegular) -> bool:
        return False


class CoreAIDiffusion(comfy.model_base.BaseModel):
    """ComfyUI's model of a flow whose velocity is the DiT's."""

    def __init__(self, model_set: ModelSet, keep_loaded: str) -> None:
        config = comfy.supported_models_base.BASE({"disable_unet_model_creation": True})
        config.latent_format = CoreAILatentFormat(model_set.latent_statistics, model_set.preview_map)
        config.unet_config = Known(config.unet_config, no_look_inside)
        config.sampling_settings = {"shift": _shift(model_set)}
        super().__init__(config, comfy.model_base.ModelType.FLOW)
        self.model_set = model_set
        self.keep_loaded = keep_loaded
        self.run: VelocityRun | None = None

    def get_dtype(self) -> torch.dtype:
        return torch.float32

    def memory_required(self, *_: Any, **__: Any) -> int:
        return 0  # what a bundle needs is asked for when it is loaded

    state_dict_for_saving = _refused("a node that saves it", "it is saved already, as a model set")

    def sample(
        self, executor: Any, noise: torch.Tensor, latent: torch.Tensor, sampler: Any, sigmas: Any, *args: Any, **kw: Any
    ) -> torch.Tensor:
        """Around ``CFGGuider.outer_sample``: what lasts for one run of a native sampler."""
        check_channels(latent)
        if not SIZES_ARE_KNOWN and not torch.count_nonzero(latent):
            raise ContractError(
                "this version of ComfyUI would take an empty latent of another model for one of twice the size: use "
                "Core AI Empty Latent"
            )
        if float(sigmas[0]) > HIGHEST_SIGMA:
            raise ContractError(
                f"the sigmas start at {float(sigmas[0]):g}, this flow's noise levels at 1: use Core AI Sigmas or "
                "BasicScheduler"
            )
        with VelocityRun(self.model_set, self.keep_loaded) as self.run:
            try:
                return executor(noise, latent, sampler, sigmas, *args, **kw)
            finally:
                self.run = None

    def extra_conds(
        self, cross_attn: torch.Tensor | None = None, prompt_type: str = "the", **options: Any
    ) -> dict[str, Prompt]:
        """What of a CONDITIONING goes to ``_apply_model``; everything is checked before anything is loaded."""
        check_conditioning(prompt_type, options)
        if cross_attn is None:
            raise ContractError(f"{prompt_type} conditioning holds no text: encode a prompt, an empty one for nothing")
        check_embeddings(self.model_set.dit, prompt_type, cross_attn.numpy(), len(cross_attn))
        return {"c_crossattn": Prompt(cross_attn.to(CPU, torch.float32))}

    def _apply_model(
        self,
        x: torch.Tensor,
        t: torch.Tensor,
        c_concat: Any = None,
        c_crossattn: torch.Tensor | None = None,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """The denoised pictures ``[B, 64, h, w]`` that ``x`` points at, at the noise levels ``t [B]``."""
        if transformer_options and (transformer_options.get("patches") or transformer_options.get("patches_replace")):
            _refused("patches of its attention or blocks", "remove the node that makes them")(self)
        if self.run is None or c_crossattn is None:
            raise ContractError("the Core AI model was called by itself: use it with KSampler or a guider")
        latents, sigmas, embeddings = x.to(CPU, torch.float32).numpy(), t.tolist(), c_crossattn.numpy()
        velocities = torch.empty(x.shape, dtype=torch.float32)
        for index, sigma in enumerate(sigmas):
            stop_if_interrupted()
            row = index % len(embeddings)
            velocity = self.run(latents[index : index + 1], sigma, embeddings[row : row + 1])
            velocities[index] = torch.from_numpy(velocity[0])
        return self.model_sampling.calculate_denoised(t, velocities.to(x.device), x)


def _shift(model_set: ModelSet) -> float:
    """The schedule's shift for the largest picture the set draws: native schedulers do not know the picture's size."""
    pixels = [height * width for height, width in model_set.vae_decoders]
    tokens = max(pixels) // PIXELS_PER_TOKEN**2 if pixels else DIT.limits["N"][1]
    return math.exp(model_set.scheduler_config.mu(tokens))


class CoreAITokenizer:
    """The model set's tokenizer, as ComfyUI calls one. A prompt is text as typed: ``(word:1.2)`` weighs nothing."""

    def __init__(self, embedding_directory: Any, tokenizer_data: dict[str, Any]) -> None:
        self.model_set: ModelSet = tokenizer_data["model_set"]

    def tokenize_with_weights(
        self, text: str, return_word_ids: bool = False, tokenizer_options: Any = None, **others: Any
    ) -> dict[str, PromptTokens]:
        """The tokens under a key of ours; ``others`` are what nodes for one other model's prompts add."""
        given = [
            name for name, value in others.items() if value is not None and not (isinstance(value, list) and not value)
        ]
        if given:
            _refused(f"a prompt with {', '.join(given)}", TEXT_ALONE)(self)
        return Known({TOKENS: self.model_set.tokenizer.encode(text)}, _refused("prompts in several parts", TEXT_ALONE))


class CoreAITextEncoder(torch.nn.Module):
    """The model set's text encoder, as ComfyUI calls one."""

    dtypes = frozenset({torch.float32})

    def __init__(self, model_set: ModelSet, keep_loaded: str, **_: Any) -> None:
        super().__init__()
        self.model_set = model_set
        self.keep_loaded = keep_loaded

    def reset_clip_options(self) -> None:
        """There are none."""

    def set_clip_options(self, options: dict[str, Any]) -> None:
        """Newer versions of ComfyUI name the device each time; anything else is what a node asks for."""
        if options.keys() - {"execution_device"}:
            _refused("another layer of its text encoder", "remove CLIP Set Last Layer")(self)

    def encode_token_weights(self, tokens: dict[str, PromptTokens]) -> tuple[torch.Tensor, None]:
        """Embeddings ``[1, L, D]``; nothing pooled."""
        [embeddings] = encode_tokens(self.model_set, [tokens[TOKENS]], self.keep_loaded)
        return torch.from_numpy(embeddings), None


def _clip(model_set: ModelSet, keep_loaded: str) -> comfy.sd.CLIP:
    target = comfy.supported_models_base.ClipTarget(CoreAITokenizer, CoreAITextEncoder)
    target.params = {"model_set": model_set, "keep_loaded": keep_loaded}
    options = {"load_device": CPU, "offload_device": CPU, "dtype": torch.float32}
    options["initial_device"] = None  # nowhere yet, or ComfyUI would list the handle that is replaced here as loaded
    clip = comfy.sd.CLIP(target, tokenizer_data={"model_set": model_set}, model_options=options)
    clip.patcher = CoreAIPatcher(clip.cond_stage_model, load_device=CPU, offload_device=CPU)
    clip.patcher.is_clip = True
    return clip


class CoreAIVAE(comfy.sd.VAE):
    """Decodes to RGBA with the set's decoders, each of which draws one size. There is no encoder."""

    latent_channels = LATENT_CHANNELS
    latent_dim = 2
    output_channels = 4
    downscale_ratio = upscale_ratio = PIXELS_PER_TOKEN
    size = 0
    device = output_device = CPU
    vae_dtype = torch.float32

    def __init__(self, model_set: ModelSet, keep_loaded: str) -> None:  # ComfyUI's own reads a checkpoint
        self.model_set = model_set
        self.keep_loaded = keep_loaded
        self.first_stage_model = torch.nn.Module()
        self.patcher = CoreAIPatcher(self.first_stage_model, load_device=CPU, offload_device=CPU)

    encode = encode_tiled = _refused(
        "pictures to encode",
        "it has a decoder only; start from a latent of Core AI DiT Sampler, or of KSampler with it",
    )
    get_sd = _refused("a node that saves it", "it is saved already, as a model set")

    def decode(self, samples_in: torch.Tensor, vae_options: dict[str, Any] | None = None) -> torch.Tensor:
        """VAE space ``[B, 64, h, w]`` to pictures ``[B, 16 h, 16 w, 4]``."""
        return self._decode(samples_in)

    def decode_tiled(
        self, samples: torch.Tensor, tile_x: int | None = None, tile_y: int | None = None, *_: Any, **__: Any
    ) -> torch.Tensor:
        """``decode`` by tiles of at most ``tile_y`` x ``tile_x`` latent pixels, overlapping as this decoder needs."""
        largest = ANY_TILE if tile_x is None or tile_y is None else (tile_y, tile_x)
        return self._decode(samples, largest)

    def _decode(self, samples: torch.Tensor, largest_tile: Grid | None = None) -> torch.Tensor:
        tokens = read_tokens({"samples": samples}, self.model_set.latent_statistics)
        height, width = samples.shape[-2:]
        images = decode(self.model_set, tokens, height, width, self.keep_loaded, largest_tile)
        _, _, rgba = to_pictures(images, len(tokens))
        return rgba
