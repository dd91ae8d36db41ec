"""The routes of the "Core AI models" panel on a real server, which downloads from a hub on this machine."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from coreai_rgba_image.host.describe import describe
from coreai_rgba_image.host.download import NAME
from coreai_rgba_image.host.model_set import EMBEDDED_FOLDER, ModelSet

from ..host.hub_server import HubServer
from .server import Client, Server

pytestmark = pytest.mark.slow

EVENT = "coreai_rgba.models"
ELSEWHERE = "192.0.2.1:818"
"""A host that is not this machine: of one that is, ComfyUI itself refuses requests from other origins."""
DIT = "qi21_dit_full_w16a32_dyn_iofp32.aimodel"
ENCODER = "qi21_encoder_dynL_w16a32_ids_iofp32.aimodel"
PROGRAM = f"{DIT}/main.mlirb"
SECONDS = 60
NO_PAGE = "only ComfyUI's own page"


class Page:
    """Asks the routes, as ComfyUI's page does or as ``headers`` say."""

    def __init__(self, address: str):
        self.address = address
        self.own = {"Origin": f"http://{address}"}

    def ask(self, route: str, body: Any = None, **query: str) -> requests.Response:
        url = f"http://{self.address}/coreai_rgba/{route}"
        if body is None:
            return requests.get(url, params=query, headers=self.own, timeout=SECONDS)
        return requests.post(url, json=body, headers=self.own, timeout=SECONDS)

    def get(self, route: str, **query: str) -> Any:
        answer = self.ask(route, **query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, route: str, **body: Any) -> None:
        answer = self.ask(route, body)
        assert (answer.status_code, answer.json()) == (200, {}), answer.text

    def refused(self, route: str, body: Any = None, **query: str) -> tuple[int, str]:
        answer = self.ask(route, body, **query)
        return answer.status_code, answer.json()["error"]

    def settle(self) -> None:
        """Until all that came before the hub held is counted: a job that is to stop then has nothing to report."""
        before = -1
        while (done := self.get("models")["job"]["done"]) != before:
            before = done
            time.sleep(0.5)

    def clear(self) -> None:
        """End what runs, and remove what was downloaded."""
        self.post("cancel")
        while (job := self.get("models")["job"]) and job["outcome"] in ("running", "stopping"):
            pass
        folder = Path(self.get("models")["published"]["folder"])
        for left in (folder / NAME, folder / f".download-{NAME}"):
            shutil.rmtree(left, ignore_errors=True)

    def accept(self) -> dict[str, Any]:
        """The fields of a download whose licence was read."""
        return {"name": NAME, "accept_license": True, "token": self.get("licence", name=NAME)["token"]}


@pytest.fixture
def page(server: Server, hub: HubServer) -> Iterator[Page]:
    """At its end the server is as it was."""
    hub.forget()
    page = Page(server.address)
    yield page
    hub.heal()
    page.clear()
    shutil.rmtree(server.model_sets / "to-compile", ignore_errors=True)


def followed(client: Client) -> list[dict[str, Any]]:
    """What is told of a job until it has ended."""
    told = []
    for state in client.listen(EVENT):
        told.append(state)
        if state["outcome"] not in ("running", "stopping"):
            break
    return told


def until(client: Client, text: str) -> None:
    for state in client.listen(EVENT):
        assert state["outcome"] == "running", state
        if text in state["text"]:
            return


def test_names_first_then_all_about_each_as_on_the_command_line(page: Page, tiny_set: Path) -> None:
    found = page.get("models")
    assert {"demo", "on-a-disk", "tiny"} <= set(found["names"])
    assert found["published"]["name"] == NAME not in found["names"]
    assert "research and other non-commercial use only" in found["published"]["licence"]
    told = page.get("model", name="demo")
    expected = describe("demo", ModelSet(Path(told["path"])))
    assert Path(told["path"]).samefile(EMBEDDED_FOLDER)
    assert told == json.loads(json.dumps({**expected.to_json(), "lines": list(expected.lines())}))


