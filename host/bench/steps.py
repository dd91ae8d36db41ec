"""What a step of the DiT costs: as the published contract has it, and with the text's keys and values kept."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import torch

from .. import runtime
from ..bundle import Bundle
from ..contract import PIXELS_PER_TOKEN, STEP, ContractError
from ..denoiser import EXACT, PromptSlot
from ..files import CACHE_VARIABLE
from ..graphs.dit import DiT, DiTConfig
from ..latents import initial_noise, pack
from ..rope import rope_tables
from ..runtime import LoadedGraph
from ..sampler import Denoiser
from .results import Bar, Panel, Ratios, Result, Section, Spread, in_turns, number, progress, timed

CONFIG = DiTConfig(num_layers=4, num_attention_heads=4, attention_head_dim=128, context_in_dim=256, mlp_ratio=3)
"""Large enough that arithmetic, not the call, is what takes time."""

TIME = np.array([0.6], dtype=np.float32)
LACKING = "the bundle holds main alone, as the published ones do: export it again with coreai-rgba export"


@dataclass(frozen=True)
class Setting:
    """A picture in pixels, and how many text tokens the DiT reads."""

    width: int
    height: int
    text: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height} L={self.text}"

    @property
    def grid(self) -> tuple[int, int]:
        """(height, width) in latent tokens."""
        return self.height // PIXELS_PER_TOKEN, self.width // PIXELS_PER_TOKEN

    @property
    def tokens(self) -> int:
        height, width = self.grid
        return height * width


RATIO_BARS = {Setting(384, 384, 494): 1.7, Setting(512, 512, 407): 1.3, Setting(384, 384, 22): 1.0}
GROWTH_SIZE, GROWTH_TEXT = 384, 407
"""Where the text grows, the size of the picture; where the picture grows, the length of the text."""
GROWTH_SETTINGS = (Setting(384, 384, 128), Setting(384, 384, 407), Setting(256, 256, 407))
DIFFERENCE_BAR = 1e-5
REPEATS = 5


@dataclass(frozen=True)
class StepTimes:
    """Seconds of each step by either path, ``reused`` empty where the bundle cannot.

    ``preparation`` is what the text's keys and values take, once a prompt; ``difference`` the
    largest of the two velocities', as a share of the largest velocity.
    """

    contract: list[float]
    reused: list[float]
    preparation: float = 0.0
    difference: float = 0.0


def random_dit(config: DiTConfig = CONFIG, seed: int = 0) -> DiT:
    """Weights that keep the scale of what passes through them, so that every part of the network shows."""
    dit, generator = DiT(config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in dit.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * parameter.shape[1] ** -0.5 if parameter.ndim == 2 else 1 + 0.1 * noise)
    return dit.eval().requires_grad_(False)


@contextmanager
def random_bundles(config: DiTConfig = CONFIG) -> Iterator[tuple[Bundle, Bundle]]:
    """A DiT with all functions, and the same one with ``main`` alone, in fp32, as long as the context lasts.

    So does what the runtime compiles of them, in a cache of their own: nobody runs them again.
    """
    try:
        from ..export.convert import convert
        from ..export.model_set import dit_parts
    except ImportError as error:
        raise ContractError(
            f"the bench exports a random DiT, for which {error.name} is missing: pip install "
            "'coreai-rgba-image[export]', or measure a model set with --model"
        ) from error
    with TemporaryDirectory(prefix="coreai-rgba-bench-") as folder, patch.dict(os.environ, {CACHE_VARIABLE: folder}):
        main, *others = dit_parts(random_dit(config))
        kinds = {"all": others, "main": []}
        with redirect_stdout(sys.stderr):  # the converter says what it does, where the bench's results go
            full, alone = (
                convert(*main, Path(folder) / f"{name}.aimodel", {}, kinds[name])
                for name in progress([*kinds], "exporting a random DiT")
            )
        yield full, alone


def compile_ahead(bundle: Bundle) -> None:
    """So that no measurement has the one compilation that Linux does on first use."""
    if sys.platform == "linux":
        runtime.compiled_for_linux(bundle)


def random_embeddings(width: int, length: int) -> np.ndarray:
    """Text features ``[1, L, D]``."""
    return np.random.default_rng(length).standard_normal((1, length, width), dtype=np.float32)


def text_width(dit: Bundle) -> int:
    return int(next(tensor for tensor in dit.spec.inputs if tensor.name == "txt_feats").shape[2])


def contract_denoiser(dit: LoadedGraph, embeddings: np.ndarray, grid: tuple[int, int]) -> Denoiser:
    """A step as the published contract has it: all of ``main``'s inputs are made and passed, every time."""

    def velocity(x: np.ndarray, timestep: np.ndarray) -> np.ndarray:
        rope = rope_tables(embeddings.shape[1], *grid)
        return dit(img_tokens=x, txt_feats=embeddings, timestep=timestep, **vars(rope))["vel"]

    return velocity


