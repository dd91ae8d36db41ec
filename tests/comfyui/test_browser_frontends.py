"""What a user does with the examples and the models panel, on ComfyUI's own frontend and on the newest one."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from playwright.sync_api import Browser

from coreai_rgba_image.host.download import NAME

from ..host.hub_server import HubServer
from .browser import CHROMIUM, PACK, Tab
from .make_examples import EXAMPLES, put_photo
from .server import Client, Server
from .test_routes import ENCODER, Page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path: apt-get install chromium"),
]

FRONTENDS = {"server": "own", "newest_server": "newest"}
MODES = {
    "checkerboard": ("On a checkerboard", {(255, 255, 255), (204, 204, 204)}),
    "white": ("On white", {(255, 255, 255)}),
    "black": ("On black", {(0, 0, 0)}),
    "alpha": ("Alpha alone: white is opaque", {(0, 0, 0)}),
    "compare": ("Before and after, on a background of yours", {(0x7F, 0x9F, 0x7F)}),
}
"""The viewer's buttons, and the colours that a transparent corner has then."""

Station = Callable[[str], None]
"""Takes a screenshot."""


@pytest.fixture
def frontend(request: pytest.FixtureRequest, comfyui: Path, hub: HubServer) -> Iterator[Server]:
    """A server by the name of its fixture; before and after, it has run and downloaded nothing."""
    server: Server = request.getfixturevalue(request.param)
    put_photo(comfyui, server.base)
    hub.forget()
    client = Client(server.address)
    client.free(free_memory=True, unload_models=False)
    client.close()
    requests.post(f"http://{server.address}/history", json={"clear": True}, timeout=30).raise_for_status()
    yield server
    hub.heal()
    Page(server.address).clear()


@pytest.mark.parametrize(
    ("frontend", "nodes2", "theme"),
    [("server", False, "light"), ("newest_server", False, "light"), ("newest_server", True, "dark")],
    ids=["own classic", "newest classic", "newest nodes 2.0"],
    indirect=["frontend"],
)
def test_a_sticker_from_the_templates_and_a_download_given_up(
    browser: Browser, frontend: Server, hub: HubServer, screenshots: Path, nodes2: bool, theme: str
) -> None:
    tab = Tab(browser, frontend.address, nodes2=nodes2, theme=theme)

    def station(name: str) -> None:
        tab.page.screenshot(path=screenshots / f"{name}.png")

    open_sticker(tab, station)
    check_run(tab, station)
    check_modes(tab, station)
    check_models_panel(tab, hub, station)
    assert tab.errors == []
    tab.page.close()


def open_sticker(tab: Tab, station: Station) -> None:
    """By its card in the templates dialog."""
    dialog = tab.open_templates()
    card = dialog.get_by_role("heading", name="sticker", exact=True)
    card.wait_for()
    station("1-templates")
    card.click()
    tab.page.wait_for_function("app.graph.nodes.some(node => node.type === 'CoreAIRGBADecode')")
    dialog.wait_for(state="hidden")
    assert tab.said("steps") == "Not run yet"
    assert tab.said("message") == "Run the workflow to see the picture"
    station("2-opened")


