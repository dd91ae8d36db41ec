"""Which bundles stay in memory between two uses.

All bundles of the published set together take 58 GB, so whoever uses one says how long to keep it:
``stage``, the stage that uses it and nothing else; ``all``, until the memory is wanted; ``auto``,
like ``all`` where memory is left for the largest of the set's other bundles, else like ``stage``.
What is kept is the first to go when a stage needs room. For any number of threads.
"""

import atexit
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from . import runtime
from .bundle import Bundle
from .contract import ContractError
from .memory import Memory, MemoryLimits, NotEnoughMemoryError, check_fits, give_back, weight_bytes

KEEP = ("auto", "stage", "all")

logger = logging.getLogger(__name__)

Key = tuple[Path, str]
"""A bundle's folder and hash: another export in the same folder is another bundle."""


class Neighbours(Protocol):
    """Other models in this process, which share its memory: ComfyUI's, where the nodes run."""

    def make_room(self, needed: int) -> None:
        """Unload some, if that takes it, until ``needed`` bytes are available."""

    def loaded(self) -> None:
        """A bundle was loaded: from now on ``release`` may be asked for memory."""

    def released(self) -> None:
        """A bundle was released."""


class Nobody:
    """No neighbours: the command line."""

    def make_room(self, needed: int) -> None: ...

    def loaded(self) -> None: ...

    def released(self) -> None: ...


neighbours: Neighbours = Nobody()
"""Set by whoever brings this process's other models."""


@dataclass
class Resident:
    """A bundle in memory. One that is ``doomed`` is released when its last user leaves, whatever was asked for."""

    graph: runtime.LoadedGraph
    size: int
    users: int = 0
    doomed: bool = False

    @property
    def bundle(self) -> Bundle:
        return self.graph.bundle


_residents: OrderedDict[Key, Resident] = OrderedDict()
"""The least recently used first."""
_table = threading.RLock()
_one_at_a_time = threading.Lock()
"""Two loads must not both count on the same free memory."""


def check_keep(keep: str) -> None:
    """Raise ``ContractError`` unless it is one of ``KEEP``."""
    if keep not in KEEP:
        raise ContractError(f"keep_loaded is {keep!r}: choose one of {', '.join(KEEP)}")


@contextmanager
def using(
    bundle: Bundle, keep: str = "stage", *, working: int = 0, others: Iterable[Bundle] = ()
) -> Iterator[runtime.LoadedGraph]:
    """``bundle`` loaded, for as long as the block lasts, and then kept or released as ``keep`` says.

    ``working`` is what calling it takes beside the weights, in bytes; ``others`` are the bundles
    that ``auto`` leaves room for. Raises ``NotEnoughMemoryError`` before anything is loaded that
    would not fit, and what ``runtime.load`` raises.
    """
    check_keep(keep)
    resident = _enter(bundle, keep, working)
    try:
        yield resident.graph
    except NotEnoughMemoryError:
        release_all()
        raise
    finally:
        _leave(resident, keep, others)


def _enter(bundle: Bundle, keep: str, working: int) -> Resident:
    key = _key(bundle)
    with _one_at_a_time:
        with _table:
            for other in list(_residents):
                replaced = other[0] == key[0] and other != key
                if replaced or (keep == "stage" and other != key and not _residents[other].users):
                    _drop(other)
            resident = _residents.get(key)
            if resident is not None:
                resident.users += 1  # from here on nobody releases it
                _residents.move_to_end(key)
        if resident is None:
            size = weight_bytes(bundle)
            _make_room(bundle, size + working)
            resident = Resident(runtime.load(bundle), size, users=1)
            with _table:
                _residents[key] = resident
            neighbours.loaded()
    return resident


def _leave(resident: Resident, keep: str, others: Iterable[Bundle]) -> None:
    keep_it = keep == "all" or (keep == "auto" and _leaves_room_for(others))
    with _table:
        resident.users -= 1
        if not resident.users and (resident.doomed or not keep_it):
            _drop(_key(resident.bundle))


def _make_room(bundle: Bundle, needed: int) -> None:
    """Have ``needed`` bytes available: from what is kept here, then from the neighbours, else raise."""
    limits = MemoryLimits.configured()
    if missing := limits.missing(needed, Memory.now().available):
        release(missing)
    if limits.missing(needed, Memory.now().available):
        neighbours.make_room(needed + (limits.min_free or 0))
    check_fits(bundle, needed, Memory.now().available, limits)


def _leaves_room_for(others: Iterable[Bundle]) -> bool:
    limits, available = MemoryLimits.configured(), Memory.now().available
    with _table:
        absent = [weight_bytes(bundle) for bundle in others if _key(bundle) not in _residents]
    return not limits.missing(max(absent, default=0), available)


def fits(bundle: Bundle, working: int) -> bool:
    """Whether it can be loaded and called beside what is in use, once what is only kept has gone."""
    return not MemoryLimits.configured().missing(weight_bytes(bundle) + working, _obtainable())


def check_will_fit(bundle: Bundle, working: int) -> None:
    """Raise ``NotEnoughMemoryError`` unless it ``fits``, so that a run need not begin in vain."""
    check_fits(bundle, weight_bytes(bundle) + working, _obtainable(), MemoryLimits.configured())


def _obtainable() -> int:
    """Bytes available, with those of bundles that are not in use."""
    with _table:
        return Memory.now().available + sum(resident.size for resident in _residents.values() if not resident.users)


def release(needed: int) -> int:
    """Release what is not in use, the least recently used first, up to ``needed`` bytes; how many there were."""
    freed = 0
    with _table:
        for key, resident in list(_residents.items()):
            if freed >= needed:
                break
            if not resident.users:
                freed += resident.size
                _drop(key)
    return freed


def release_all() -> None:
    """Release everything: what is in use as soon as it no longer is."""
    with _table:
        for key in list(_residents):
            _drop(key)


def _drop(key: Key) -> None:
    """Release it, or have the last of its users do so. The caller holds the table."""
    resident = _residents[key]
    if resident.users:
        resident.doomed = True
        return
    del _residents[key]
    resident.graph.release()
    give_back()
    logger.info("released %s", resident.bundle.path)
    neighbours.released()


def resident_bytes() -> int:
    """Of all bundles that are loaded, in use or kept."""
    with _table:
        return sum(resident.size for resident in _residents.values())


def loaded() -> list[Resident]:
    """What is loaded now, the least recently used first."""
    with _table:
        return list(_residents.values())


def _key(bundle: Bundle) -> Key:
    return bundle.path, bundle.sha256


atexit.register(release_all)  # the runtime must not find graphs when the interpreter takes itself apart
