"""The DiT bundle as a denoiser, with as little repeated work as the bundle's functions allow.

A text's keys and values are the same in every step, so a bundle that holds ``text_kv`` and ``step``
computes them once per prompt; the velocity is the one ``main`` gives. The first-block cache is
approximate, and used only when asked for.
"""

import logging
from dataclasses import dataclass, field

import numpy as np

from .bundle import Bundle
from .contract import FINISH, HEAD, STEP, TAIL, TEXT_KV, ContractError, HeldArray
from .rope import RopeTables
from .runtime import LoadedGraph
from .sampler import Denoiser
from .step_cache import check_share

logger = logging.getLogger(__name__)

TEXT_REUSE = ("on", "off", "check")
DIFFERENCE_LIMITS = {"float32": 1e-4, "bfloat16": 5e-2}
"""Largest difference between a velocity with the text reused and one without, relative to the largest value."""


@dataclass(frozen=True)
class Shortcuts:
    """What the sampler may leave out.

    ``text_reuse``: keys and values of the text once per prompt ("on"), in every step ("off"), or
    both ways, compared ("check"). ``first_block_cache``: the blocks after the first are skipped
    while what the first one changes has itself changed by less than this share. ``step_cache``: so
    large a share of the steps takes the velocity of the step before. 0 turns either off.
    """

    text_reuse: str = "on"
    first_block_cache: float = 0.0
    step_cache: float = 0.0

    def __post_init__(self) -> None:
        if self.text_reuse not in TEXT_REUSE:
            raise ContractError(f"text_reuse is {self.text_reuse!r}: choose one of {', '.join(TEXT_REUSE)}")
        if not 0 <= self.first_block_cache <= 1:
            raise ContractError(
                f"first_block_cache is {self.first_block_cache}: it must be from 0, which is off, to 1; "
                "README.md says which values are worth trying"
            )
        check_share(self.step_cache)

    def check(self, dit: Bundle) -> None:
        """Raise ``ContractError`` if the bundle lacks the functions that are asked for."""
        needed = [TEXT_KV, STEP] if self.text_reuse == "check" else []
        if self.first_block_cache:
            needed = [TEXT_KV, HEAD, TAIL, FINISH]
        missing = [spec.function for spec in needed if spec.function not in dit.functions]
        if missing:
            raise ContractError(
                f"{dit.path.name} lacks the functions {', '.join(missing)}, as the published bundles do, so it can "
                "neither check the reuse of text nor cache blocks: export it again with coreai-rgba export, or turn "
                "both off"
            )


EXACT = Shortcuts()


@dataclass
class Skipped:
    """How often a whole call of the DiT was left out, and how often its blocks after the first were."""

    steps: int = 0
    blocks: int = 0


@dataclass
class PromptSlot:
    """One prompt in a loaded DiT: what does not change from step to step is made here, once."""

    dit: LoadedGraph
    embeddings: np.ndarray
    rope: RopeTables
    shortcuts: Shortcuts
    skipped: Skipped = field(default_factory=Skipped)
    text: dict[str, HeldArray] = field(init=False, default_factory=dict)
    largest_difference: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.txt_rope = {"txt_cos": self.rope.txt_cos, "txt_sin": self.rope.txt_sin}
        self.img_rope = {"img_cos": self.rope.img_cos, "img_sin": self.rope.img_sin}
        reuse = self.shortcuts.text_reuse != "off" or self.shortcuts.first_block_cache
        if not reuse:
            return
        if not {TEXT_KV.function, STEP.function} <= self.dit.bundle.functions.keys():
            logger.info("%s holds main alone: the text is computed in every step", self.dit.bundle.path.name)
            return
        self.text = self.dit[TEXT_KV.function].hold(txt_feats=self.embeddings, **self.txt_rope)
        logger.info("keys and values of %d text tokens: %.1f MB", self.embeddings.shape[1], self.text_bytes / 1e6)

    @property
    def text_bytes(self) -> int:
        """Bytes that the text's keys and values take while this slot lives."""
        return sum(array.nbytes for array in self.text.values())

    def denoiser(self) -> Denoiser:
        """For one picture: the first-block cache must not see another's steps."""
        if self.shortcuts.first_block_cache:
            return FirstBlockCache(self, self.shortcuts.first_block_cache)
        if not self.text:
            return self.whole
        return self.checked if self.shortcuts.text_reuse == "check" else self.step

    def whole(self, x: np.ndarray, timestep: np.ndarray) -> np.ndarray:
        """The velocity as the published contract computes it, text included."""
        rope = self.txt_rope | self.img_rope
        return self.dit(img_tokens=x, txt_feats=self.embeddings, timestep=timestep, **rope)["vel"]

    def step(self, x: np.ndarray, timestep: np.ndarray) -> np.ndarray:
        return self.dit[STEP.function](img_tokens=x, timestep=timestep, **self.img_rope, **self.text)["vel"]

    def checked(self, x: np.ndarray, timestep: np.ndarray) -> np.ndarray:
        """``step``, compared with ``whole``; raises ``ContractError`` if they are not the same."""
        velocity, expected = self.step(x, timestep), self.whole(x, timestep)
        difference = float(np.abs(velocity - expected).max() / max(np.abs(expected).max(), 1e-12))
        self.largest_difference = max(self.largest_difference, difference)
        limit = DIFFERENCE_LIMITS[next(iter(self.text.values())).dtype]
        logger.info("reusing the text changes the velocity by %.2g of its largest value", difference)
        if not difference <= limit:
            raise ContractError(
                f"reusing the text changes the velocity by {difference:.2g} of its largest value, the limit is "
                f"{limit}: turn text_reuse off, and export {self.dit.bundle.path.name} again"
            )
        return velocity


@dataclass
class FirstBlockCache:
    """Skips the blocks after the first while the first one's change stays what it was.

    ``change`` is that of the last step that ran all blocks: small differences do not add up unseen.
    """

    slot: PromptSlot
    threshold: float
    change: np.ndarray | None = None
    added: HeldArray | None = None

    def __call__(self, x: np.ndarray, timestep: np.ndarray) -> np.ndarray:
        dit, text = self.slot.dit, self.slot.text
        common: dict[str, np.ndarray] = {"timestep": timestep, **self.slot.img_rope}
        head = dit[HEAD.function].hold(img_tokens=x, **common, **text)
        change = head["change"].numpy()
        if self.added is None or self.change is None or differs(change, self.change, self.threshold):
            self.added = dit[TAIL.function].hold(hidden=head["hidden"], **common, **text)["added"]
            self.change = change
        else:
            self.slot.skipped.blocks += 1
        return dit[FINISH.function](hidden=head["hidden"], added=self.added, timestep=timestep)["vel"]


def differs(change: np.ndarray, last: np.ndarray, threshold: float) -> bool:
    """Whether ``change`` is by the share ``threshold`` or more of ``last`` away from it, on average."""
    return not np.abs(change - last).mean() < threshold * np.abs(last).mean()
