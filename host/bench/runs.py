"""Whole runs of a model set: what the host adds to the runtime's own time, and what each stage takes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from typing import Any
from unittest.mock import patch

import numpy as np

from .. import runtime
from ..contract import PIXELS_PER_TOKEN, GraphSpec
from ..denoiser import EXACT, PromptSlot
from ..latents import initial_noise, pack
from ..model_set import ModelSet
from ..pipeline import encode_prompt
from ..preview import PreviewMap, preview_picture
from ..rope import rope_tables
from ..sampler import Denoiser, Step
from ..sampling import Sampling, Settings
from .memory import resident_megabytes
from .results import Bar, Result, Returned, Section, Spread, progress, timed
from .steps import TIME, compile_ahead

CAPTION = "a large red star sticker, transparent background"
GRID = (16, 16)
PREVIEW_PIXELS, PREVIEW_QUALITY = 512, 95
"""Both are ComfyUI's own: the largest size it asks for unless told otherwise, and how its server writes a JPEG."""

STEPS, REPEATS = 20, 5
OVERHEAD_BAR = Bar(3.0, at_least=False)


def size_of(grid: tuple[int, int]) -> str:
    height, width = grid
    return f"{width * PIXELS_PER_TOKEN}x{height * PIXELS_PER_TOKEN}"


def grid_for(model: ModelSet) -> tuple[int, int]:
    """256 x 256 pixels, or the smallest picture the set has a decoder for."""
    sizes = [(height // PIXELS_PER_TOKEN, width // PIXELS_PER_TOKEN) for height, width in model.vae_decoders]
    return GRID if GRID in sizes or not sizes else min(sizes, key=lambda grid: grid[0] * grid[1])


@contextmanager
def native_seconds() -> Iterator[list[float]]:
    """What each call of a Core AI function takes while the context lasts, from hand-over to result."""
    seconds: list[float] = []

    class TimedFunction(runtime.LoadedFunction):
        def __init__(self, spec: GraphSpec, model: Any):
            super().__init__(spec, model)
            native = self._native

            async def timed_native(inputs: dict[str, Any]) -> Any:
                started = time.perf_counter()
                outputs = await native(inputs)
                seconds.append(time.perf_counter() - started)
                return outputs

            self._native = timed_native

    with patch.object(runtime, "LoadedFunction", TimedFunction):
        yield seconds


def preview(step: Step, grid: tuple[int, int], preview_map: PreviewMap) -> bytes:
    """The JPEG that a step's preview becomes: what the sampler's node makes, as ComfyUI's server sends it."""
    picture = preview_picture(step.denoised, *grid, preview_map, PREVIEW_PIXELS)
    file = BytesIO()
    picture.save(file, "JPEG", quality=PREVIEW_QUALITY)
    return file.getvalue()


def run_with_previews(sampling: Sampling, preview_map: PreviewMap) -> None:
    for step in sampling.run():
        preview(step, GRID, preview_map)


def overhead_section(model: ModelSet, repeats: int = REPEATS) -> Section:
    """The share of a run outside native calls: loading's checks, arrays, schedule, integration, previews."""
    compile_ahead(model.dit)
    embeddings = encode_prompt(model, CAPTION)
    shares, totals = [], []
    for seed in progress(range(repeats), "host overhead"):
        sampling = Sampling(model, embeddings, initial_noise(seed, *GRID), Settings(STEPS))
        with native_seconds() as native:
            total, _ = timed(partial(run_with_previews, sampling, model.preview_map))
        shares.append(100 * (1 - sum(native) / total))
        totals.append(total)
    note = f"of {Spread.of(totals)} s, previews included"
    setting = f"{size_of(GRID)}, {STEPS} steps"
    result = Result(setting, "outside native calls", Spread.of(shares), "%", OVERHEAD_BAR, note)
    return Section("Host overhead", [result])


def stages_section(model: ModelSet, steps: int = 10) -> Section:
    """Seconds of each stage, and resident memory at its end; the three bundles are never loaded at once."""
    grid = grid_for(model)
    for bundle in (model.text_encoder, model.dit, model.vae_decoder(*grid)):
        compile_ahead(bundle)
    results = [Result("before", "resident memory", Spread.of([resident_megabytes()]), "MB")]

    def stage(name: str, call: Callable[[], Returned], repeats: int = 1) -> Returned:
        runs = [timed(call) for _ in progress(range(repeats), name)]
        memory = resident_megabytes()
        results.append(Result(name, "time", Spread.of(seconds for seconds, _ in runs), "s"))
        results.append(Result(name, "resident memory", Spread.of([memory]), "MB"))
        return runs[-1][1]

    prompt = model.tokenizer.encode(CAPTION)
    with stage("load encoder", lambda: runtime.load(model.text_encoder)) as encoder:
        embeddings = stage("encode", lambda: encoder(input_ids=prompt.ids))["hidden"][:, prompt.drop_idx :]
    rope = rope_tables(embeddings.shape[1], *grid, model.rope_tables)
    x = pack(initial_noise(0, *grid))
    with stage("load DiT", lambda: runtime.load(model.dit)) as dit:
        denoise = stage("text, first step", lambda: _after_one_step(PromptSlot(dit, embeddings, rope, EXACT), x))
        stage("step", lambda: denoise(x, TIME), steps)
    with stage("load decoder", lambda: runtime.load(model.vae_decoder(*grid))) as decoder:
        stage("decode", lambda: decoder(latents_packed=x))
    return Section(f"Stages of {model.path.name}, {size_of(grid)}, L={embeddings.shape[1]}", results)


def _after_one_step(slot: PromptSlot, x: np.ndarray) -> Denoiser:
    denoise = slot.denoiser()
    denoise(x, TIME)
    return denoise