OWN = ({"Sec-Fetch-Site": "same-origin"}, {"Origin": f"https://{ELSEWHERE}"}, {"Referer": f"http://{ELSEWHERE}/a?b=c"})
FOREIGN = (
    {}, {"Origin": "null"}, {"Origin": "http://evil.example"}, {"Origin": f"http://{ELSEWHERE}0"},
    {"Referer": f"http://evil.example/{ELSEWHERE}"}, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "none"},
    {"Sec-Fetch-Site": "same-site", "Origin": f"http://{ELSEWHERE}"},
    {"Sec-Fetch-Site": "same-origin", "Origin": "http://evil.example"},
)  # fmt: skip


@pytest.mark.parametrize("prefix", ["", "/api"])
def test_only_comfyuis_own_page_is_answered(page: Page, prefix: str) -> None:
    address = f"http://{page.address}{prefix}/coreai_rgba"
    for headers, status in [*((headers, 200) for headers in OWN), *((headers, 403) for headers in FOREIGN)]:
        sent = {**headers, "Host": ELSEWHERE}
        for answer in (
            requests.get(f"{address}/models", headers=sent, timeout=SECONDS),
            requests.get(f"{address}/memory", headers=sent, timeout=SECONDS),
            requests.post(f"{address}/cancel", json={}, headers=sent, timeout=SECONDS),
        ):
            assert answer.status_code == status, (headers, answer.text)
            assert (NO_PAGE in answer.text) == (status == 403)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ({"data": '{"name": "tiny"}', "headers": {"Content-Type": "text/plain"}}, 415),
        ({"data": {"name": "tiny"}}, 415),
        ({"data": "", "headers": {"Content-Type": "application/json"}}, 400),
        ({"data": "[" * 1000, "headers": {"Content-Type": "application/json"}}, 400),
        ({"data": b"\xff{}", "headers": {"Content-Type": "application/json"}}, 400),
        ({"json": ["tiny"]}, 400),
        ({"json": {}}, 400),
        ({"json": {"name": 1}}, 400),
        ({"json": {"name": "tiny", "path": "/"}}, 400),
        ({"json": {"name": "t" * 2000}}, 413),
    ],
)
def test_what_is_not_the_fields_of_a_route_is_refused(page: Page, sent: dict[str, Any], status: int) -> None:
    headers = {**page.own, **sent.pop("headers", {})}
    answer = requests.post(f"http://{page.address}/coreai_rgba/compile", headers=headers, timeout=SECONDS, **sent)
    assert answer.status_code == status, answer.text
    assert page.get("models")["job"] is None or page.get("models")["job"]["name"] != "tiny"


@pytest.mark.parametrize("name", ["", ".", "..", "../coreai/tiny", "tiny/", "/", "TINY", f".download-{NAME}", "{path}"])
def test_only_names_in_the_list_are_taken(page: Page, server: Server, name: str) -> None:
    name = name.format(path=server.model_sets / "tiny")
    for status, error in (page.refused("model", name=name), page.refused("compile", {"name": name})):
        assert (status, "no model set is called" in error, "'tiny'" in error) == (400, True, True)
    status, error = page.refused("licence", name=name or "x")
    assert (status, NAME in error) == (400, True)
    assert page.refused("models", name=name)[0] == 400


def test_nothing_is_downloaded_before_the_licence_was_shown_and_accepted(page: Page, hub: HubServer) -> None:
    good = page.accept()
    for change in ({"token": ""}, {"token": good["token"][::-1]}, {"accept_license": False}, {"name": "tiny"}):
        status, error = page.refused("download", good | change)
        assert (status, "before its licence was shown and accepted" in error) == (403, True), change
    assert page.refused("download", {"name": NAME, "accept_license": True})[0] == 400
    assert page.refused("download", good | {"accept_license": 1})[0] == 400
    assert {request.file for request in hub.requests} == {"", "LICENSE"}
    assert not page.get("models")["published"]["begun"]