def check_run(tab: Tab, station: Station) -> None:
    """The panel counts the steps, and the previews become the star on a checkerboard."""
    followed = tab.run()
    steps = next(text.split()[0] for text in reversed(followed.said) if " steps in " in text)
    for step in range(1, int(steps) + 1):
        assert any(f"Step {step} of {steps}" in text for text in followed.said), followed.said
    assert len({preview.tobytes() for preview in followed.previews}) >= 2
    last = followed.previews[-1][..., :3].astype(int)
    height, width, _ = last.shape
    square = 16
    assert np.abs(last[2 : square - 2, 2 : square - 2] - 204).max() <= 12  # JPEG
    assert np.abs(last[2 : square - 2, square + 2 : 2 * square - 2] - 153).max() <= 12
    red, green, blue = last[height // 2, width // 2]
    assert red > 150 > 80 > max(green, blue)
    tab.wait_for_picture()
    station("3-done")


def check_modes(tab: Tab, station: Station) -> None:
    """Each way to look at the picture shows what it says, where it is transparent and where it is not."""
    shown = set()
    for name, (button, background) in MODES.items():
        tab.press(button)
        pixels = tab.canvas()
        height, width, _ = pixels.shape
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        corner = pixels[top + 2 : top + side // 8, left + 2 : left + side // 8, :3]
        assert {tuple(pixel) for pixel in corner.reshape(-1, 3).tolist()} == background, name
        red, green, _ = pixels[height // 2, width // 2 + side // 20, :3].astype(int)
        assert red > 200
        assert (green > 200) == (name == "alpha")
        shown.add(pixels.tobytes())
        station(f"4-{name}")
    assert len(shown) == len(MODES)


def check_models_panel(tab: Tab, hub: HubServer, station: Station) -> None:
    """The licence comes first; a download shows how far it is, can be cancelled, and says what stays."""
    tab.page.get_by_role("button", name="Core AI models").click()
    panel = tab.page.get_by_role("region", name="Core AI models")
    panel.get_by_role("article", name="demo").get_by_text("ready, ").wait_for()
    station("5-models")

    hub.fault(f"{ENCODER}/main.mlirb", hold_after=1000)  # when the DiT has arrived, half of all
    panel.get_by_role("button", name=f"Download… {NAME}").click()
    dialog = tab.page.get_by_role("dialog", name=f"Licence of {NAME}")
    dialog.get_by_text("You may do research with this.").wait_for()
    accept = dialog.get_by_role("button", name="Download")
    assert accept.is_disabled()
    station("6-licence")
    dialog.get_by_role("checkbox").check()
    accept.click()
    hub.wait_until_held()
    tab.page.wait_for_function("document.querySelector('[data-outcome=running] progress')?.value > 0.5")
    station("7-downloading")

    cancel = panel.get_by_role("button", name=f"Cancel the download of {NAME}")
    cancel.click()
    panel.locator("[data-outcome=stopping]").wait_for()
    hub.heal()
    panel.locator("[data-outcome=cancelled]").get_by_text("cancelled: what has arrived stays in").wait_for()
    assert cancel.is_hidden()
    panel.get_by_role("button", name=f"Go on with the download… {NAME}").wait_for()
    station("8-cancelled")


@pytest.mark.parametrize("frontend", FRONTENDS, ids=FRONTENDS.values(), indirect=True)
def test_examples_open_with_the_values_they_have_as_api(browser: Browser, frontend: Server) -> None:
    kinds = requests.get(f"http://{frontend.address}/object_info", timeout=30).json()
    names = sorted(path.stem for path in EXAMPLES.glob("*.json"))
    assert names == sorted(path.stem for path in (EXAMPLES / "api").glob("*.json"))
    tab = Tab(browser, frontend.address)
    for name in names:
        queued = tab.evaluate(
            "async workflow => { await app.loadGraphData(workflow); return (await app.graphToPrompt()).output; }",
            json.loads((EXAMPLES / f"{name}.json").read_text(encoding="utf-8")),
        )
        expected = json.loads((EXAMPLES / "api" / f"{name}.json").read_text(encoding="utf-8"))
        assert queued.keys() == expected.keys(), name
        for node, entry in expected.items():
            kind = entry["class_type"]
            assert queued[node]["class_type"] == kind
            assert queued[node]["inputs"] == {**optional_defaults(kinds[kind]), **entry["inputs"]}, (name, node)
    check_cards(tab, names)
    assert tab.errors == []
    tab.page.close()


def optional_defaults(kind: dict[str, Any]) -> dict[str, Any]:
    """What the page sends for optional inputs that nobody changed; those without a widget have no value."""
    defaults = {}
    for name, (type_, *options) in kind["input"].get("optional", {}).items():
        settings = options[0] if options else {}
        choices = type_ if isinstance(type_, list) else settings.get("options")
        if "default" in settings or choices:
            defaults[name] = settings.get("default", choices and choices[0])
    return defaults


def check_cards(tab: Tab, names: list[str]) -> None:
    """Each example has a card in the templates dialog, with its picture."""
    dialog = tab.open_templates()
    for name in names:
        dialog.get_by_role("heading", name=name, exact=True).scroll_into_view_if_needed()
        answer = requests.get(f"http://{tab.address}/api/workflow_templates/{PACK}/{name}.jpg", timeout=30)
        assert (answer.status_code, answer.headers["Content-Type"]) == (200, "image/jpeg"), name
        dialog.get_by_alt_text(name, exact=True).wait_for()
    tab.page.wait_for_function("[...document.querySelectorAll('[role=dialog] img')].every(image => image.naturalWidth)")
