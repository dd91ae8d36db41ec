"""ComfyUI's page in headless Chromium, driven as a user would.

Scripts may use it without pytest: ``with running_browser() as browser: tab = Tab(browser, server.address)``.
"""

import base64
import contextlib
import io
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import requests
from PIL import Image
from playwright.sync_api import Browser, Locator, Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SCRIPTS = "/extensions/rgba-by-core-ai"
PACK = "coreai-rgba-image"
TIMEOUT_MS = 120_000

FOLLOW = """
() => {
    const followed = {said: [], previews: [], done: false};
    const panel = document.querySelector(".coreai-rgba-sampling");
    const node = app.canvas.graph.nodes.find(node => node.type === "CoreAIDiTSampler");
    const listen = () => followed.said.includes(panel.innerText) || followed.said.push(panel.innerText);
    const watch = new MutationObserver(listen);
    watch.observe(panel, {subtree: true, childList: true, characterData: true});
    let last = null;
    const timer = setInterval(() => {
        const [image] = node.imgs ?? document.querySelectorAll(`[data-node-id="${node.id}"] img`);
        if (!image?.complete || !image.naturalWidth || image.src === last) return;
        const canvas = document.createElement("canvas");
        [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
        canvas.getContext("2d").drawImage(image, 0, 0);
        followed.previews.push(canvas.toDataURL());
        last = image.src;
    }, 50);
    app.api.addEventListener("execution_success", () => {
        watch.disconnect();
        clearInterval(timer);
        followed.done = true;
    }, {once: true});
    window.followed = followed;
}
"""


@contextlib.contextmanager
def running_browser() -> Iterator[Browser]:
    """Chromium, which must be on the path (``CHROMIUM`` says where) and reaches this machine alone."""
    options = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
    options.append("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")  # the page asks its makers for news
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=options)


@dataclass(frozen=True)
class Followed:
    """What the sampler node showed of a run: each text of its panel, and each preview, ``[H, W, 4]``."""

    said: list[str]
    previews: list[np.ndarray]


class Tab:
    """The page of the server at ``address``, with what our scripts did wrong."""

    def __init__(self, browser: Browser, address: str, *, nodes2: bool = False, theme: str = "dark", **settings: Any):
        settings |= {"Comfy.TutorialCompleted": True, "Comfy.VueNodes.Enabled": nodes2, "Comfy.ColorPalette": theme}
        requests.post(f"http://{address}/settings", json=settings, timeout=30).raise_for_status()
        self.address = address
        self.errors: list[str] = []
        self.page: Page = browser.new_page(viewport={"width": 1500, "height": 900})
        self.page.set_default_timeout(TIMEOUT_MS)
        self.page.on("pageerror", lambda error: self._note(f"{error} {error.stack}"))
        self.page.on(
            "console", lambda said: said.type == "error" and self._note(f"{said.text} {said.location.get('url')}")
        )
        self.page.goto(f"http://{address}")
        self.wait_until_ready()

    def _note(self, error: str) -> None:
        if any(name in error for name in (SCRIPTS, PACK, "coreai_rgba")):
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

    def open_templates(self) -> Locator:
        """The dialog of workflows to begin with, showing those of this pack."""
        self.page.get_by_role("button", name="Templates", exact=True).click()
        dialog = self.page.locator("[role=dialog], .p-dialog").filter(has_text="Templates")
        dialog.get_by_text(PACK, exact=True).click()
        return dialog

    def run(self) -> Followed:
        """Click "Run" and watch the sampler node until the prompt has succeeded."""
        self.evaluate(FOLLOW)
        self.page.get_by_role("button", name="Run", exact=True).first.click()  # some call the menu beside it so too
        self.page.wait_for_function("followed.done")
        followed = self.evaluate("followed")
        return Followed(followed["said"], [pixels_of(address) for address in followed["previews"]])

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
    def stage(self) -> Locator:
        return self.page.get_by_role("application")

    def wait_for_picture(self) -> None:
        self.page.wait_for_function("document.querySelector('.coreai-rgba-stage')?.ariaLabel.startsWith('Picture')")

    def canvas(self) -> np.ndarray:
        """The viewer's canvas as it is, ``[H, W, 4]``."""
        return pixels_of(self.evaluate("document.querySelector('.coreai-rgba-stage canvas').toDataURL()"))


def pixels_of(data_address: str) -> np.ndarray:
    """The picture of a ``data:`` address, uint8 ``[H, W, 4]``."""
    content = base64.b64decode(data_address.partition(",")[2])
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGBA"))
