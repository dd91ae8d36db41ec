"""Prompt to RGBA picture with a model set: encode, sample, decode.

Each stage loads its bundle, uses it and releases it, because all three together need 58 GB. The
stages are separate so that a graph of nodes can run them one by one; ``generate`` runs them all.
Grids are in latent tokens (pixels / 16); arrays are float32.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from . import runtime
from .contract import DIT, PIXELS_PER_TOKEN, ContractError
from .latents import initial_noise, pack
from .model_set import ModelSet
from .pixels import to_rgba8
from .rope import rope_tables
from .sampler import Denoiser, Inpainting, Step, add_noise, sample_euler, with_guidance
from .schedule import Schedule, partial_schedule

MAX_STEPS = 10_000


def encode_prompts(model: ModelSet, prompts: Sequence[str]) -> list[np.ndarray]:
    """The embeddings of each prompt's own tokens, ``[1, L, D]``; the encoder is loaded once."""
    tokenizer = model.tokenizer
    tokenized = [tokenizer.encode(prompt) for prompt in prompts]
    with runtime.load(model.text_encoder) as encoder:
        return [encoder(input_ids=tokens.ids)["hidden"][:, tokens.drop_idx :] for tokens in tokenized]


def encode_prompt(model: ModelSet, prompt: str) -> np.ndarray:
    """``encode_prompts`` for one prompt."""
    return encode_prompts(model, [prompt])[0]


@dataclass
class Sampling:
    """One run of the sampler over a batch; ``tokens [B, N, 64]`` is its state and, after ``run``, its result.

    ``positive`` and ``negative`` are embeddings ``[1 or B, L, D]``; ``noise`` and ``latents`` are
    ``[B, 64, h, w]``, the latents in model space, where zeros stand for an empty picture.
    ``denoise`` below 1 starts from the latents; ``mask`` ``[1 or B, 1, h, w]`` is 1 where the
    picture may change. Everything is checked on construction, before anything is loaded.
    """

    model: ModelSet
    positive: np.ndarray
    noise: np.ndarray
    steps: int = 40
    cfg: float = 1.0
    negative: np.ndarray | None = None
    latents: np.ndarray | None = None
    denoise: float = 1.0
    mask: np.ndarray | None = None
    schedule: Schedule = field(init=False)
    tokens: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        packed_noise = pack(self.noise)
        batch, _, height, width = self.noise.shape
        check_grid(height, width)
        check_settings(self.steps, self.cfg, self.negative is not None)
        if self.cfg == 1.0:
            self.negative = None  # neg + 1 * (pos - neg) is pos: the negative need not be computed
        for name, embeddings in (("positive", self.positive), ("negative", self.negative)):
            if embeddings is not None:
                self._check_embeddings(name, embeddings, batch)
        if self.latents is None:
            self.latents = np.zeros_like(self.noise)
        if self.latents.shape != self.noise.shape:
            raise ContractError(f"latents are {list(self.latents.shape)}, the noise {list(self.noise.shape)}")
        if self.mask is not None and self.mask.shape not in {(n, 1, height, width) for n in (1, batch)}:
            raise ContractError(f"the mask is {list(self.mask.shape)}: pass [1 or {batch}, 1, {height}, {width}]")
        self.schedule = partial_schedule(self.steps, self.denoise, height * width, self.model.scheduler_config)
        self.tokens = add_noise(pack(self.latents), packed_noise, self.schedule.sigmas[0])

    def _check_embeddings(self, name: str, embeddings: np.ndarray, batch: int) -> None:
        _, text = self.model.dit.spec.inputs[:2]
        width = text.shape[2]
        if embeddings.ndim != 3 or embeddings.shape[2] != width or embeddings.shape[0] not in (1, batch):
            raise ContractError(
                f"{name} conditioning has shape {list(embeddings.shape)}, this model takes [1, L, {width}]: "
                "encode the prompt with CoreAITextEncode and the same model set"
            )
        low, high = self.model.dit.spec.limits["L"]
        if not low <= embeddings.shape[1] <= high:
            raise ContractError(f"{name} conditioning has {embeddings.shape[1]} tokens, the DiT takes {low}..{high}")

    @property
    def total_steps(self) -> int:
        return len(self.tokens) * self.schedule.steps

    def run(self) -> Generator[Step, None, None]:
        """Denoise picture after picture, as the graph takes one at a time; a ``Step`` after each step."""
        if not self.schedule.steps:
            return
        with runtime.load(self.model.dit) as dit:
            for index in range(len(self.tokens)):
                for step in self._sample(dit, index):
                    self.tokens[index] = step.x[0]
                    yield step

    def _sample(self, dit: runtime.LoadedGraph, index: int) -> Iterator[Step]:
        """The steps of picture ``index``."""
        denoiser = self._denoiser(dit, _row(self.positive, index))
        if self.negative is not None:
            denoiser = with_guidance(denoiser, self._denoiser(dit, _row(self.negative, index)), self.cfg)
        inpainting = None
        if self.mask is not None and self.latents is not None:
            kept, noise = (pack(_row(latents, index)) for latents in (self.latents, self.noise))
            inpainting = Inpainting(_row(self.mask, index).reshape(1, -1, 1), kept, noise)
        return sample_euler(denoiser, _row(self.tokens, index), self.schedule, inpainting)

    def _denoiser(self, dit: runtime.LoadedGraph, embeddings: np.ndarray) -> Denoiser:
        """RoPE tables depend on the prompt's length and the grid alone: built once, not per step."""
        height, width = self.noise.shape[2:]
        rope = rope_tables(embeddings.shape[1], height, width, self.model.rope_tables)

        def velocity(x: np.ndarray, timestep: np.ndarray) -> np.ndarray:
            return dit(img_tokens=x, txt_feats=embeddings, timestep=timestep, **vars(rope))["vel"]

        return velocity


