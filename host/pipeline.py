"""Prompt to RGBA picture with a model set: encode, sample, decode.

Each stage loads its bundle and uses it, and releases it unless told to keep it (see ``residency``),
because all three together need 58 GB. The stages are separate so that a graph of nodes can run them
one by one; ``generate`` runs them all. Grids are in latent tokens (pixels / 16); arrays are float32.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from . import prompt_cache
from .bundle import Bundle
from .contract import PIXELS_PER_TOKEN, ContractError
from .latents import initial_noise
from .memory import working_bytes
from .model_set import ModelSet
from .pixels import to_rgba8
from .prompt import PromptTokens
from .residency import check_keep, check_will_fit, fits, using
from .sampling import DEFAULTS, Sampling, Settings, check_grid
from .tiling import ANY_TILE, Grid, choose_tile, decode_tiled


@dataclass(frozen=True)
class Event:
    """How far a stage is: "encode" counts prompts, "sample" steps of all pictures, "decode" pictures."""

    stage: str
    done: int
    total: int


Report = Callable[[Event], object]


def encode_prompts(model: ModelSet, prompts: Sequence[str], keep_loaded: str = "stage") -> list[np.ndarray]:
    """The embeddings of each prompt's own tokens, ``[1, L, D]`` float32, each an array of the caller's own.

    The encoder is loaded once for the prompts that the prompt cache lacks, or not at all.
    """
    tokenizer = model.tokenizer
    return encode_tokens(model, [tokenizer.encode(prompt) for prompt in prompts], keep_loaded)


def encode_tokens(model: ModelSet, tokenized: Sequence[PromptTokens], keep_loaded: str = "stage") -> list[np.ndarray]:
    """``encode_prompts`` for prompts that are tokens already."""
    bundle = model.text_encoder

    def encode(missing: list[PromptTokens]) -> list[np.ndarray]:
        working = working_bytes(bundle, max(tokens.ids.shape[1] for tokens in missing))
        with using(bundle, keep_loaded, working=working, others=model.bundles) as encoder:
            return [encoder(input_ids=tokens.ids)["hidden"][:, tokens.drop_idx :] for tokens in missing]

    return prompt_cache.embed(bundle, tokenized, encode)


def encode_prompt(model: ModelSet, prompt: str, keep_loaded: str = "stage") -> np.ndarray:
    """``encode_prompts`` for one prompt."""
    return encode_prompts(model, [prompt], keep_loaded)[0]


def decode(
    model: ModelSet,
    tokens: np.ndarray,
    height: int,
    width: int,
    keep_loaded: str = "stage",
    largest_tile: Grid | None = None,
) -> Iterator[np.ndarray]:
    """Tokens in model space ``[B, N, 64]`` to pictures ``[1, 4, 16 h, 16 w]`` in about [-1, 1], one by one.

    With a ``largest_tile``, a size without a decoder of its own is put together from tiles up to that one.
    """
    grid = (height, width)
    bundle, tile = _decoder(model, grid, largest_tile)
    with using(bundle, keep_loaded, working=working_bytes(bundle), others=model.bundles) as vae:
        for index in range(len(tokens)):
            yield decode_tiled(lambda part: vae(latents_packed=part)["image"], tokens[index : index + 1], grid, tile)


def _decoder(model: ModelSet, grid: Grid, largest_tile: Grid | None) -> tuple[Bundle, Grid]:
    """The decoder that draws ``grid``, or tiles of it, and the grid that it draws at once."""
    tile = grid
    if largest_tile is not None and model.vae_decoders:
        tile = choose_tile([grid_of(w, h) for h, w in model.vae_decoders], grid, largest_tile)
    return model.vae_decoder(*tile), tile


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
    keep_loaded: str = "stage",
    tiled: bool = False,
    report: Report = lambda event: None,
) -> np.ndarray:
    """One picture, uint8 ``[H, W, 4]``."""
    [picture] = generate_batch(
        model,
        prompt,
        width,
        height,
        settings,
        seeds=[seed],
        negative_prompt=negative_prompt,
        keep_loaded=keep_loaded,
        tiled=tiled,
        report=report,
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
    keep_loaded: str = "stage",
    tiled: bool = False,
    report: Report = lambda event: None,
) -> Iterator[np.ndarray]:
    """A picture, uint8 ``[H, W, 4]``, for each seed; each is the one ``generate`` makes of that seed.

    One encoding, one load of the DiT and one computation of the text's keys and values serve all.
    Each picture is decoded as soon as it is sampled if memory allows, else after the last one.
    What can be wrong is found before the first bundle is loaded, the size's VAE decoder included.
    ``tiled`` draws a size that has none from tiles of one that has.
    """
    grid = grid_of(width, height)
    largest_tile = ANY_TILE if tiled else None
    check_grid(*grid)
    settings.check_negative(negative_prompt is not None)
    settings.schedule_for(model, grid[0] * grid[1])
    settings.shortcuts.check(model.dit)
    check_keep(keep_loaded)
    _ = model.text_encoder
    vae, _ = _decoder(model, grid, largest_tile)
    noise = np.concatenate([initial_noise(seed, *grid) for seed in seeds])
    prompts = [prompt] if negative_prompt is None or settings.cfg == 1.0 else [prompt, negative_prompt]
    report(Event("encode", 0, len(prompts)))
    check_will_fit(model.dit, working_bytes(model.dit, grid[0] * grid[1]))
    check_will_fit(vae, working_bytes(vae))
    positive, *rest = encode_prompts(model, prompts, keep_loaded)
    report(Event("encode", len(prompts), len(prompts)))
    negative = rest[0] if rest else None
    sampling = Sampling(model, positive, noise, settings, negative, keep_loaded=keep_loaded)
    decoded = 0
    for tokens in _finished(sampling, vae, report):
        for image in decode(model, tokens, *grid, keep_loaded, largest_tile):
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
        if given < finished < len(sampling.tokens) and fits(vae, working_bytes(vae)):
            yield sampling.tokens[given:finished]
            given = finished
    yield sampling.tokens[given:]
