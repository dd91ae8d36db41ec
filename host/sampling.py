"""One run of the sampler over a batch of pictures, from embeddings and noise to latents.

Grids are in latent tokens (pixels / 16); arrays are float32.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from .bundle import Bundle
from .contract import DIT, PIXELS_PER_TOKEN, ContractError
from .denoiser import EXACT, PromptSlot, Shortcuts, Skipped
from .latents import pack
from .memory import MemoryGuard, working_bytes
from .model_set import ModelSet
from .residency import check_keep, using
from .rope import rope_tables
from .runtime import LoadedGraph
from .sampler import Inpainting, Step, add_noise, check_sampler, sample, with_guidance
from .schedule import Schedule, named_config, partial_schedule, schedule_from_sigmas
from .step_cache import StepCache

MAX_STEPS = 10_000


@dataclass(frozen=True)
class Settings:
    """How to sample. ``sampler`` is one of ``SAMPLERS``, ``schedule`` one of ``NAMED_SCHEDULES``.

    ``steps`` is the schedule's own number where it is not given: 40 for Qwen-Image-2.1. ``sigmas``,
    noise levels from at most 1 down to 0, take the place of both ``schedule`` and ``steps``. Raises
    ``ContractError`` for what no model could do.
    """

    steps: int | None = None
    cfg: float = 1.0
    sampler: str = "euler"
    schedule: str = "model"
    sigmas: Sequence[float] | np.ndarray | None = None
    shortcuts: Shortcuts = EXACT

    def __post_init__(self) -> None:
        sigmas = None if self.sigmas is None else schedule_from_sigmas(self.sigmas)
        steps = self.steps if sigmas is None else sigmas.steps
        if steps is not None and not 1 <= steps <= MAX_STEPS:
            raise ContractError(f"steps is {steps}: it must be from 1 to {MAX_STEPS}")
        if not np.isfinite(self.cfg):
            raise ContractError(f"cfg is {self.cfg}: it must be a finite number")
        check_sampler(self.sampler)
        named_config(self.schedule)

    def check_negative(self, given: bool) -> None:
        """Raise ``ContractError`` if guidance lacks a negative prompt."""
        if self.cfg != 1.0 and not given:
            raise ContractError(
                f"cfg is {self.cfg}, but there is no negative prompt to guide away from: give one, or set cfg to 1"
            )

    def schedule_for(self, model: ModelSet, image_tokens: int, denoise: float = 1.0) -> Schedule:
        """The schedule on ``model``; below 1, ``denoise`` takes its end."""
        config = named_config(self.schedule, model.scheduler_config)
        if self.sigmas is None:
            steps = config.steps if self.steps is None else self.steps
            return partial_schedule(steps, denoise, image_tokens, config)
        if denoise != 1.0:
            raise ContractError(f"denoise is {denoise}, but the first of the sigmas says where to start: set it to 1")
        return schedule_from_sigmas(self.sigmas, config)


DEFAULTS = Settings()


@dataclass
class Sampling:
    """One run of the sampler over a batch; ``tokens [B, N, 64]`` is its state and, after ``run``, its result.

    ``positive`` and ``negative`` are embeddings ``[1 or B, L, D]``; ``noise`` and ``latents`` are
    ``[B, 64, h, w]``, the latents in model space, where zeros stand for an empty picture.
    ``denoise`` below 1 starts from the latents; ``mask`` ``[1 or B, 1, h, w]`` is 1 where the
    picture may change. ``keep_loaded`` is one of ``residency.KEEP``. ``skipped`` counts what the
    shortcuts of ``settings`` left out. Everything is checked on construction, before anything is
    loaded.
    """

    model: ModelSet
    positive: np.ndarray
    noise: np.ndarray
    settings: Settings = DEFAULTS
    negative: np.ndarray | None = None
    latents: np.ndarray | None = None
    denoise: float = 1.0
    mask: np.ndarray | None = None
    keep_loaded: str = "stage"
    schedule: Schedule = field(init=False)
    skipped: Skipped = field(init=False, default_factory=Skipped)
    tokens: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        packed_noise = pack(self.noise)
        batch, _, height, width = self.noise.shape
        check_grid(height, width)
        self.settings.check_negative(self.negative is not None)
        check_keep(self.keep_loaded)
        if self.settings.cfg == 1.0:
            self.negative = None  # neg + 1 * (pos - neg) is pos: the negative need not be computed
        for name, embeddings in (("positive", self.positive), ("negative", self.negative)):
            if embeddings is not None:
                check_embeddings(self.model.dit, name, embeddings, batch)
        if self.latents is None:
            self.latents = np.zeros_like(self.noise)
        if self.latents.shape != self.noise.shape:
            raise ContractError(f"latents are {list(self.latents.shape)}, the noise {list(self.noise.shape)}")
        if self.mask is not None and self.mask.shape not in {(n, 1, height, width) for n in (1, batch)}:
            raise ContractError(f"the mask is {list(self.mask.shape)}: pass [1 or {batch}, 1, {height}, {width}]")
        self.settings.shortcuts.check(self.model.dit)
        self.schedule = self.settings.schedule_for(self.model, height * width, self.denoise)
        self.tokens = add_noise(pack(self.latents), packed_noise, self.schedule.sigmas[0])

    @property
    def total_steps(self) -> int:
        return len(self.tokens) * self.schedule.steps

    def run(self) -> Generator[Step, None, None]:
        """Denoise picture after picture, as the graph takes one at a time; a ``Step`` after each step.

        Raises ``NotEnoughMemoryError`` before it loads a DiT that would not fit, and between two
        steps if memory runs out.
        """
        if not self.schedule.steps:
            return
        guard, bundle = MemoryGuard(), self.model.dit
        working = working_bytes(bundle, self.sequence_length)
        with using(bundle, self.keep_loaded, working=working, others=self.model.bundles) as dit:
            for done, (index, step) in enumerate(self._steps(dit), start=1):
                self.tokens[index] = step.x[0]
                yield step
                if done < self.total_steps:
                    guard.check()

    def _steps(self, dit: LoadedGraph) -> Iterator[tuple[int, Step]]:
        """Each step with the index of its picture."""
        slots: dict[int, list[PromptSlot]] = {}
        for index in range(len(self.tokens)):
            row = index if max(map(len, self.prompts)) > 1 else 0
            if row not in slots:
                slots = {row: [self._slot(dit, _row(prompt, row)) for prompt in self.prompts]}
            for step in self._sample(slots[row], index):
                yield index, step

    @property
    def sequence_length(self) -> int:
        """Tokens that the DiT sees at once, of the text and of one picture."""
        return self.tokens.shape[1] + max(prompt.shape[1] for prompt in self.prompts)

    @property
    def prompts(self) -> list[np.ndarray]:
        """The positive embeddings and, with guidance, the negative ones."""
        return [self.positive] if self.negative is None else [self.positive, self.negative]

    def _slot(self, dit: LoadedGraph, embeddings: np.ndarray) -> PromptSlot:
        _, _, height, width = self.noise.shape
        rope = rope_tables(embeddings.shape[1], height, width, self.model.rope_tables)
        return PromptSlot(dit, embeddings, rope, self.settings.shortcuts, self.skipped)

    def _sample(self, slots: list[PromptSlot], index: int) -> Iterator[Step]:
        """The steps of picture ``index``."""
        denoiser, *negative = (slot.denoiser() for slot in slots)
        if negative:
            denoiser = with_guidance(denoiser, negative[0], self.settings.cfg)
        step_cache = StepCache(denoiser, self.schedule, self.settings.shortcuts.step_cache)
        inpainting = None
        if self.mask is not None and self.latents is not None:
            kept, noise = (pack(_row(latents, index)) for latents in (self.latents, self.noise))
            inpainting = Inpainting(_row(self.mask, index).reshape(1, -1, 1), kept, noise)
        yield from sample(step_cache, _row(self.tokens, index), self.schedule, inpainting, self.settings.sampler)
        self.skipped.steps += step_cache.reused


def _row(batch: np.ndarray, index: int) -> np.ndarray:
    """Row ``index`` of a batch, or the only row there is, keeping the batch axis."""
    index = index if len(batch) > 1 else 0
    return batch[index : index + 1]


def check_embeddings(dit: Bundle, name: str, embeddings: np.ndarray, batch: int) -> None:
    """Raise ``ContractError`` unless ``embeddings`` are ``[1 or batch, L, D]`` with what ``dit`` takes for L and D."""
    _, text = dit.spec.inputs[:2]
    width = text.shape[2]
    if embeddings.ndim != 3 or embeddings.shape[2] != width or embeddings.shape[0] not in (1, batch):
        raise ContractError(
            f"{name} conditioning has shape {list(embeddings.shape)}, this model takes [1, L, {width}]: "
            "encode the prompt with Core AI Text Encode, or CLIP Text Encode and the CLIP of Core AI Model, and the "
            "same model set"
        )
    low, high = dit.spec.limits["L"]
    if not low <= embeddings.shape[1] <= high:
        raise ContractError(f"{name} conditioning has {embeddings.shape[1]} tokens, the DiT takes {low}..{high}")


def check_grid(height: int, width: int) -> None:
    """Raise ``ContractError`` unless the DiT takes a grid of ``height`` x ``width`` tokens."""
    low, high = DIT.limits["N"]
    if height < 1 or width < 1 or not low <= height * width <= high:
        raise ContractError(
            f"a picture of {width * PIXELS_PER_TOKEN}x{height * PIXELS_PER_TOKEN} pixels has {height * width} image "
            f"tokens: the DiT takes {low}..{high}, for a square 128x128 to 1024x1024 pixels"
        )
