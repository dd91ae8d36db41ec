"""Stage two: text encoder and DiT by flow matching on latents that are computed once.

The noise levels are those of the sampler: its exponential shift at the grid's number of tokens, its
terminal 0.02. Small canvases come first, as they cost a quarter; the rest of the time goes to the
sizes that ship.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage21
from torch import Tensor
from tqdm import tqdm

from ..prompt import PromptTokenizer
from ..schedule import SchedulerConfig
from .captions import Scene, paraphrase, random_scene
from .networks import DemoModel, Muon, Rope, split_parameters
from .pictures import draw, random_placement
from .progress import AveragedWeights, TrainingState, learning_rate_scale
from .train_vae import encode, to_unit

SAVE_EVERY = 200
MUON_RATE, ADAM_RATE = 3e-3, 2e-3
EMPTY_CAPTIONS = 0.04
"""Share of captions left empty, so that guidance against an empty negative prompt works."""

CANONICAL_CAPTIONS = 0.5

TRANSPARENT = 0.35
"""Share of pictures with nothing behind the shape: seven backgrounds for each colour take longer to learn."""

HARD_WEIGHT = 3
"""How often small shapes and glass in front of a colour are drawn, the others once: they are learned last."""

HIGH_NOISE_SHIFT = 1.2
"""Added to the sampler's shift for every second noise level."""

EARLY = 0.5
"""Part of the steps that small canvases get most of."""


@dataclass(frozen=True)
class Canvas:
    """A size that is trained: pixels, pictures drawn for it, batch size, and its shares early and late."""

    height: int
    width: int
    pictures: int
    batch: int
    early_share: float
    late_share: float

    @property
    def grid(self) -> tuple[int, int]:
        return self.height // 16, self.width // 16


CANVASES = (
    Canvas(128, 128, 2000, 48, 0.90, 0.15),
    Canvas(256, 256, 3000, 20, 0.10, 0.67),
    Canvas(256, 384, 250, 14, 0.00, 0.06),
    Canvas(384, 256, 250, 14, 0.00, 0.06),
    Canvas(512, 512, 120, 6, 0.00, 0.06),
)


@dataclass(frozen=True)
class LatentSet:
    """Pictures of one canvas as model-space tokens ``[pictures, N, 64]`` (half precision), with their scenes."""

    scenes: list[Scene]
    tokens: Tensor


