"""The panels of ``web/`` in a real browser: ComfyUI's own page in headless Chromium, driven as a user would.

Screenshots go to the folder that ``COREAI_RGBA_SCREENSHOTS`` names, else to pytest's temporary one.
"""

import io
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from .server import Server
from .workflows import picture

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SCRIPTS = "/extensions/rgba-by-core-ai"
TIMEOUT_MS = 60_000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    options = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
    options.append("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")  # the page asks its makers for news
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=options)


class Tab:
    """ComfyUI's page, with what our scripts did wrong."""

    def __init__(self, browser: Browser, server: Server, *, nodes2: bool = False, theme: str = "dark"):
        settings = {"Comfy.TutorialCompleted": True, "Comfy.VueNodes.Enabled": nodes2, "Comfy.ColorPalette": theme}
        requests.post(f"http://{server.address}/settings", json=settings, timeout=30).raise_for_status()
        self.errors: list[str] = []
        self.page: Page = browser.new_page(viewport={"width": 1500, "height": 900})
        self.page.set_default_timeout(TIMEOUT_MS)
        self.page.on("pageerror", lambda error: self._note(f"{error} {error.stack}"))
        self.page.on(
            "console", lambda said: said.type == "error" and self._note(f"{said.text} {said.location.get('url')}")
        )
        self.page.goto(f"http://{server.address}")
        self.wait_until_ready()

    def _note(self, error: str) -> None:
        if SCRIPTS in error or "coreai_rgba" in error:
            self.errors.append(error)

    def wait_until_ready(self) -> None:
        """Until our scripts are set up and a workflow is open."""
        self.page.wait_for_function(
            "document.querySelector('link[href*=coreai_rgba]') && window.app?.graph.nodes.length"
        )

    def evaluate(self, script: str, argument: Any = None) -> Any:
        return self.page.evaluate(script, argument)

    def open(self, workflow: dict[str, Any]) -> None:
        """A workflow in API format, its sampler and decoder beside each other in sight."""
        self.evaluate(
            """async workflow => {
                await app.loadApiJson(workflow, crypto.randomUUID());
                const at = {CoreAIDiTSampler: [0, 0], CoreAIRGBADecode: [450, 0]};
                for (const node of app.graph.nodes) node.pos = at[node.type] ?? [0, 2000];
            }""",
            workflow,
        )

    def look(self) -> None:
        """Bring both nodes into sight."""
        self.evaluate(
            "[app.canvas.ds.scale, app.canvas.ds.offset] = [0.8, [200, 170]]; app.canvas.setDirty(true, true)"
        )

    def into_subgraph(self) -> None:
        """Open the first subgraph there is."""
        self.evaluate(
            """async () => {
                const node = app.graph.nodes.find(node => node.subgraph);
                app.canvas.openSubgraph(node.subgraph, node);
                for (const inner of node.subgraph.nodes) inner.pos = [inner.type === "CoreAIRGBADecode" ? 450 : 0, 0];
            }"""
        )

    def said(self, name: str) -> str:
        return self.page.locator(f".coreai-rgba-{name}").inner_text()

    def press(self, name: str) -> None:
        self.page.get_by_role("button", name=name, exact=True).click()

    @property
    def stage(self) -> Any:
        return self.page.get_by_role("application")

    def wait_for_picture(self) -> None:
        self.page.wait_for_function("document.querySelector('.coreai-rgba-stage')?.ariaLabel.startsWith('Picture')")