def test_a_download_is_shown_cancelled_and_goes_on(page: Page, hub: HubServer, client: Client) -> None:
    offer = page.get("licence", name=NAME)
    assert offer["licence"] == "You may do research with this.\n"
    assert offer["size"] == sum(len(entry.content) for entry in hub.commits[hub.main].values())
    hub.fault(PROGRAM, hold_after=1_000_000, times=1)
    page.post("download", **page.accept())
    until(client, PROGRAM)
    hub.wait_until_held()
    status, error = page.refused("compile", {"name": "tiny"})
    assert (status, error) == (
        400,
        f"the download of {NAME} is running, and only one can at a time: wait until it has ended, or cancel it",
    )
    page.settle()
    page.post("cancel")
    assert page.get("models")["job"]["outcome"] == "stopping"
    hub.heal()
    last = followed(client)[-1]
    folder = page.get("models")["published"]["folder"]
    assert (last["outcome"], last["total"]) == ("cancelled", offer["size"])
    assert last["text"].startswith(
        f"what has arrived stays in {folder}/.download-{NAME}; to go on: coreai-rgba download"
    )
    assert page.get("models")["published"]["begun"]
    assert NAME not in page.get("models")["names"]

    assert page.get("licence", name=NAME)["size"] < offer["size"] - 900_000
    page.post("download", **page.accept())
    last = followed(client)[-1]
    assert (last["outcome"], last["text"]) == ("done", f"{folder}/{NAME} is whole")
    assert hub.asked(PROGRAM)[-1].start > 900_000
    assert NAME in page.get("models")["names"]
    assert NAME in client.object_info("CoreAIDiTSampler")["input"]["required"]["model"][1]["options"]
    assert page.get("model", name=NAME)["licence"] == "You may do research with this."


def test_what_goes_wrong_is_told_as_the_command_line_tells_it(page: Page, hub: HubServer, client: Client) -> None:
    hub.fault("", status=403, times=1)
    status, error = page.refused("licence", name=NAME)
    assert (status, f"forbids {page.get('models')['published']['repository']}" in error) == (400, True)
    accepted = page.accept()
    hub.fault(PROGRAM, status=403)
    page.post("download", **accepted)
    last = followed(client)[-1]
    assert (last["outcome"], "log in with hf auth login" in last["text"]) == ("failed", True)


@pytest.fixture
def to_compile(server: Server) -> Path:
    """A set of one bundle; ``page`` removes it."""
    folder = server.model_sets / "to-compile"
    shutil.copytree(EMBEDDED_FOLDER / ENCODER, folder / ENCODER)
    return folder


def test_a_compile_is_cancelled_and_then_done(page: Page, to_compile: Path, client: Client) -> None:
    page.post("compile", name="to-compile")
    until(client, f"{ENCODER}: compiling, to about 0.0 GB")
    page.post("cancel")
    last = followed(client)[-1]
    assert (last["outcome"], last["text"]) == ("cancelled", "the compile of to-compile was cancelled")
    assert [path.name for path in to_compile.iterdir()] == [ENCODER]
    page.post("compile", name="to-compile")
    told = followed(client)
    assert any("now trying whether it loads here" in state["text"] for state in told)
    copy = f"{ENCODER.removesuffix('.aimodel')}.h16c.aimodelc"
    assert (told[-1]["outcome"], told[-1]["text"]) == ("done", f"compiled: {copy}")
    assert (to_compile / "aot" / ENCODER.removesuffix(".aimodel") / copy).is_dir()
    assert page.get("model", name="to-compile")["parts"][0]["compiled"]["architecture"] == "h16c"


@pytest.fixture
def hundred_sets(server: Server, tiny_set: Path) -> Iterator[None]:
    folder = server.model_sets / "many"
    for number in range(100):
        shutil.copytree(tiny_set, folder / str(number), copy_function=lambda source, target: Path(target).touch())
    yield
    shutil.rmtree(folder)


@pytest.mark.usefixtures("hundred_sets")
def test_500_bundles_do_not_slow_the_menus_down(server: Server, client: Client) -> None:
    """In processor time: this machine may have other things to do."""
    process = psutil.Process(server.process_id)
    options = client.object_info("CoreAIDiTSampler")["input"]["required"]["model"][1]["options"]
    assert sum(name.startswith("many/") for name in options) == 100
    assert len(list((server.model_sets / "many").glob("*/*.aimodel"))) == 500
    before, times = sum(process.cpu_times()[:2]), 5
    for _ in range(times):
        requests.get(f"http://{server.address}/object_info", timeout=SECONDS).raise_for_status()
    assert (sum(process.cpu_times()[:2]) - before) / times < 0.3
