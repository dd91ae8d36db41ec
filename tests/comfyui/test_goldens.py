"""Workflows saved by every release so far, which this one must load with the same values.

``tests/goldens/VERSION.json`` is what the browser saved, ``VERSION-api.json`` what it queued: each of
our nodes, their inputs off the defaults wherever that costs no time. A release adds its pair; none is
ever changed.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import requests

from ..project_files import ROOT
from .server import Client, Server

pytestmark = pytest.mark.slow

GOLDENS = sorted(path for path in (ROOT / "tests" / "goldens").glob("*.json") if not path.stem.endswith("-api"))
OURS = "CoreAI"
SEED_CONTROL = "control_after_generate"
WIDGETS = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"}

Inputs = dict[str, Any]


@pytest.fixture(params=GOLDENS, ids=lambda path: path.stem)
def golden(request: pytest.FixtureRequest) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """A workflow in UI format, and in API format."""
    path: Path = request.param
    both = path, path.with_stem(path.stem + "-api")
    interface, api = (json.loads(one.read_text(encoding="utf-8")) for one in both)
    return interface, api


@pytest.fixture(scope="module")
def known(server: Server) -> dict[str, dict[str, Any]]:
    """What the server tells the browser about our nodes."""
    answer = requests.get(f"http://{server.address}/object_info", timeout=60)
    answer.raise_for_status()
    return {name: info for name, info in answer.json().items() if name.startswith(OURS)}


def ours(golden: tuple[Any, Any]) -> dict[str, dict[str, Any]]:
    return {str(node["id"]): node for node in golden[0]["nodes"] if node["type"].startswith(OURS)}


def declared(info: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """The inputs of a node today in the browser's order: name to type and options."""
    inputs = {**info["input"]["required"], **info["input"].get("optional", {})}
    order = [name for names in info["input_order"].values() for name in names]
    return {name: _typed(*inputs[name]) for name in order}


def _typed(kind: str | list[str], options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """A menu is a list of its choices, or ``COMBO`` with them among its options."""
    return ("COMBO", {**(options or {}), "options": kind}) if isinstance(kind, list) else (kind, options or {})


def widgets(inputs: dict[str, tuple[str, dict[str, Any]]]) -> list[str]:
    """Names of the values that a saved node lists, which carry no names themselves."""
    names = []
    for name, (kind, options) in inputs.items():
        if kind in WIDGETS:
            names += [name, SEED_CONTROL] if options.get(SEED_CONTROL) else [name]
    return names


def fits(value: Any, kind: str, options: dict[str, Any]) -> bool:
    if kind == "COMBO":
        return value in options["options"]
    types = {"INT": int, "FLOAT": (int, float), "STRING": str, "BOOLEAN": bool}[kind]
    number = kind in ("INT", "FLOAT")
    return isinstance(value, types) and (not number or options["min"] <= value <= options["max"])


def test_every_value_lands_on_the_input_it_was_set_on(golden: tuple[Any, Any], known: Inputs) -> None:
    for number, node in ours(golden).items():
        inputs = declared(known[node["type"]])
        names, values = widgets(inputs), node["widgets_values"]
        assert len(values) <= len(names), node["type"]
        landed = dict(zip(names, values, strict=False))  # what a later release adds comes after these
        landed.pop(SEED_CONTROL, None)
        queued = {name: value for name, value in golden[1][number]["inputs"].items() if not isinstance(value, list)}
        assert landed == queued, node["type"]
        for name, value in landed.items():
            assert fits(value, *inputs[name]), (node["type"], name, value, inputs[name])


def test_every_link_still_fits(golden: tuple[Any, Any], known: Inputs) -> None:
    """By the names of inputs, the places of outputs, and the types of both."""
    nodes = ours(golden)
    for number, node in nodes.items():
        inputs = declared(known[node["type"]])
        for name, value in golden[1][number]["inputs"].items():
            assert name in inputs, (node["type"], name)
            if isinstance(value, list) and value[0] in nodes:
                outputs = known[nodes[value[0]]["type"]]["output"]
                assert outputs[value[1]] == inputs[name][0], (node["type"], name)


def test_it_runs(golden: tuple[Any, Any], client: Client) -> None:
    run = client.run(golden[1])
    assert run.outcome == "execution_success", run.messages[-1]


def test_the_newest_golden_has_every_node_and_every_input(known: Inputs) -> None:
    """So that nothing of a release goes without its golden; the inputs off their defaults, else nothing is shown."""
    interface, api = (json.loads(path.read_text(encoding="utf-8")) for path in _newest())
    saved = {node["type"]: api[str(node["id"])]["inputs"] for node in interface["nodes"]}
    assert known.keys() - saved.keys() == set()
    for node_type, inputs in saved.items():
        if node_type.startswith(OURS):
            assert declared(known[node_type]).keys() - inputs.keys() == set(), node_type


def _newest() -> tuple[Path, Path]:
    newest = max(GOLDENS, key=lambda path: [int(part) for part in path.stem.split(".")])
    return newest, newest.with_stem(newest.stem + "-api")