@pytest.fixture
def screenshots(tmp_path: Path) -> Path:
    folder = Path(os.environ.get("COREAI_RGBA_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def newest_pictures(server: Server) -> list[np.ndarray]:
    """Exact pixels of what the decode node last gave its viewer, ``[H, W, 4]`` each."""
    [run] = requests.get(f"http://{server.address}/history?max_items=1", timeout=30).json().values()
    files = next(
        entry["pictures"]
        for output in run["outputs"].values()
        for entry in output.get("coreai_rgba", [])
        if "pictures" in entry
    )
    address = f"http://{server.address}/view"
    contents = [requests.get(address, params=file, timeout=30).content for file in files]
    return [np.asarray(Image.open(io.BytesIO(content))) for content in contents]


def follow_run(tab: Tab) -> list[str]:
    """Queue the open workflow; all that the sampling panel said until the picture was there."""
    return tab.evaluate(
        """async () => {
            const said = new Set();
            const panel = [...document.querySelectorAll(".coreai-rgba-sampling")][0];
            const look = () => said.add(panel.innerText);
            const watch = new MutationObserver(look);
            watch.observe(panel, {subtree: true, childList: true, characterData: true});
            const done = new Promise(end => app.api.addEventListener("execution_success", end, {once: true}));
            await app.queuePrompt(0, 1);
            await done;
            watch.disconnect();
            return [...said];
        }"""
    )


@pytest.mark.parametrize(
    ("nodes2", "theme", "in_subgraph"), [(False, "dark", False), (True, "light", True)], ids=["classic", "nodes 2.0"]
)
def test_panels_follow_a_run_and_survive_a_reload(
    browser: Browser, server: Server, screenshots: Path, nodes2: bool, theme: str, in_subgraph: bool
) -> None:
    tab = Tab(browser, server, nodes2=nodes2, theme=theme)
    tab.open(picture(f"in the browser at {time.monotonic()}", steps=2, batch=2))
    if in_subgraph:
        tab.evaluate(
            "app.graph.convertToSubgraph(new Set(app.graph.nodes.filter(node => /Sampler|Decode/.test(node.type))))"
        )
        tab.into_subgraph()
    tab.look()
    assert tab.said("steps") == "Not run yet"

    said = follow_run(tab)
    for step in range(1, 5):
        assert any(f"Step {step} of 4" in text for text in said), said
    assert any("a step" in text and "left" in text for text in said), said
    assert any("In memory" in text and "DiT" in text for text in said), said
    assert tab.said("steps").startswith("4 steps in ")

    tab.wait_for_picture()
    check_layout(tab)
    first, second = newest_pictures(server)
    height, width, _ = first.shape
    check_keys(tab, first)
    check_pointer(tab, first)
    tab.press("Next picture")
    tab.page.wait_for_function("document.querySelector('.coreai-rgba-stage').ariaLabel.startsWith('Picture 2 of 2')")
    check_pointer(tab, second)
    check_background(tab, screenshots)
    tab.page.screenshot(path=screenshots / f"compare-{theme}.png")
    tab.press("Alpha alone: white is opaque")
    tab.page.screenshot(path=screenshots / f"alpha-{theme}.png")

    tab.page.reload()
    tab.wait_until_ready()
    if in_subgraph:
        tab.into_subgraph()
    tab.look()
    tab.wait_for_picture()
    assert f"{width} by {height} pixels" in tab.stage.get_attribute("aria-label")
    assert tab.page.get_by_role("button", name="Alpha alone: white is opaque").get_attribute("aria-pressed") == "true"
    assert tab.said("steps").startswith("4 steps in ")
    check_workflow(tab)
    check_layout(tab)
    tab.page.screenshot(path=screenshots / f"reloaded-{theme}.png")
    check_interruption(tab)
    assert tab.errors == []
    tab.page.close()


def read(tab: Tab) -> tuple[int, int, list[int]]:
    """The pixel that the viewer shows the values of: column, row, red, green, blue and alpha."""
    place, values = tab.said("pixel").split(": ")
    column, row = map(int, place.split(", "))
    return column, row, [int(value) for value in values.split()[1::2]]


def check_keys(tab: Tab, pixels: np.ndarray) -> None:
    """Arrow keys go from pixel to pixel, whose exact values are said; plus and 0 zoom."""
    tab.stage.focus()
    seen = set()
    for key in ["ArrowRight", "ArrowDown", "Shift+ArrowLeft", "Shift+ArrowUp"]:
        tab.stage.press(key)
        column, row, values = read(tab)
        assert values == pixels[row, column].tolist()
        assert tab.page.get_by_role("status").filter(has_text=f"{column}, {row}: R ").count() == 1
        seen.add((column, row))
    assert len(seen) == 4
    all_seen = tab.page.get_by_role("button", name="Show all of the picture").inner_text()
    tab.stage.press("+")
    assert tab.page.get_by_role("button", name="Show all of the picture").inner_text() != all_seen
    tab.stage.press("0")
    assert tab.page.get_by_role("button", name="Show all of the picture").inner_text() == all_seen


def check_pointer(tab: Tab, pixels: np.ndarray) -> None:
    """The values of the pixel in the middle of the stage, where the middle of the picture is."""
    height, width, _ = pixels.shape
    tab.stage.hover()
    column, row, values = read(tab)
    assert abs(column - width / 2) <= 1
    assert abs(row - height / 2) <= 1
    assert values == pixels[row, column].tolist()


def check_background(tab: Tab, folder: Path) -> None:
    """A picture of the user's is the background: alone left of the slider, which arrow keys move."""
    colour = (200, 30, 90)
    Image.new("RGB", (40, 20), colour).save(folder / "background.png")
    tab.press("Before and after, on a background of yours")
    with tab.page.expect_file_chooser() as chooser:
        tab.press("Choose a background picture")
    chooser.value.set_files(folder / "background.png")
    tab.page.wait_for_function(
        """colour => {
            const canvas = document.querySelector(".coreai-rgba-stage canvas");
            const [x, y] = [canvas.width / 3, canvas.height / 2].map(Math.round);
            return canvas.getContext("2d").getImageData(x, y, 1, 1).data.slice(0, 3).join() === colour.join();
        }""",
        arg=colour,
    )
    slider = tab.page.get_by_role("slider", name="Share of the background shown without the picture")
    slider.focus()
    slider.press("ArrowRight")


def check_layout(tab: Tab) -> None:
    """No panel is wider than its node."""
    widths = tab.evaluate(
        """() => app.canvas.graph.nodes.filter(node => /Sampler|Decode/.test(node.type)).map(node => {
            const panel = node.widgets.find(widget => widget.type === "coreai_rgba").element;
            return [panel.getBoundingClientRect().width / app.canvas.ds.scale, node.size[0]];
        })"""
    )
    assert len(widths) == 2
    assert all(0.8 * node < panel <= node for panel, node in widths), widths


def check_interruption(tab: Tab) -> None:
    """The sampling panel says where a run was stopped."""
    tab.evaluate(
        """() => {
            const sampler = app.canvas.graph.nodes.find(node => node.type === "CoreAIDiTSampler");
            sampler.widgets.find(widget => widget.name === "steps").value = 500;
            app.queuePrompt(0, 1);
        }"""
    )
    tab.page.wait_for_function("/Step [1-9]/.test(document.querySelector('.coreai-rgba-steps').innerText)")
    tab.evaluate("() => app.api.interrupt()")
    tab.page.wait_for_function("/Stopped after step/.test(document.querySelector('.coreai-rgba-steps').innerText)")


def check_workflow(tab: Tab) -> None:
    """The panels put no values of theirs into workflows and prompts, but what was chosen is kept."""
    nodes = json.loads(
        tab.evaluate(
            """() => JSON.stringify((app.graph.nodes.find(node => node.subgraph)?.subgraph ?? app.graph).nodes
                .filter(node => node.type === "CoreAIRGBADecode")
                .map(node => [node.serialize(), node.constructor.nodeData.input_order]))"""
        )
    )
    [[node, order]] = nodes
    widgets = [name for kind in order.values() for name in kind if name != "samples"]
    assert len(node["widgets_values"]) == len(widgets)
    assert node["properties"]["coreai_rgba_mode"] == "alpha"
    assert node["properties"]["coreai_rgba_split"] == pytest.approx(0.51)
    prompt = tab.evaluate("async () => Object.values((await app.graphToPrompt()).output)")
    [decoder] = [entry for entry in prompt if entry["class_type"] == "CoreAIRGBADecode"]
    assert sorted(decoder["inputs"]) == sorted([*widgets, "samples"])


def test_pixels_of_a_png_are_exact(browser: Browser, server: Server) -> None:
    """Colours under an alpha of 0 too, which a canvas loses; with every filter a row may have."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (40, 31, 4), dtype=np.uint8)
    ramp = np.add.outer(np.arange(40) * 5, np.arange(31) * 3).astype(np.uint8)[..., None] + noise[:1, :1]
    pixels = np.concatenate([noise, ramp, noise // 64], axis=0)
    pixels[::3, ::2, 3] = 0
    file = io.BytesIO()
    Image.fromarray(pixels, "RGBA").save(file, "png")
    page = browser.new_page()
    page.goto(f"http://{server.address}{SCRIPTS}/png.js")
    decode = f"""async bytes => {{
        const {{decodePng}} = await import("{SCRIPTS}/png.js");
        const {{data, width, height}} = await decodePng(new Uint8Array(bytes).buffer);
        return [width, height, [...data]];
    }}"""
    width, height, data = page.evaluate(decode, list(file.getvalue()))
    assert (height, width) == pixels.shape[:2]
    assert np.array_equal(np.reshape(data, pixels.shape), pixels)
    with pytest.raises(Exception, match="no PNG file"):
        page.evaluate(decode, list(b"JFIF" * 8))
    page.close()