def _row(batch: np.ndarray, index: int) -> np.ndarray:
    """Row ``index`` of a batch, or the only row there is, keeping the batch axis."""
    index = index if len(batch) > 1 else 0
    return batch[index : index + 1]


def check_settings(steps: int, cfg: float, has_negative: bool) -> None:
    """Raise ``ContractError`` unless the sampler can run with them."""
    if not 1 <= steps <= MAX_STEPS:
        raise ContractError(f"steps is {steps}: it must be from 1 to {MAX_STEPS}")
    if not np.isfinite(cfg):
        raise ContractError(f"cfg is {cfg}: it must be a finite number")
    if cfg != 1.0 and not has_negative:
        raise ContractError(
            f"cfg is {cfg}, but there is no negative prompt to guide away from: give one, or set cfg to 1"
        )


def check_grid(height: int, width: int) -> None:
    """Raise ``ContractError`` unless the DiT takes a grid of ``height`` x ``width`` tokens."""
    low, high = DIT.limits["N"]
    if height < 1 or width < 1 or not low <= height * width <= high:
        raise ContractError(
            f"a picture of {width * PIXELS_PER_TOKEN}x{height * PIXELS_PER_TOKEN} pixels has {height * width} image "
            f"tokens: the DiT takes {low}..{high}, for a square 128x128 to 1024x1024 pixels"
        )


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
    *,
    steps: int = 40,
    seed: int = 0,
    cfg: float = 1.0,
    negative_prompt: str | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> np.ndarray:
    """One picture, uint8 ``[H, W, 4]``. ``progress`` is told the finished and the total number of steps.

    What can be wrong is found before the first bundle is loaded, the size's VAE decoder included.
    """
    grid = grid_of(width, height)
    check_grid(*grid)
    check_settings(steps, cfg, negative_prompt is not None)
    _ = model.text_encoder, model.dit, model.vae_decoder(*grid)
    noise = initial_noise(seed, *grid)
    prompts = [prompt] if negative_prompt is None or cfg == 1.0 else [prompt, negative_prompt]
    positive, *rest = encode_prompts(model, prompts)
    negative = rest[0] if rest else None
    sampling = Sampling(model, positive, noise, steps=steps, cfg=cfg, negative=negative)
    progress(0, sampling.total_steps)
    for done, _ in enumerate(sampling.run(), start=1):
        progress(done, sampling.total_steps)
    [image] = decode(model, sampling.tokens, *grid)
    return to_rgba8(image)[0]
