"""How much memory there is, how much a stage takes, and what to do where the one is less than the other.

A Mac shares its memory between processor and GPU, and goes on by swapping when it runs out: a step
of seconds then takes minutes. So a stage that does not fit is refused before it is loaded, and a
run that makes the machine swap is stopped between two steps.
"""

import ctypes
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from . import compiled, mac
from .bundle import Bundle
from .contract import DIT, TEXT_ENCODER, ContractError

FREE_VARIABLE = "COREAI_RGBA_MIN_FREE_GB"
SWAP_VARIABLE = "COREAI_RGBA_MAX_SWAP_GB"
OFF = "off"

LINUX_COPIES = 2
"""On Linux the program is mapped and most of its weights laid out anew: 1.4 to 1.9 times its bytes were measured."""

DECODER_BYTES_PER_PIXEL = 2000
"""Four maps of 96 channels in fp32 at full size and some room: what decoding takes beside the weights, roughly."""
ROWS_PER_TOKEN = 12
"""What a block of a transformer holds per token at once, as rows of its width in fp32: what was measured, or more."""
ROW_BYTES, SCORE_BYTES, HEAD_SIZE = 4, 8, 128
"""Of a channel in fp32, and of a head's attention score for a pair of tokens, before and after the softmax."""


class NotEnoughMemoryError(ContractError):
    """A stage does not fit into memory, or a run began to use up what is left of it."""


@dataclass(frozen=True)
class Memory:
    """Bytes that can be had without swapping, and bytes swapped out, of the whole machine."""

    available: int
    swapped: int

    @classmethod
    def now(cls) -> "Memory":
        return cls(psutil.virtual_memory().available, psutil.swap_memory().used)


Reader = Callable[[], Memory]


@dataclass(frozen=True)
class MemoryLimits:
    """Bytes that must stay available, and bytes a run may swap out; ``None`` is no limit."""

    min_free: int | None = 1_000_000_000
    max_swapped: int | None = 4_000_000_000

    @classmethod
    def configured(cls) -> "MemoryLimits":
        """As the environment says; ``ContractError`` if that makes no sense."""
        return cls(_bytes_of(FREE_VARIABLE, cls.min_free), _bytes_of(SWAP_VARIABLE, cls.max_swapped))

    def missing(self, needed: int, available: int) -> int:
        """How many bytes are too few for something that takes ``needed``; 0 if it fits or there is no limit."""
        return 0 if self.min_free is None else max(0, needed + self.min_free - available)


def _bytes_of(variable: str, default: int | None) -> int | None:
    """A limit in gigabytes from the environment, in bytes; ``None`` where it says "off"."""
    text = os.environ.get(variable)
    if not text:
        return default
    if text == OFF:
        return None
    try:
        gigabytes = float(text)
    except ValueError:
        gigabytes = math.nan
    if not 0 <= gigabytes < math.inf:
        raise ContractError(f"{variable} is {text!r}: set it to a number of gigabytes, or to {OFF!r} for no limit")
    return int(gigabytes * 1e9)


def weight_bytes(bundle: Bundle) -> int:
    """What the bundle takes loaded: on a Mac the bytes of its compiled copy, or its own if it has none."""
    if not mac.on_mac():
        return LINUX_COPIES * bundle.size
    copy = compiled.state(bundle).path
    return bundle.size if copy is None else sum(path.stat().st_size for path in copy.rglob("*") if path.is_file())


def working_bytes(bundle: Bundle, tokens: int = 0) -> int:
    """What a call takes beside the weights, roughly; ``tokens`` is the length of the transformers' sequence."""
    if bundle.spec.kind in (TEXT_ENCODER.kind, DIT.kind):
        channels = _channels(bundle)
        heads = math.ceil(channels / HEAD_SIZE)
        return tokens * (ROWS_PER_TOKEN * ROW_BYTES * channels + SCORE_BYTES * heads * tokens)
    _, _, height, width = bundle.spec.output("image").shape
    return DECODER_BYTES_PER_PIXEL * int(height) * int(width)


def _channels(bundle: Bundle) -> int:
    """Channels of a token: the encoder's are its output's, and the DiT of this model is as wide as its text."""
    tensors = {tensor.name: tensor for tensor in (*bundle.spec.inputs, *bundle.spec.outputs)}
    return int(tensors["hidden" if bundle.spec.kind == TEXT_ENCODER.kind else "txt_feats"].shape[2])


def check_fits(bundle: Bundle, needed: int, available: int, limits: MemoryLimits) -> None:
    """Raise ``NotEnoughMemoryError`` unless ``needed`` bytes for ``bundle`` leave what ``limits`` says."""
    if limits.missing(needed, available):
        raise NotEnoughMemoryError(
            f"the {bundle.spec.kind} needs {gigabytes(needed)} GB, {gigabytes(available)} GB are available and "
            f"{gigabytes(limits.min_free or 0)} GB of them must stay free. Close other applications, unload other "
            f"models, or choose a smaller picture or model set. {FREE_VARIABLE}={OFF} turns this check off"
        )


@dataclass
class MemoryGuard:
    """Watches over a run: ``check`` raises where going on would swap. ``read`` tells how memory stands."""

    limits: MemoryLimits = field(default_factory=MemoryLimits.configured)
    read: Reader = Memory.now

    def __post_init__(self) -> None:
        self.swapped_before = self.read().swapped

    def check(self) -> None:
        """Raise ``NotEnoughMemoryError`` if a limit is crossed."""
        now, limits = self.read(), self.limits
        swapped = now.swapped - self.swapped_before
        if limits.min_free is not None and now.available < limits.min_free:
            crossed, variable = f"{gigabytes(now.available)} GB of memory are left", FREE_VARIABLE
            limit = f"at least {gigabytes(limits.min_free)} GB must stay free"
        elif limits.max_swapped is not None and swapped > limits.max_swapped:
            crossed, variable = f"{gigabytes(swapped)} GB were swapped out since it began", SWAP_VARIABLE
            limit = f"at most {gigabytes(limits.max_swapped)} GB may be"
        else:
            return
        raise NotEnoughMemoryError(
            f"the run was stopped between two steps: {crossed}, {limit}. Close other applications, set keep_loaded to "
            f"'stage', or choose a smaller picture. {variable} sets the limit, {OFF!r} is none"
        )


def give_back() -> None:
    """Have freed memory return to the system. glibc keeps some: 33 MB after the release of a bundle of 64."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def gigabytes(count: int) -> str:
    """As people read it: 27.3, and 0.004 rather than 0.0."""
    return f"{count / 1e9:.1f}" if count >= 1e8 else f"{count / 1e9:.3f}"
