"""What the demo model can be asked for: a small grammar of scenes and the ways a person may word one.

The grammar is closed so that a picture can be judged against its caption without a person looking.
Paraphrases exist for training only: somebody who types freely should get something sensible too.
"""

import random
import re
import zlib
from dataclasses import dataclass
from itertools import product

SHAPES = ("circle", "square", "triangle", "star", "ring", "diamond", "cross", "heart")
COLOURS = {
    "red": (222, 32, 40),
    "orange": (255, 140, 10),
    "yellow": (255, 226, 40),
    "green": (36, 170, 70),
    "blue": (36, 96, 230),
    "purple": (132, 52, 184),
    "pink": (255, 132, 196),
    "black": (22, 22, 26),
}
"""8-bit RGB. Any two differ by more than 80 in one channel, so a tolerance of 40 never fits both."""

SIZES = ("large", "small")

SIZE_WORDS = {"large": ("large", "big", "huge"), "small": ("small", "little", "tiny")}
GLASS_WORDS = ("glass", "glassy", "translucent", "see-through")
STICKER_WORDS = ("sticker", "icon", "shape", "")
TRANSPARENT_WORDS = (
    ", transparent background",
    " on a transparent background",
    " on nothing",
    ", no background",
    " with a transparent background",
    "",
)
BACKGROUND_WORDS = (" on a {} background", " on {}", ", {} background", " with a {} background", " on a {} backdrop")

_CANONICAL = re.compile(
    rf"a (?P<size>{'|'.join(SIZES)}) (?P<glass>glass )?(?P<colour>{'|'.join(COLOURS)}) (?P<shape>{'|'.join(SHAPES)})"
    rf"(?: sticker, transparent background| on a (?P<background>{'|'.join(COLOURS)}) background)"
)


@dataclass(frozen=True)
class Scene:
    """One shape, and what is behind it: ``background`` is a colour name, or None for nothing."""

    size: str
    glass: bool
    colour: str
    shape: str
    background: str | None = None

    def __post_init__(self) -> None:
        if self.background == self.colour:
            raise ValueError(f"a {self.colour} shape on a {self.background} background cannot be seen")

    @property
    def is_hard(self) -> bool:
        """Whether a tiny model finds it hard to draw: the shape hardly stands out from the colour behind it."""
        return self.background is not None and (self.glass or self.size == "small")

    @property
    def caption(self) -> str:
        thing = f"a {self.size} {'glass ' if self.glass else ''}{self.colour} {self.shape}"
        if self.background is None:
            return f"{thing} sticker, transparent background"
        return f"{thing} on a {self.background} background"

    @property
    def held_out(self) -> bool:
        """One scene in ten is never trained on, so that the measure asks for combinations the model has not seen."""
        return zlib.crc32(self.caption.encode()) % 10 == 0


def parse_caption(caption: str) -> Scene:
    """The scene of a caption in the grammar; ``ValueError`` for any other text."""
    match = _CANONICAL.fullmatch(caption)
    if match is None:
        raise ValueError(
            f"not a caption of the demo grammar: {caption!r}; an example is "
            "'a large red star sticker, transparent background' or 'a small glass blue ring on a pink background'"
        )
    words = match.groupdict()
    return Scene(words["size"], words["glass"] is not None, words["colour"], words["shape"], words["background"])


def all_scenes() -> list[Scene]:
    """Every scene of the grammar whose shape can be told from its background: 2048."""
    backgrounds = (None, *COLOURS)
    combinations = product(SIZES, (False, True), COLOURS, SHAPES, backgrounds)
    return [Scene(*words) for words in combinations if words[2] != words[4]]


def random_scene(rng: random.Random, held_out: bool | None = None, transparent: float = 0.5) -> Scene:
    """``transparent`` is the share of scenes with nothing behind the shape; a third are glass.

    ``held_out`` picks one side of the split only.
    """
    while True:
        colour = rng.choice(list(COLOURS))
        others = [name for name in COLOURS if name != colour]
        background = None if rng.random() < transparent else rng.choice(others)
        scene = Scene(rng.choice(SIZES), rng.random() < 1 / 3, colour, rng.choice(SHAPES), background)
        if held_out is None or scene.held_out == held_out:
            return scene


def paraphrase(scene: Scene, rng: random.Random) -> str:
    """Another wording of the scene: synonyms, another word order, no article, capital letters."""
    size = rng.choice(SIZE_WORDS[scene.size])
    glass = rng.choice(GLASS_WORDS) if scene.glass else ""
    sticker = rng.choice(STICKER_WORDS) if scene.background is None else ""
    article = rng.choice(("a", "a", "the", ""))
    orders = (
        (article, size, glass, scene.colour, scene.shape, sticker),
        (article, glass, scene.colour, scene.shape, sticker, f"({size})"),
        (article, scene.colour, glass, scene.shape, sticker + ",", size),
        (article, size, scene.shape, sticker, f"in {glass} {scene.colour}"),
    )
    text = " ".join(part for part in rng.choice(orders) if part)
    if scene.background is None:
        text += rng.choice(TRANSPARENT_WORDS)
    else:
        text += rng.choice(BACKGROUND_WORDS).format(scene.background)
    text = re.sub(r" +", " ", text).replace(" ,", ",")
    return rng.choice((str, str, str.capitalize, str.upper, str.title, lambda words: words + "."))(text)
