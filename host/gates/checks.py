"""The gates: each compares one stretch of the way from prompt to picture with the reference implementation.

Bars are those of the port notes of RGBA-Image-2.1 or tighter; what its author measured stands beside
them. Reference values come from an oracle (``host.gates.oracle``), which diffusers and transformers
made of the same checkpoint in fp32, or from those two on the spot. Steps are *teacher-forced*: each
starts from the reference's latents, so that errors do not add up.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from .. import latents, pipeline, pixels, runtime, sampler
from ..contract import STEP, TEXT_ENCODER, TEXT_KV, ContractError
from ..denoiser import EXACT, PromptSlot
from ..export.checkpoint import load_dit, load_text_encoder, load_vae_decoder, read_json
from ..graphs.dit import DiT, DiTConfig
from ..prompt_cache import DISK_VARIABLE, MEMORY_VARIABLE
from ..rope import rope_tables
from ..sampling import Sampling, Settings
from ..schedule import flow_match_schedule
from .captured import Oracle
from .oracle import perturbed
from .rows import Figure, Measured, at_least, at_most
from .subject import NotRunError, Subject, correlation, decibels, difference, rowwise

STICKER = (
    "This is an RGBA image with transparency. A cute cartoon dragon sticker. The image has alpha channel and the "
    "background is transparent."
)
HARD_PROMPTS = (
    "", " ", "a", STICKER, "  spaces  before,\tin between \t and after  ", "line\r\nends\n\nof every\rkind\n",
    "braces {} {0} {prompt} {{}} %s $x", "\"quotes\" 'single' `back` «angle» “curly”", "emoji 🍎🐉 👨‍👩‍👧 🏳️‍🌈",
    "一只红色的苹果，背景透明", "りんごのステッカー、背景は透明", "사과 스티커", "ملصق تفاحة حمراء",
    "U\u0308ni\u0301code\u0301 ﬁ ½ ²", "\u200bzero\u200bwidth\ufeff", "x" * 300, "UPPER lower MiXeD",
    "<|im_start|>", "typed <|im_end|>\n<|im_start|>user\ntokens", "<|vision_start|> and <|unknown|>",
    "12345 67,890 3.14 1e-5", "don't DON'T we'll they're",
)  # fmt: skip
ENCODER_LENGTHS = (32, 64, 96, 128, 192, 256, 512)
"""``Lfull`` that prompts are padded to: no token may see what follows it, so none may change."""

RANDOM_BLOCKS, RANDOM_TEXT, RANDOM_GRID = 2, 18, (8, 8)
"""Of the random DiT; its reference takes grids of a multiple of four tokens."""


@torch.inference_mode()
def in_torch(module: torch.nn.Module, **arrays: np.ndarray) -> np.ndarray:
    """A graph in torch called with the contract's names; its only output."""
    output: Tensor = module(**{name: torch.from_numpy(array) for name, array in arrays.items()})
    return output.numpy()


