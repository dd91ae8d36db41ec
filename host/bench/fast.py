"""The approximate modes: how much faster than the exact path, and how far their pictures are from the exact ones."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ..bundle import Bundle
from ..contract import ContractError
from ..demo.captions import random_scene
from ..denoiser import EXACT, Shortcuts
from ..latents import initial_noise
from ..model_set import ModelSet
from ..pipeline import decode, encode_prompts
from ..pixels import composite, to_rgba8
from ..sampling import Sampling, Settings
from .results import Bar, Panel, Ratios, Result, Section, Spread, progress, timed
from .runs import grid_for, size_of
from .steps import compile_ahead

STEP_CACHE = Shortcuts(step_cache=0.25)
BLOCK_CACHE = Shortcuts(first_block_cache=0.25)
"""The modes that we recommend, for the model that ships."""

THRESHOLDS = (0.15, 0.25, 0.4)
STEPS = 25
PICTURES = 20
SKETCHED = 2
"""Pictures of the modes that are not recommended: enough for a point in the plot."""

FIRST_SEED = 1_000_000
STEP_CACHE_BAR, BLOCK_CACHE_BAR = Bar(1.25, at_least=True), Bar(1.5, at_least=True)
LIKENESS_BAR = Bar(30.0, at_least=True, every=True)
IDENTICAL = 99.0
"""Decibels that stand for no difference at all."""


@dataclass
class Mode:
    """What one choice of shortcuts took and made, a value for each picture."""

    shortcuts: Shortcuts
    seconds: list[float] = field(default_factory=list)
    tokens: list[np.ndarray] = field(default_factory=list)
    pictures: list[np.ndarray] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)

    def speed(self, exact: "Mode") -> Spread:
        return Ratios(exact.seconds[: len(self.seconds)], self.seconds).spread

    def likeness(self, exact: "Mode") -> Spread:
        return Spread.of(map(likeness, self.pictures, exact.pictures))


def all_modes() -> dict[str, Shortcuts]:
    """The exact one first."""
    blocks = {f"first-block cache {share:g}": Shortcuts(first_block_cache=share) for share in THRESHOLDS}
    return {"exact": EXACT, f"step cache {STEP_CACHE.step_cache:g}": STEP_CACHE, **blocks}


def refusal(shortcuts: Shortcuts, dit: Bundle) -> str:
    """Why the bundle cannot do it; empty if it can."""
    try:
        shortcuts.check(dit)
    except ContractError as error:
        return str(error)
    return ""


def likeness(picture: np.ndarray, exact: np.ndarray) -> float:
    """PSNR in dB of two pictures, uint8 ``[H, W, 4]``, on white."""
    on_white, expected = (composite(rgba[None]).astype(np.float64) for rgba in (picture, exact))
    error = np.mean((on_white - expected) ** 2)
    return IDENTICAL if error == 0 else float(min(IDENTICAL, 10 * np.log10(255**2 / error)))


def held_out_captions(count: int, seed: int = 1) -> list[str]:
    """Those of ``host.demo.train.held_out_questions``, without the reference implementation that it imports."""
    rng = random.Random(seed)
    return [random_scene(rng, held_out=True).caption for _ in range(count)]


def measure_modes(model: ModelSet, modes: Mapping[str, Shortcuts], pictures: int = PICTURES) -> dict[str, Mode]:
    """Every picture in each mode, in turns; the time is that of the sampler's run, loading included.

    Decoding comes last, so that the runs of a turn follow one another closely.
    """
    compile_ahead(model.dit)
    grid, prompts = grid_for(model), encode_prompts(model, held_out_captions(pictures))
    measured = {name: Mode(shortcuts) for name, shortcuts in modes.items()}
    thorough = (EXACT, STEP_CACHE, BLOCK_CACHE)
    turns = [
        (index, mode)
        for index in range(pictures)
        for mode in measured.values()
        if index < SKETCHED or mode.shortcuts in thorough
    ]
    for index, mode in progress(turns, "sampling in turns"):
        noise = initial_noise(FIRST_SEED + index, *grid)
        sampling = Sampling(model, prompts[index], noise, Settings(STEPS, shortcuts=mode.shortcuts))
        seconds, _ = timed(partial(list, sampling.run()))
        mode.seconds.append(seconds)
        mode.tokens.append(sampling.tokens)
        mode.skipped.append(sampling.skipped.steps + sampling.skipped.blocks)
    for mode in progress([*measured.values()], "decoding"):
        images = decode(model, np.concatenate(mode.tokens), *grid)
        mode.pictures = [to_rgba8(image)[0] for image in images]
    return measured


def speed_bar(shortcuts: Shortcuts) -> Bar | None:
    """How much faster a mode that we recommend has to be."""
    return {STEP_CACHE: STEP_CACHE_BAR, BLOCK_CACHE: BLOCK_CACHE_BAR}.get(shortcuts)


def fast_section(model: ModelSet, judged: bool = True, pictures: int = PICTURES) -> Section:
    """Speed and likeness of each mode; bars for the recommended ones if ``judged``."""
    modes = all_modes()
    refusals = {name: refusal(shortcuts, model.dit) for name, shortcuts in modes.items()}
    measured = measure_modes(model, {name: modes[name] for name in modes if not refusals[name]}, pictures)
    exact = measured.pop("exact")
    results, points, good = [], {}, []
    for name, shortcuts in modes.items():
        bar = speed_bar(shortcuts) if judged else None
        if refusals[name]:
            results.append(Result(name, "exact / fast", None, bar=bar, note=refusals[name]))
        if name in measured:
            mode = measured[name]
            speed, alike = mode.speed(exact), mode.likeness(exact)
            note = f"{Spread.of(mode.skipped)} of {STEPS} steps shortened"
            results.append(Result(name, "exact / fast", speed, bar=bar, note=note))
            results.append(Result(name, "PSNR on white", alike, "dB", bar and LIKENESS_BAR))
            points[shortcuts] = speed.median, alike.median
            if shortcuts.first_block_cache and BLOCK_CACHE_BAR.cleared_by(speed) and LIKENESS_BAR.cleared_by(alike):
                good.append(f"{shortcuts.first_block_cache:g}")
    count = Spread.of([len(good)])
    results.append(Result("first-block cache", "thresholds that clear both bars", count, note=", ".join(good)))
    counts = f"{pictures} pictures, {min(pictures, SKETCHED)} where no bar is set"
    title = f"Fast modes of {model.path.name}, {size_of(grid_for(model))}, {STEPS} steps, {counts}"
    return Section(title, results, [_panel(points)])


def _panel(points: Mapping[Shortcuts, tuple[float, float]]) -> Panel:
    series: dict[str, list[tuple[float, float, str]]] = {"first-block cache": [], "step cache": []}
    for shortcuts, point in points.items():
        share = shortcuts.first_block_cache
        series["first-block cache" if share else "step cache"].append((*point, f"{share or shortcuts.step_cache:g}"))
    title = "Fast modes: how much faster, and how near to the exact picture"
    return Panel(
        title, "exact time / fast time", "PSNR in dB on white", series, (BLOCK_CACHE_BAR.limit, LIKENESS_BAR.limit)
    )
