"""English, Chinese and Japanese: names and tooltips say what the nodes do, help pages what the English ones do."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from playwright.sync_api import Browser

from .browser import CHROMIUM, Tab
from .server import REPOSITORY, Server, Workflow
from .workflows import picture

WEB = REPOSITORY / "web"
TRANSLATIONS = ["zh", "ja"]
NODES = [path.stem for path in sorted((WEB / "docs").glob("*.md"))]
LETTERS = {"zh": "[\u4e00-\u9fff]", "ja": "[\u3040-\u30ff\u4e00-\u9fff]"}
SENTENCES = {"zh": "[\u4e00-\u9fff]", "ja": "[\u3040-\u30ff]"}
UNTRANSLATED = {"cfg", "Latent", "Sigmas", "RGBA", "Core AI Sigmas"}
"""Names that ComfyUI's own translations leave as they are, in one of the two languages or in both."""

Tree = dict[str, Any]


@pytest.fixture(scope="module")
def object_info(server: Server) -> Tree:
    """What the server says of this pack's nodes."""
    every = requests.get(f"http://{server.address}/object_info", timeout=60).json()
    return {name: node for name, node in every.items() if node["category"] == "Core AI"}


@pytest.fixture(scope="module")
def served(server: Server) -> Tree:
    """The texts that ComfyUI's page gets, by language."""
    return requests.get(f"http://{server.address}/i18n", timeout=60).json()


def node_texts(node: Tree) -> Tree:
    """The texts of a node of ``/object_info``, where the page looks them up. An output called as its type has no name:
    ComfyUI translates types."""
    inputs = {name: options for kind in node["input"].values() for name, (_, options) in kind.items()}
    outputs = zip(node["output_name"], node["output"], node["output_tooltips"], strict=True)
    return {
        "display_name": node["display_name"],
        "description": node["description"],
        "inputs": {name: {"name": name, "tooltip": options["tooltip"]} for name, options in inputs.items()},
        "outputs": {
            str(index): {"tooltip": tooltip} | ({} if name == kind else {"name": name})
            for index, (name, kind, tooltip) in enumerate(outputs)
        },
    }


def flat(tree: Tree, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], str]:
    """Each text by its keys."""
    texts = {}
    for key, value in tree.items():
        texts |= flat(value, (*path, key)) if isinstance(value, dict) else {(*path, key): value}
    return texts


def numbers(text: str) -> Counter[str]:
    return Counter(re.findall(r"\d+(?:[.,]\d+)*", text))


def test_english_is_what_the_nodes_say(served: Tree, object_info: Tree) -> None:
    assert sorted(object_info) == NODES
    assert sorted(served) == ["en", "ja", "zh"]
    assert served["en"]["nodeDefs"] == {name: node_texts(node) for name, node in object_info.items()}
    assert all(flat(served["en"]).values())


def test_panel_and_command_are_named(served: Tree) -> None:
    """By what the page looks for: the words that web/ registers, and the id of the command without dots."""
    script = (WEB / "models_panel.js").read_text(encoding="utf-8")
    [title], [tooltip] = re.findall('TITLE = "(.+)"', script), re.findall('tooltip: "(.+)"', script)
    [command] = re.findall(r'id: "(coreai_rgba\..+)"', script)
    english = {key: value for key, value in served["en"].items() if key != "nodeDefs"}
    assert english == {
        title: title,
        tooltip: tooltip,
        "menuLabels": {title: title},
        "commands": {command.replace(".", "_"): {"label": title}},
    }


@pytest.mark.parametrize("language", TRANSLATIONS)
def test_translations_are_complete_and_agree(served: Tree, language: str) -> None:
    english, translated = flat(served["en"]), flat(served[language])
    assert translated.keys() == english.keys()
    titles = {
        node["display_name"]: served[language]["nodeDefs"][name] for name, node in served["en"]["nodeDefs"].items()
    }
    for path, original in english.items():
        text = translated[path]
        a_name = path[-1] in ("name", "display_name")
        assert text in UNTRANSLATED or re.search((LETTERS if a_name else SENTENCES)[language], text), path
        assert not re.search("[{}@|]", original + text), f"{path}: the page takes these for its own syntax"
        assert numbers(text) == numbers(original), path
        if a_name:
            continue
        inputs = served[language]["nodeDefs"][path[1]]["inputs"] if path[0] == "nodeDefs" else {}
        for word in re.findall(r"(?<!\w)'(.+?)'(?!\w)|(\w+_\w+)", original):
            quoted = "".join(word)
            assert inputs.get(quoted, {"name": quoted})["name"] in text, path
        for title, node in titles.items():
            assert title not in original or node["display_name"] in text, path


def page(node: str, language: str = "en") -> str:
    path = WEB / "docs" / (f"{node}.md" if language == "en" else f"{node}/{language}.md")
    return path.read_text(encoding="utf-8")


SAME_IN_EVERY_LANGUAGE: dict[str, Callable[[str], Any]] = {
    "pictures": lambda text: re.findall(r"!\[.+?\]\((.+?)\)", text),
    "headings, items and rows": lambda text: re.findall(r"^ *(?:#+|-|\d+\.|\|)(?= )", text, re.MULTILINE),
    "numbers": numbers,
    "code": lambda text: Counter(" ".join(code.split()) for code in re.findall("`([^`]+)`", text)),
    "prompts and messages": lambda text: Counter(" ".join(words.split()) for words in re.findall('"([^"]+)"', text)),
}


