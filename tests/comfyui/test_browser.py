"""The panels of ``web/`` in a real browser: what they show of a run, and what of it survives a reload."""

import io
import json
import time
from pathlib import Path

import numpy as np
import pytest
import requests
from PIL import Image
from playwright.sync_api import Browser

from .browser import CHROMIUM, SCRIPTS, Tab
from .server import Server
from .workflows import picture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path: apt-get install chromium"),
]


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


@pytest.mark.parametrize(
    ("which", "nodes2", "theme", "in_subgraph"),
    [("server", False, "dark", False), ("server", True, "light", True), ("newest_server", True, "light", True)],
    ids=["classic", "nodes 2.0", "newest nodes 2.0"],
)
def test_panels_follow_a_run_and_survive_a_reload(
    browser: Browser,
    request: pytest.FixtureRequest,
    screenshots: Path,
    which: str,
    nodes2: bool,
    theme: str,
    in_subgraph: bool,
) -> None:
    server: Server = request.getfixturevalue(which)
    tab = Tab(browser, server.address, nodes2=nodes2, theme=theme)
    tab.open(picture(f"in the browser at {time.monotonic()}", steps=2, batch=2))
    if in_subgraph:
        tab.evaluate(
            "app.graph.convertToSubgraph(new Set(app.graph.nodes.filter(node => /Sampler|Decode/.test(node.type))))"
        )
        tab.into_subgraph()
    tab.look()
    assert tab.said("steps") == "Not run yet"

    said = tab.run().said
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
    tab.page.screenshot(path=screenshots / "compare.png")
    tab.press("Alpha alone: white is opaque")
    tab.page.screenshot(path=screenshots / "alpha.png")

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
    tab.page.screenshot(path=screenshots / "reloaded.png")
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
