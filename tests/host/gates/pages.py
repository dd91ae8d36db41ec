"""Report pages taken apart, and findings to make them of."""

import base64
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from coreai_rgba_image.host.gates.report import (
    report_page,
)
from coreai_rgba_image.host.gates.rows import Control, Findings, Measured, Probe, Row, at_least, at_most

VOID = {"meta", "img", "path", "circle", "polyline"}
HOSTILE = """<script>alert(1)</script><img src=x onerror='a'>" autofocus onfocus="b" &amp; </style></td>"""


@dataclass
class Node:
    tag: str
    attributes: dict[str, str]
    children: list["Node | str"] = field(default_factory=list)

    def all(self, tag: str = "") -> list["Node"]:
        return [node for node in self.walk() if tag in ("", node.tag)]

    def walk(self) -> Iterator["Node"]:
        yield self
        for child in self.children:
            if isinstance(child, Node):
                yield from child.walk()

    @property
    def text(self) -> str:
        """With plain spaces for those that keep a bar in one line."""
        text = "".join(child if isinstance(child, str) else child.text for child in self.children)
        return text.replace("\N{NO-BREAK SPACE}", " ")

    @property
    def classes(self) -> list[str]:
        return self.attributes.get("class", "").split()


class Tree(HTMLParser):
    """Every element that is opened must be closed, in order."""

    def __init__(self, page: str):
        super().__init__()
        self.open = [Node("", {})]
        self.feed(page)
        self.close()
        assert len(self.open) == 1, [node.tag for node in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {name: value or "" for name, value in attrs})
        assert len(node.attributes) == len(attrs), attrs
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def parsed(findings: Findings) -> Node:
    return Tree(report_page(findings)).open[0]


def pictures_of(page: Node) -> dict[str, np.ndarray]:
    """By caption."""
    found = {}
    for figure in page.all("figure"):
        for image in figure.all("img"):
            head, data = image.attributes["src"].split(",", 1)
            assert head in ("data:image/png;base64", "data:image/webp;base64")
            decoded = Image.open(BytesIO(base64.b64decode(data, validate=True)))
            assert str(decoded.width) == image.attributes["width"]
            assert str(decoded.height) == image.attributes["height"]
            [caption] = figure.all("figcaption")
            assert caption.text == image.attributes["alt"]
            found[caption.text] = np.asarray(decoded)
    return found


def digits(value: float) -> str:
    """As the terminal has it: the page must not differ."""
    return at_least("", value, 0).text


def charts_of(page: Node) -> list[Node]:
    return [figure for figure in page.all("figure") if figure.all("svg")]


def one_row(**measured: Any) -> Findings:
    return Findings({}, [Row("gate", "", Measured([at_least("corr", 1, 0.5)], **measured))])


def pair(height: int = 48, width: int = 80, seed: int = 0) -> dict[str, np.ndarray]:
    """A reference and a picture that is up to 3 levels away from it, fully transparent in its first rows."""
    generator = np.random.default_rng(seed)
    reference = generator.integers(4, 252, (height, width, 4), dtype=np.uint8)
    reference[: height // 4, :, 3] = 0
    ours = (reference + generator.integers(-3, 4, reference.shape)).astype(np.uint8)
    ours[: height // 4] = reference[: height // 4] ^ np.array([255, 255, 255, 0], np.uint8)
    return {"reference": reference, "ours": ours}


def sample() -> Findings:
    corr = [0.999978 - 0.000124 * (step / 39) ** 2 for step in range(40)]
    caught = Control("RoPE grid not centred", [at_least("lowest corr of a step", 0.897, 0.999)])
    return Findings(
        about={"model set": "demo 1.2", "prompt": "a red apple"},
        rows=[
            Row(
                "DiT bundle",
                "40/40, corr 0.999978 to 0.999854",
                Measured(
                    [at_least("lowest corr of a step", min(corr), 0.999), at_most("NaN or infinite", 0, 0)],
                    "40 steps",
                    {"corr": corr},
                ),
                [caught, Control("drop_idx + 1", [], "the text has 17 tokens, not 18")],
                seconds=12.34,
            ),
            Row("encoder", "0.9998", Measured([at_least("corr of a token", 0.976, 0.999)]), [caught]),
            Row("VAE", "", Measured([at_most("max|Δ|", 1.35e-5, 0.01)]), [Control("alpha inverted", [])]),
            Row("text reuse", "not published", None, reason="the bundle holds main alone"),
            Row("end to end", "46.72 dB", Measured([at_least("PSNR on white", 46.7, 30, "dB")], pictures=pair())),
        ],
        probes=[
            Probe(
                "Sensitivity", "Five runs.", ("PSNR, dB", "corr"), {f"run {k}": [40.0 + k, 0.9995] for k in range(5)}
            ),
            Probe("Own band", "bf16 against fp32.", ("PSNR, dB",), {"diffusers": [43.47], "this port": [46.72]}),
        ],
    )