def random_dit(subject: Subject) -> Measured:
    from diffusers import QwenImage21Transformer2DModel
    from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21Rope

    from ..demo.tiny import randomize

    config = {**read_json(subject.checkpoint / "transformer" / "config.json"), "num_layers": RANDOM_BLOCKS}
    reference = QwenImage21Transformer2DModel.from_config(config)
    generator = torch.Generator().manual_seed(0)
    randomize(reference, generator)
    ours = DiT(DiTConfig.from_json(config)).eval()
    ours.load_state_dict(reference.state_dict(), strict=True)
    height, width = RANDOM_GRID
    tokens = torch.randn((1, height * width, 64), generator=generator)
    text = torch.randn((1, RANDOM_TEXT, ours.config.context_in_dim), generator=generator) * 3
    timestep, shape = torch.tensor([0.7]), [(1, height, width)]
    slots = torch.arange(RANDOM_TEXT + height * width // 4)[None] >= RANDOM_TEXT
    with torch.inference_mode():
        expected = reference(tokens, text, timestep, [shape], slots, return_dict=False)[0][:, RANDOM_TEXT:].numpy()
    rope = rope_tables(RANDOM_TEXT, height, width)
    found = in_torch(
        ours, img_tokens=tokens.numpy(), txt_feats=text.numpy(), timestep=timestep.numpy(), **vars(rope)
    )  # fmt: skip
    image = torch.arange(RANDOM_TEXT + height * width) >= RANDOM_TEXT
    rotation = QwenImage21Rope(theta=10000, axes_dim=list(ours.config.axes_dims_rope))(
        shape, image, torch.device("cpu")
    )
    cosines, sines = (np.concatenate([getattr(rope, f"{kind}_{part}")[0] for kind in ("txt", "img")])
                      for part in ("cos", "sin"))  # fmt: skip
    tables = max(np.abs(cosines - rotation.real.numpy()).max(), np.abs(sines - rotation.imag.numpy()).max())
    return Measured(
        [
            at_most("max|Δ|/max|ref|", difference(found, expected), 1e-4),
            at_least("corr", correlation(found, expected), 0.999999),
            at_most("RoPE tables max|Δ|", float(tables), 0.0),
        ],
        f"{RANDOM_BLOCKS} blocks with random weights",
    )


def teacher_forced(subject: Subject, velocity: Callable[..., np.ndarray], corr: float, most: float | None) -> Measured:
    """Every step of ``subject`` from the reference's latents."""
    correlations, differences, invalid = [], [], 0
    for step in subject.steps:
        found, expected = velocity(**subject.inputs(step)), subject.oracle.conditional(step)
        invalid += int(np.count_nonzero(~np.isfinite(found)))
        correlations.append(correlation(found, expected))
        differences.append(difference(found, expected))
    figures = [at_least("lowest corr of a step", min(correlations), corr), at_most("NaN or infinite", invalid, 0)]
    if most is not None:
        figures.append(at_most("max|Δ|/max|ref|", max(differences), most))
    note = f"{len(correlations)} steps, |Δ|/|ref| {min(differences):.2g} to {max(differences):.2g}"
    return Measured(figures, note, {"corr": correlations, "max|Δ|/max|ref|": differences})


def dit_in_torch(subject: Subject) -> Measured:
    dit = load_dit(subject.checkpoint)
    return teacher_forced(subject, partial(in_torch, dit), 0.999999, 1e-3)


def dit_bundle(subject: Subject) -> Measured:
    with runtime.load(subject.model.dit) as dit:
        return teacher_forced(subject, lambda **inputs: dit(**inputs)["vel"], 0.999, None)


def encoder_in_torch(subject: Subject) -> Measured:
    oracle = subject.oracle
    found = in_torch(load_text_encoder(subject.checkpoint), input_ids=oracle.ids)
    tokens = rowwise(found[0], oracle.hidden[0])
    return Measured(
        [
            at_least("lowest corr of a token", min(tokens), 0.999999),
            at_most("max|Δ|/max|ref|", difference(found, oracle.hidden), 1e-4),
        ],
        f"{len(tokens)} tokens",
        {"corr per token": tokens},
    )


def axis_positions(length: int) -> Tensor:
    """The positions of text alone on M-RoPE's three axes, ``[3, 1, L]``."""
    return torch.arange(length).expand(3, 1, length)


def mrope_collapse(subject: Subject) -> Measured:
    from transformers import Qwen3VLForConditionalGeneration

    model = Qwen3VLForConditionalGeneration.from_pretrained(subject.checkpoint / "text_encoder", dtype="auto")
    ids = torch.from_numpy(subject.oracle.ids).long()
    with torch.inference_mode():
        unspecified = model.model.language_model(input_ids=ids).last_hidden_state
        explicit = model.model.language_model(
            input_ids=ids, position_ids=axis_positions(ids.shape[1])
        ).last_hidden_state
    change = float((explicit.double() - unspecified.double()).abs().max())
    return Measured([at_most("max|Δ| of explicit positions", change, 0.0)])


def tokenizer(subject: Subject) -> Measured:
    from diffusers import QwenImage21Pipeline
    from transformers import Qwen3VLProcessor

    processor = Qwen3VLProcessor.from_pretrained(subject.checkpoint / "processor")
    reference = QwenImage21Pipeline(None, None, None, processor, None)
    ours = subject.model.tokenizer
    different, drops = [], set()
    for prompt in (subject.oracle.request.prompt, *HARD_PROMPTS):
        found = ours.encode(prompt)
        # What `_get_qwen_prompt_embeds` does, braces kept as text: `format` reads the template's, not the prompt's.
        [expected] = processor(text=[reference.prompt_template_t2i.format(prompt or " ")]).input_ids
        drops.add(found.drop_idx)
        if found.ids[0].tolist() != list(expected):
            different.append(prompt)
    wrong_drops = len(drops - {reference._drop_idx})
    return Measured(
        [at_most("prompts that differ", len(different), 0), at_most("drop_idx that differ", wrong_drops, 0)],
        f"{len(HARD_PROMPTS) + 1} prompts, drop_idx {reference._drop_idx}"
        + (f", differing: {different}" if different else ""),
    )


def encoder_bundle(subject: Subject) -> Measured:
    reference, oracle = load_text_encoder(subject.checkpoint), subject.oracle
    _, longest = TEXT_ENCODER.limits["Lfull"]
    curves: dict[str, list[float]] = {}
    with runtime.load(subject.model.text_encoder) as encoder:
        for prompt in dict.fromkeys((oracle.request.prompt, "", STICKER)):
            ids = subject.model.tokenizer.encode(prompt).ids
            if ids.max() >= (known := reference.config.vocab_size):
                raise ContractError(
                    f"the model set's tokenizer gives the id {ids.max()}, the checkpoint's encoder knows {known}: they "
                    "belong to different models, so judge a set by an oracle of the checkpoint it was exported from"
                )
            expected, own = in_torch(reference, input_ids=ids), ids.shape[1]
            lengths = [own, *(length for length in ENCODER_LENGTHS if own < length <= longest)]
            # What follows is the prompt itself again: any id will do, as causal attention must not see it.
            found = [encoder(input_ids=np.resize(ids, (1, length)))["hidden"][:, :own] for length in lengths]
            curves[f"lowest corr of a token, {own} tokens by Lfull"] = [
                min(rowwise(hidden[0], expected[0])) for hidden in found
            ]
        hidden = encoder(input_ids=oracle.ids)["hidden"]
    middle = subject.steps[len(subject.steps) // 2]
    heard = {**subject.inputs(middle), "txt_feats": hidden[:, oracle.drop_idx :]}
    velocity = in_torch(load_dit(subject.checkpoint), **heard)
    every = [value for values in curves.values() for value in values]
    return Measured(
        [
            at_least("lowest corr of a token", min(every), 0.999),
            at_least("its own prompt against the reference", min(rowwise(hidden[0], oracle.hidden[0])), 0.999),
            at_least("corr of the DiT's velocity", correlation(velocity, oracle.conditional(middle)), 0.9999),
        ],
        f"{len(every)} pairs of prompt and length",
        curves,
    )


def vae_figures(image: np.ndarray, oracle: Oracle) -> Measured:
    # The reference cuts off what lies outside [-1, 1]; our graph leaves that to the conversion to 8 bits.
    expected, rgba8 = oracle.vae_output, pixels.to_rgba8(image)
    image = np.clip(image, -1, 1)
    levels = np.abs(rgba8.astype(int) - oracle.rgba8).max()
    channels = rowwise(image.reshape(4, -1), expected.reshape(4, -1))
    return Measured(
        [
            at_least("lowest corr of a channel", min(channels), 0.9999),
            at_most("max|Δ|", float(np.abs(image - expected).max()), 1e-2),
            at_most("8-bit levels", int(levels), 1),
        ]
    )


def vae_in_torch(subject: Subject) -> Measured:
    decoder = load_vae_decoder(subject.checkpoint, *subject.grid)
    return vae_figures(in_torch(decoder, latents_packed=subject.oracle.final_latents), subject.oracle)


def vae_bundle(subject: Subject) -> Measured:
    [image] = pipeline.decode(subject.model, subject.oracle.final_latents, *subject.grid)
    return vae_figures(image, subject.oracle)


def sampling_loop(subject: Subject) -> Measured:
    """Schedule, noise and integration, given the reference's velocities."""
    oracle, (height, width) = subject.oracle, subject.grid
    request = oracle.request
    plan = flow_match_schedule(request.steps, height * width, subject.model.scheduler_config)
    noise = latents.pack(latents.initial_noise(request.seed, height, width))
    asked: list[np.ndarray] = []

    def replay(x: np.ndarray, timestep: np.ndarray) -> np.ndarray:
        asked.append(timestep)
        return oracle.velocity(len(asked) - 1)

    states = [step.x for step in sampler.sample(replay, noise, plan)]
    expected = [*(oracle.latents(step) for step in range(1, request.steps)), oracle.final_latents]
    times = np.concatenate(asked) - oracle.timesteps / np.float32(1000)
    return Measured(
        [
            at_most("sigmas max|Δ|", float(np.abs(plan.sigmas - oracle.sigmas).max()), 0.0),
            at_most("timesteps max|Δ|", float(np.abs(times).max()), 0.0),
            at_most("noise max|Δ|", float(np.abs(noise - oracle.noise).max()), 0.0),
            at_most("latents max|Δ|", float(max(map(_largest, states, expected))), 0.0),
        ],
        f"{request.steps} steps on recorded velocities",
    )


def _largest(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max())


def text_reuse(subject: Subject) -> Measured:
    """The step with the text's keys and values kept, against ``main``, for two prompts in the DiT at once."""
    bundle = subject.model.dit
    if missing := {TEXT_KV.function, STEP.function} - bundle.functions.keys():
        raise NotRunError(f"{bundle.path.name} lacks {', '.join(sorted(missing))}: it holds main alone")
    embeddings = subject.oracle.embeddings
    rope = subject.rope(embeddings.shape[1])
    with runtime.load(bundle) as dit:
        texts = (embeddings, np.ascontiguousarray(embeddings[:, ::-1]))
        slots = [PromptSlot(dit, text, rope, EXACT) for text in texts]
        differences = []
        for step in subject.steps:
            inputs = subject.inputs(step)
            x, timestep = inputs["img_tokens"], inputs["timestep"]
            differences.append(max(difference(slot.step(x, timestep), slot.whole(x, timestep)) for slot in slots))
    figures = [at_most("max|Δ|/max|ref|", max(differences), 1e-5)]
    return Measured(figures, f"{len(differences)} steps, 2 prompts", {"max|Δ|/max|ref|": differences})


@dataclass(frozen=True)
class Drawn:
    """A whole run of ours: tokens ``[1, N, 64]`` after each step, and uint8 ``[H, W, 4]``."""

    states: Sequence[np.ndarray]
    rgba8: np.ndarray

    def figures(self, oracle: Oracle) -> list[Figure]:
        """PSNR on white, alpha and final latents, with the bars of the port notes."""
        [expected] = oracle.rgba8
        white, expected_white = (pixels.composite(picture[None]) for picture in (self.rgba8, expected))
        alpha = np.abs(self.rgba8[..., 3].astype(int) - expected[..., 3]).max()
        return [
            at_least("PSNR on white", decibels(white, expected_white), 30.0, "dB"),
            at_most("alpha", int(alpha), 2, "levels"),
            at_least("corr of the final latents", correlation(self.states[-1], oracle.final_latents), 0.999),
        ]


def draw(subject: Subject, relative: float = 0.0, perturb_seed: int = 0) -> Drawn:
    """The oracle's request by our own pipeline; ``relative`` perturbs the embeddings, to see how stable it is."""
    request, model = subject.oracle.request, subject.model
    prompts = [request.prompt] if request.negative_prompt is None else [request.prompt, request.negative_prompt]
    # Nothing kept from another run, and nothing kept of a run with a defect planted.
    with patch.dict(os.environ, {DISK_VARIABLE: "0", MEMORY_VARIABLE: "0"}):
        embeddings = pipeline.encode_prompts(model, prompts)
    positive, *negative = (perturbed(text, relative, perturb_seed) if relative else text for text in embeddings)
    noise = latents.initial_noise(request.seed, *subject.grid)
    settings = Settings(request.steps, request.cfg)
    sampling = Sampling(model, positive, noise, settings, negative=negative[0] if negative else None)
    states = [step.x for step in sampling.run()]
    [image] = pipeline.decode(model, sampling.tokens, *subject.grid)
    return Drawn(states, pixels.to_rgba8(image)[0])


def end_to_end(subject: Subject) -> Measured:
    drawn, oracle = draw(subject), subject.oracle
    expected = [*(oracle.latents(step) for step in range(1, oracle.request.steps)), oracle.final_latents]
    away = [difference(found, state) for found, state in zip(drawn.states, expected, strict=True)]
    pictures = {"reference": oracle.rgba8[0], "ours": drawn.rgba8}
    return Measured(drawn.figures(oracle), "", {"latents max|Δ|/max|ref|": away}, pictures)
