"""Prompt to RGBA picture with a model set: encode, sample, decode.

Each stage loads its bundle, uses it and releases it, because all three together need 58 GB. The
stages are separate so that a graph of nodes can run them one by one; ``generate`` runs them all.
Grids are in latent tokens (pixels / 16); arrays are float32.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import psutil

from . import prompt_cache, runtime
from .bundle import Bundle
from .contract import PIXELS_PER_TOKEN, ContractError
from .latents import initial_noise
from .model_set import ModelSet
from .pixels import to_rgba8
from .prompt import PromptTokens
from .sampling import DEFAULTS, Sampling, Settings, check_grid

DECODER_BYTES_PER_PIXEL = 2000
"""Four maps of 96 channels in fp32 at full size and some room: what decoding takes beside the weights, roughly."""


@dataclass(frozen=True)
class Event:
    """How far a stage is: "encode" counts prompts, "sample" steps of all pictures, "decode" pictures."""

    stage: str
    done: int
    total: int


Report = Callable[[Event], object]


def encode_prompts(model: ModelSet, prompts: Sequence[str]) -> list[np.ndarray]:
    """The embeddings of each prompt's own tokens, ``[1, L, D]`` float32, each an array of the caller's own.

    The encoder is loaded once for the prompts that the prompt cache lacks, or not at all.
    """
    tokenizer = model.tokenizer
    tokenized = [tokenizer.encode(prompt) for prompt in prompts]
    bundle = model.text_encoder

    def encode(missing: list[PromptTokens]) -> list[np.ndarray]:
        with runtime.load(bundle) as encoder:
            return [encoder(input_ids=tokens.ids)["hidden"][:, tokens.drop_idx :] for tokens in missing]

    return prompt_cache.embed(bundle, tokenized, encode)


def encode_prompt(model: ModelSet, prompt: str) -> np.ndarray:
    """``encode_prompts`` for one prompt."""
    return encode_prompts(model, [prompt])[0]


def decode(model: ModelSet, tokens: np.ndarray, height: int, width: int) -> Iterator[np.ndarray]:
    """Tokens in model space ``[B, N, 64]`` to pictures ``[1, 4, 16 h, 16 w]`` in about [-1, 1], one by one."""
    bundle = model.vae_decoder(height, width)
    with runtime.load(bundle) as vae:
        for index in range(len(tokens)):
            yield vae(latents_packed=tokens[index : index + 1])["image"]


def grid_of(width: int, height: int) -> tuple[int, int]:
    """The grid ``(height, width)`` of a picture's size in pixels."""
    for name, pixels in (("width", width), ("height", height)):
        if pixels < PIXELS_PER_TOKEN or pixels % PIXELS_PER_TOKEN:
            lower = max(1, pixels // PIXELS_PER_TOKEN) * PIXELS_PER_TOKEN
            raise ContractError(
                f"the {name} is {pixels} pixels: it must be a multiple of {PIXELS_PER_TOKEN}, "
                f"{lower} or {lower + PIXELS_PER_TOKEN} for instance"
            )
    return height // PIXELS_PER_TOKEN, width // PIXELS_PER_TOKEN


def generate(
    model: ModelSet,
    prompt: str,
    width: int,
    height: int,
    settings: Settings = DEFAULTS,
    *,
    seed: int = 0,
    negative_prompt: str | None = None,
    report: Report = lambda event: None,
) -> np.ndarray:
    """One picture, uint8 ``[H, W, 4]``."""
    [picture] = generate_batch(
        model, prompt, width, height, settings, seeds=[seed], negative_prompt=negative_prompt, report=report
    )
    return picture


def generate_batch(
    model: ModelSet,
    prompt: str,
    width: int,
    height: int,
    settings: Settings = DEFAULTS,
    *,
    seeds: Sequence[int],
    negative_prompt: str | None = None,
    report: Report = lambda event: None,
) -> Iterator[np.ndarray]:
    """A picture, uint8 ``[H, W, 4]``, for each seed; each is the one ``generate`` makes of that seed.

    One encoding, one load of the DiT and one computation of the text's keys and values serve all.
    Each picture is decoded as soon as it is sampled if memory allows, else after the last one.
    What can be wrong is found before the first bundle is loaded, the size's VAE decoder included.
    """
    grid = grid_of(width, height)
    check_grid(*grid)
    settings.check_negative(negative_prompt is not None)
    settings.schedule_for(model, grid[0] * grid[1])
    settings.shortcuts.check(model.dit)
    _ = model.text_encoder, model.vae_decoder(*grid)
    noise = np.concatenate([initial_noise(seed, *grid) for seed in seeds])
    prompts = [prompt] if negative_prompt is None or settings.cfg == 1.0 else [prompt, negative_prompt]
    report(Event("encode", 0, len(prompts)))
    positive, *rest = encode_prompts(model, prompts)
    report(Event("encode", len(prompts), len(prompts)))
    sampling = Sampling(model, positive, noise, settings, negative=rest[0] if rest else None)
    decoded = 0
    for tokens in _finished(sampling, model.vae_decoder(*grid), report):
        for image in decode(model, tokens, *grid):
            decoded += 1
            report(Event("decode", decoded, len(seeds)))
            yield to_rgba8(image)[0]


def _finished(sampling: Sampling, vae: Bundle, report: Report) -> Iterator[np.ndarray]:
    """The tokens ``[pictures, N, 64]`` that are sampled, whenever it is time to decode some."""
    given = 0
    report(Event("sample", 0, sampling.total_steps))
    for done, step in enumerate(sampling.run(), start=1):
        report(Event("sample", done, sampling.total_steps))
        finished = done // step.total
        # The DiT stays loaded for the next picture, so the decoder has to fit beside it.
        if given < finished < len(sampling.tokens) and _fits_into_memory(vae):
            yield sampling.tokens[given:finished]
            given = finished
    yield sampling.tokens[given:]


def _fits_into_memory(vae: Bundle) -> bool:
    _, _, height, width = vae.spec.output("image").shape
    needed = 2 * vae.size + DECODER_BYTES_PER_PIXEL * int(height) * int(width)
    return needed < psutil.virtual_memory().available