@torch.no_grad()
def draw_latents(vae: AutoencoderKLQwenImage21, canvas: Canvas, seed: int) -> LatentSet:
    rng = random.Random(f"{seed} {canvas.height} {canvas.width}")
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std))
    scenes = [random_scene(rng, held_out=False, transparent=TRANSPARENT) for _ in range(canvas.pictures)]
    chunk = max(1, 16 * 256 * 256 // (canvas.height * canvas.width))
    tokens = []
    for start in tqdm(range(0, len(scenes), chunk), desc=f"latents {canvas.width}x{canvas.height}"):
        some = scenes[start : start + chunk]
        pictures = np.stack([draw(scene, random_placement(scene, rng), canvas.height, canvas.width) for scene in some])
        latents = (encode(vae, to_unit(pictures)) - mean) / std
        tokens.append(latents.flatten(2).transpose(1, 2).half())
    return LatentSet(scenes, torch.cat(tokens))


def cached_latents(folder: Path, vae: AutoencoderKLQwenImage21, seed: int) -> dict[Canvas, LatentSet]:
    """The training set, drawn once and kept in ``folder`` (about 160 MB)."""
    sets = {}
    for canvas in CANVASES:
        path = folder / f"latents_{canvas.width}x{canvas.height}.pt"
        if path.exists():
            content = torch.load(path, weights_only=True)
            sets[canvas] = LatentSet([Scene(*words) for words in content["scenes"]], content["tokens"])
            continue
        made = draw_latents(vae, canvas, seed)
        words = [(s.size, s.glass, s.colour, s.shape, s.background) for s in made.scenes]
        torch.save({"scenes": words, "tokens": made.tokens}, path)
        sets[canvas] = made
    return sets


class CaptionBatches:
    """Draws pictures together with captions that all have the same number of tokens."""

    def __init__(self, tokenizer: PromptTokenizer):
        self.drop_idx = tokenizer.encode(" ").drop_idx
        self._encode: Callable[[str], Tensor] = lru_cache(maxsize=100_000)(
            lambda text: torch.from_numpy(tokenizer.encode(text).ids[0])
        )

    def wording(self, scene: Scene, rng: random.Random) -> str:
        draw_from = rng.random()
        if draw_from < EMPTY_CAPTIONS:
            return ""
        return scene.caption if draw_from < EMPTY_CAPTIONS + CANONICAL_CAPTIONS else paraphrase(scene, rng)

    def draw(self, scenes: list[Scene], count: int, rng: random.Random) -> tuple[list[int], Tensor]:
        """Indices of ``count`` scenes and their captions' ids ``[count, Lfull]``.

        The first caption sets the length, so lengths come as often as they are. The empty caption is
        shorter than any other: its batches hold nothing else.
        """
        length = 0
        weights = [HARD_WEIGHT if scene.is_hard else 1 for scene in scenes]
        chances = list(accumulate(weights))
        indices: list[int] = []
        rows: list[Tensor] = []
        for _ in range(400 * count):
            [index] = rng.choices(range(len(scenes)), cum_weights=chances)
            ids = self._encode(self.wording(scenes[index], rng))
            length = length or len(ids)
            if len(ids) == length:
                indices.append(index)
                rows.append(ids)
            if len(rows) == count:
                break
        return indices, torch.stack(rows)


def noise_levels(count: int, image_tokens: int, generator: torch.Generator) -> Tensor:
    """Sigmas ``[count]`` in 0.02 .. 1, stratified.

    Every second one is as dense as the sampler's steps are. The others lean towards 1: with 64
    channels a token, shape and place are settled while there is still far more noise than picture.
    """
    config = SchedulerConfig()
    index = torch.arange(count)
    even = (index + torch.rand(count, generator=generator)) / count
    shift = torch.exp(config.mu(image_tokens) + HIGH_NOISE_SHIFT * (index % 2))
    shifted = shift / (shift + 1 / even.clamp(1e-4, 1.0) - 1)
    return config.shift_terminal + (1 - config.shift_terminal) * shifted


def pick_canvas(step: int, steps: int, rng: random.Random) -> Canvas:
    early = step < steps * EARLY
    return rng.choices(CANVASES, [canvas.early_share if early else canvas.late_share for canvas in CANVASES])[0]


def train_dit(
    folder: Path, steps: int, seed: int, sets: dict[Canvas, LatentSet], tokenizer: PromptTokenizer, vocabulary: int
) -> TrainingState:
    """Train, or go on training, the text encoder and the DiT whose state is kept in ``folder``."""
    model = DemoModel(vocabulary, seed)
    inner, outer = split_parameters(model)
    optimizers = [Muon(inner, MUON_RATE), torch.optim.AdamW(outer, ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0)]
    state = TrainingState(folder / "dit.pt", model, optimizers, AveragedWeights.of(model))
    state.load_if_there()
    captions = CaptionBatches(tokenizer)
    rope = lru_cache(maxsize=256)(Rope.of)
    bar = tqdm(range(state.step, steps), initial=state.step, total=steps, desc="text and DiT")
    for step in bar:
        rng = random.Random(seed * 1_000_003 + step)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        canvas = pick_canvas(step, steps, rng)
        indices, ids = captions.draw(sets[canvas].scenes, canvas.batch, rng)
        clean = sets[canvas].tokens[indices].float()
        noise = torch.randn(clean.shape, generator=generator)
        sigma = noise_levels(len(indices), clean.shape[1], generator)
        noisy = torch.lerp(clean, noise, sigma.view(-1, 1, 1))
        text = model.text_features(ids, captions.drop_idx)
        velocity = model.velocity(noisy, text, sigma, rope(text.shape[1], *canvas.grid))
        loss = (velocity - (noise - clean)).square().mean()
        loss.backward()
        state.advance(loss.item(), learning_rate_scale(step, steps), [MUON_RATE, ADAM_RATE])
        bar.set_postfix(loss=f"{np.mean(state.losses[-50:]):.4f}")
        if state.step % SAVE_EVERY == 0 or state.step == steps:
            state.save()
    return state
