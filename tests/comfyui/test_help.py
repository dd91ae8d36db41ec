"""The help pages say what the real server's nodes have, and the browser gets them."""

import re
from typing import Any

import pytest
import requests

from ..test_help import FOLDER, NODES, shown
from .server import PACK, Client

pytestmark = pytest.mark.slow


def inputs_of(info: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Type and options of each input."""
    return {name: (kind, *rest)[:2] for part in info["input"].values() for name, (kind, *rest) in part.items()}


def values_of(name: str, kind: str, options: dict[str, Any]) -> list[str]:
    """What a page must say in brackets after the input's name."""
    if name == "seed":
        return ["0", "2⁶⁴ - 1"]
    if kind in ("INT", "FLOAT"):
        return [f"{options[key]:g}" for key in ("min", "max", "default")]
    if kind == "BOOLEAN":
        return ["on" if options["default"] else "off"]
    return [f"`{options['default']}`"] if "default" in options else []


@pytest.mark.parametrize("name", NODES)
def test_a_page_explains_each_input_and_output_with_its_limits(client: Client, name: str) -> None:
    page = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    info = client.object_info(name)
    for entry, (kind, options) in inputs_of(info).items():
        [brackets] = re.findall(rf"^- .*?\*\*{entry}\*\*[^(:]*(?:\(([^)]*)\))?:", page, re.MULTILINE)
        said = re.split(r" to |, | pixels", brackets)
        assert [value for value in values_of(entry, kind, options) if value not in said] == [], entry
        if entry != "model":  # its menu is what is there
            assert [option for option in options.get("options", ()) if f"`{option}`" not in page] == []
    assert [output for output in info["output_name"] if f"- **{output}**:" not in page] == []


@pytest.mark.parametrize("name", NODES)
def test_the_browser_gets_a_page_and_its_pictures(client: Client, name: str) -> None:
    folder = f"http://{client.address}/extensions/{PACK}/docs"
    answer = requests.get(f"{folder}/{name}.md", timeout=30)
    assert answer.status_code == 200
    assert answer.content == (FOLDER / f"{name}.md").read_bytes()
    assert "html" not in answer.headers["content-type"]  # which newer pages take for no answer
    for picture in shown(FOLDER / f"{name}.md"):
        answer = requests.get(f"{folder}/{picture}", timeout=30)
        assert answer.headers["content-type"].startswith("image/")
        assert answer.content == (FOLDER / picture).read_bytes()


def test_a_mask_says_which_nodes_want_it_inverted(client: Client) -> None:
    """Nothing can refuse a mask where an alpha is meant: both are a MASK to ComfyUI, and the nodes are its own."""
    info = client.object_info("CoreAIRGBADecode")
    said = dict(zip(info["output_name"], info["output_tooltips"], strict=True))["MASK"]
    for text in (said, (FOLDER / "CoreAIRGBADecode.md").read_text(encoding="utf-8")):
        assert [title for title in ("Join Image with Alpha", "InvertMask") if title not in text] == []