def measure_steps(bundle: Bundle, settings: Sequence[Setting], repeats: int = REPEATS) -> dict[Setting, StepTimes]:
    """Every setting by both paths, in turns: one round has them all."""
    compile_ahead(bundle)
    paths: list[Callable[[], object]] = []
    prepared: dict[Setting, tuple[float, float]] = {}
    reuses = STEP.function in bundle.functions
    with runtime.load(bundle) as dit:
        for setting in progress(settings, "warming up"):
            embeddings, x = random_embeddings(text_width(bundle), setting.text), pack(initial_noise(0, *setting.grid))
            contract = partial(contract_denoiser(dit, embeddings, setting.grid), x, TIME)
            expected = contract()
            paths.append(contract)
            prepared[setting] = 0.0, 0.0
            if reuses:
                rope = rope_tables(setting.text, *setting.grid)
                preparation, slot = timed(partial(PromptSlot, dit, embeddings, rope, EXACT))
                ours = partial(slot.denoiser(), x, TIME)
                prepared[setting] = preparation, float(np.abs(ours() - expected).max() / np.abs(expected).max())
                paths.append(ours)
        seconds = iter(in_turns(paths, repeats, "steps"))
    return {
        setting: StepTimes(next(seconds), next(seconds) if reuses else [], *rest) for setting, rest in prepared.items()
    }


def reuse_section(
    times: Mapping[Setting, StepTimes], ratio_bars: Mapping[Setting, float], difference_bar: float
) -> Section:
    """The contract's loop against ours; how much faster it has to be is in ``ratio_bars`` for some settings."""
    results = []
    for setting, measured in times.items():
        bar = Bar(ratio_bars[setting], at_least=True) if setting in ratio_bars else None
        if not measured.reused:
            results.append(Result(str(setting), "contract loop / ours", None, bar=bar, note=LACKING))
            continue
        ratio = Ratios(measured.contract, measured.reused).spread
        note = f"plus {number(measured.preparation / median(measured.reused))} steps once a prompt"
        difference = Spread.of([measured.difference])
        results += [
            Result(str(setting), "contract loop / ours", ratio, bar=bar, note=note),
            Result(str(setting), "largest difference", difference, bar=Bar(difference_bar, at_least=False)),
        ]
    return Section("Text reuse: time of a step, velocities relative to the largest", results)


def growth_section(times: Mapping[Setting, StepTimes]) -> Section:
    """How a step's time grows with the text at one size, and with the picture at one length of text."""
    text = {setting: setting.text for setting in sorted(times, key=lambda s: s.text) if setting.width == GROWTH_SIZE}
    image = {
        setting: setting.tokens for setting in sorted(times, key=lambda s: s.tokens) if setting.text == GROWTH_TEXT
    }
    results: list[Result] = []
    panels = []
    for axis, places in (("text tokens", text), ("image tokens", image)):
        smallest, *larger = places
        series = {}
        for path, seconds in (
            ("contract loop", {setting: times[setting].contract for setting in places}),
            ("text reused", {setting: times[setting].reused for setting in places}),
        ):
            if all(seconds.values()):
                growth = {setting: Ratios(seconds[setting], seconds[smallest]).spread for setting in places}
                series[path] = [(places[setting], growth[setting].median, "") for setting in places]
                results += [Result(f"{setting} / {smallest}", path, growth[setting]) for setting in larger]
        panels.append(Panel(f"Growth with the {axis}", axis, f"time of a step / {smallest}", series))
    return Section("Growth: time of a step", sorted(results, key=lambda result: result.setting), panels)