@pytest.mark.parametrize("language", TRANSLATIONS)
@pytest.mark.parametrize("node", NODES)
def test_help_pages_agree(object_info: Tree, served: Tree, node: str, language: str) -> None:
    original, translated = page(node), page(node, language)
    for what, of in SAME_IN_EVERY_LANGUAGE.items():
        assert of(translated) == of(original), what
    assert len(re.findall(SENTENCES[language], translated)) > len(original) / 8
    texts = served[language]["nodeDefs"]
    for name, shown in texts[node]["inputs"].items():
        assert f"**{name}**" in original
        assert (f"**{name}**" if shown["name"] == name else f"**{shown['name']} {name}**") in translated
    for name, other in object_info.items():
        assert other["display_name"] not in " ".join(original.split()) or texts[name]["display_name"] in translated


@pytest.fixture
def english_again(server: Server) -> Iterator[None]:
    yield
    requests.post(f"http://{server.address}/settings", json={"Comfy.Locale": "en"}, timeout=30).raise_for_status()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path: apt-get install chromium")
@pytest.mark.usefixtures("english_again")
def test_the_page_shows_translations(
    browser: Browser, server: Server, served: Tree, object_info: Tree, screenshots: Path
) -> None:
    """In both renderers; what is queued and saved does not depend on the language."""
    workflow = picture("in Chinese and in Japanese")
    chinese = Tab(browser, server.address, **{"Comfy.Locale": "zh"})
    chinese.open(workflow)
    saved = chinese.evaluate("JSON.stringify(app.graph.serialize())")
    japanese = Tab(browser, server.address, nodes2=True, **{"Comfy.Locale": "ja"})
    japanese.evaluate("async saved => app.loadGraphData(JSON.parse(saved))", saved)
    for tab, language, nodes2 in [(chinese, "zh", False), (japanese, "ja", True)]:
        texts = served[language]["nodeDefs"]
        tab.look()
        check_names(tab, texts)
        check_queued(tab, workflow, object_info)
        check_tooltip(tab, texts["CoreAIDiTSampler"]["inputs"]["steps"], nodes2=nodes2)
        check_help(tab, page("CoreAIDiTSampler", language))
        tab.page.screenshot(path=screenshots / f"{language}.png")
        assert tab.errors == []
        tab.page.close()


def our_nodes(tab: Tab, script: str) -> dict[str, Any]:
    """What ``script`` says of each of our ``node``s, by type."""
    ours = "app.graph.nodes.filter(node => node.type.startsWith('CoreAI'))"
    return tab.evaluate(f"() => Object.fromEntries({ours}.map(node => [node.type, {script}]))")


def check_names(tab: Tab, texts: Tree) -> None:
    """Titles, and names of inputs, be they connected or typed in."""
    for node, title in our_nodes(tab, "node.title").items():
        assert title == texts[node]["display_name"]
    slots = our_nodes(tab, "node.inputs.map(input => [input.name, input.localized_name])")
    widgets = our_nodes(tab, "node.widgets.map(widget => [widget.name, widget.label])")
    assert len(slots) == 3
    for node in slots:
        names = {name: text["name"] for name, text in texts[node]["inputs"].items()}
        assert dict(slots[node]) == names
        assert {name: label for name, label in widgets[node] if name in names}.items() <= names.items()


def check_queued(tab: Tab, workflow: Workflow, object_info: Tree) -> None:
    """Inputs have the names that the server knows, and the values that they had."""
    prompt = tab.evaluate("async () => Object.values((await app.graphToPrompt()).output)")
    inputs = {node["class_type"]: node["inputs"] for node in prompt}
    for node in workflow.values():
        sent = inputs[node["class_type"]]
        for name, value in node["inputs"].items():
            assert sent[name] == value or isinstance(value, list), name
        if node["class_type"] in object_info:
            known = node_texts(object_info[node["class_type"]])["inputs"]
            assert node["inputs"].keys() <= sent.keys() <= known.keys()


def check_tooltip(tab: Tab, text: Tree, *, nodes2: bool) -> None:
    """Of the sampler's input ``steps``."""
    if nodes2:
        tab.page.get_by_text(text["name"], exact=True).hover()
    else:
        at = tab.evaluate(
            """() => {
                const node = app.graph.nodes.find(node => node.type === "CoreAIDiTSampler");
                const {last_y: top} = node.widgets.find(widget => widget.name === "steps");
                const [x, y] = app.canvas.ds.convertOffsetToCanvas([node.pos[0] + 60, node.pos[1] + top + 10]);
                const {left, top: above} = app.canvas.canvas.getBoundingClientRect();
                return [x + left, y + above];
            }"""
        )
        tab.page.mouse.move(*at)
    shown = tab.page.locator(".p-tooltip-text" if nodes2 else ".node-tooltip")
    shown.filter(has_text=text["tooltip"]).wait_for()


def check_help(tab: Tab, text: str) -> None:
    """The help page of the sampler, with its picture."""
    tab.evaluate(
        """() => {
            app.canvas.ds.offset = [200, 330]; // away from the tabs, for the tools that hover over a chosen node
            app.canvas.selectNode(app.graph.nodes.find(node => node.type === "CoreAIDiTSampler"));
        }"""
    )
    tab.page.get_by_test_id("info-button").click()
    help_page = tab.page.locator(".node-help-content")
    help_page.get_by_text(text.splitlines()[0]).wait_for()
    assert "**" not in help_page.inner_text()
    tab.page.wait_for_function("document.querySelector('.node-help-content img').naturalWidth")
