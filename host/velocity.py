"""The DiT for samplers that are not ours: the velocity of any latents at any noise level.

What is computed once, the loaded bundle and each prompt's keys and values, lasts for one run of such a sampler.
"""

from contextlib import ExitStack
from types import TracebackType

import numpy as np

from .contract import ContractError
from .denoiser import EXACT, PromptSlot
from .latents import pack, unpack
from .memory import MemoryGuard, working_bytes
from .model_set import ModelSet
from .residency import check_keep, using
from .rope import rope_tables
from .runtime import LoadedGraph
from .sampling import check_embeddings, check_grid

Grid = tuple[int, int]


class VelocityRun:
    """One run of a sampler, as a context: the DiT is loaded when the first velocity is asked for.

    ``keep_loaded`` is one of ``residency.KEEP``. Prompts are told apart by their embeddings, so a sampler may
    ask for several in any order, and for parts of a picture of other sizes.
    """

    def __init__(self, model: ModelSet, keep_loaded: str = "stage") -> None:
        check_keep(keep_loaded)
        self.model = model
        self.keep_loaded = keep_loaded
        self.bundle = model.dit
        self._train_timesteps = np.float32(model.scheduler_config.num_train_timesteps)
        self._guard = MemoryGuard()
        self._stack = ExitStack()
        self._dit: LoadedGraph | None = None
        self._slots: list[tuple[Grid, PromptSlot]] = []

    def __enter__(self) -> "VelocityRun":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._slots.clear()
        self._dit = None
        self._stack.__exit__(kind, error, trace)

    def __call__(self, latents: np.ndarray, sigma: float, embeddings: np.ndarray) -> np.ndarray:
        """The velocity ``[1, 64, h, w]`` of model-space ``latents`` of that shape, for ``embeddings [1, L, D]``.

        ``sigma`` is the noise level, from 0 to 1. Raises ``ContractError`` for anything the DiT does not take, for
        latents that are not finite, which is the sampler's doing, and for such a velocity, which is the model's.
        """
        grid = latents.shape[2:]
        check_grid(*grid)
        check_embeddings(self.bundle, "the", embeddings, batch=1)
        if not np.isfinite(latents).all():
            raise ContractError(
                f"the sampler's own latents are not finite at noise level {sigma:g}: it does not get along with this "
                "schedule, choose another of the two"
            )
        slot = self._slot(grid, embeddings)
        # As ``schedule`` and ``sampler`` round it.
        timestep = np.array([sigma], dtype=np.float32) * self._train_timesteps / np.float32(1000)
        velocity = slot.denoiser()(pack(latents), timestep)
        if not np.isfinite(velocity).all():
            raise ContractError(
                f"the velocity at noise level {sigma:g} is not finite: the model set is damaged or its precision is "
                "too low for this prompt"
            )
        return unpack(velocity, *grid)

    def _slot(self, grid: Grid, embeddings: np.ndarray) -> PromptSlot:
        for known, slot in self._slots:
            if known == grid and np.array_equal(slot.embeddings, embeddings):
                self._guard.check()
                return slot
        rope = rope_tables(embeddings.shape[1], *grid, self.model.rope_tables)
        slot = PromptSlot(self._loaded(grid[0] * grid[1] + embeddings.shape[1]), embeddings, rope, EXACT)
        self._slots.append((grid, slot))
        return slot

    def _loaded(self, sequence_length: int) -> LoadedGraph:
        if self._dit is None:
            working = working_bytes(self.bundle, sequence_length)
            self._dit = self._stack.enter_context(
                using(self.bundle, self.keep_loaded, working=working, others=self.model.bundles)
            )
        return self._dit
