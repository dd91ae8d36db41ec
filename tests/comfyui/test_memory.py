"""Memory in a real server: what ``/free`` gives back, what 200 prompts leave, who makes room for whom."""

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import requests

from coreai_rgba_image.host.residency import KEEP

from .server import Client, Run, Server, Workflow, make_base, running_server
from .test_routes import Page
from .workflows import latents, node, picture

pytestmark = pytest.mark.slow

PROMPTS, SETTLED = 200, 20
"""How many prompts a server draws, and after how many its memory is compared with what it ends at."""

TINY_SIZES = ((192, 128), (176, 144))


def resident_megabytes(server: Server) -> float:
    time.sleep(0.5)  # the runtime unmaps what was released a moment later
    return psutil.Process(server.process_id).memory_info().rss / 1e6


@pytest.fixture(scope="module")
def fresh(comfyui: Path, tiny_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, float]]:
    """A server of this module's own, and its resident megabytes before its first prompt."""
    base = make_base(tmp_path_factory.mktemp("fresh") / "base")
    (base / "models" / "coreai" / "tiny").symlink_to(tiny_set, target_is_directory=True)
    with running_server(comfyui, base) as server:
        yield server, resident_megabytes(server)


def free(client: Client, server: Server) -> None:
    """Asks until something is released: ComfyUI may miss a request that comes while it tidies up after a prompt."""
    released, deadline = times_released(server), time.monotonic() + 30
    while times_released(server) == released and time.monotonic() < deadline:
        client.free(unload_models=True, free_memory=True)
        time.sleep(0.5)


def times_released(server: Server) -> int:
    return server.log.count("released /")


def test_nothing_is_loaded_until_it_is_used(fresh: tuple[Server, float]) -> None:
    """Not by the start, the menus, or nodes that only hand a model on or ask it for a size or noise levels."""
    server, _ = fresh
    client, page = Client(server.address), Page(server.address)
    requests.get(f"http://{server.address}/object_info", timeout=60).raise_for_status()
    assert page.get("memory") == {"bundles": []}
    size = {"width": 192, "height": 128}
    workflow = {
        "model": node("CoreAIModel", model="tiny", keep_loaded="all"),
        "empty": node("CoreAIEmptyLatent", model="tiny", batch_size=1, **size),
        "sigmas": node("CoreAISigmas", model="tiny", steps=4, schedule="model", denoise=1.0, **size),
    }
    for name, output in (("model", 0), ("model", 1), ("model", 2), ("empty", 0), ("sigmas", 0)):
        workflow[f"{name} {output}"] = node("PreviewAny", source=[name, output])
    run = client.run(workflow)
    client.close()
    assert_drawn(run)
    assert page.get("memory") == {"bundles": []}
    assert times_released(server) == 0


def test_free_gives_the_memory_back(fresh: tuple[Server, float]) -> None:
    server, before = fresh
    client = Client(server.address)
    workflow = picture("freed", steps=2)
    for name in ("prompt", "sampler", "decode"):
        workflow[name]["inputs"]["keep_loaded"] = "all"
    assert_drawn(client.run(workflow))
    assert times_released(server) == 0
    assert len(Page(server.address).get("memory")["bundles"]) == 3
    free(client, server)
    client.close()
    assert times_released(server) == 3
    assert resident_megabytes(server) < 1.15 * before


def assert_drawn(run: Run) -> None:
    assert run.outcome == "execution_success", run.messages[-1]


def nth_prompt(number: int) -> Workflow:
    """Seeds, sizes, sets and how long bundles are kept take turns; every eighth is decoded and begins a new text."""
    keep, text = KEEP[number % len(KEEP)], f"prompt {number // 8}"
    if number % 4 == 3:
        return latents(text, model="demo", width=256, height=256, seed=number, steps=1, keep_loaded=keep)
    width, height = TINY_SIZES[number % len(TINY_SIZES)]
    draw = latents if number % 8 else picture
    return draw(text, width=width, height=height, seed=number, steps=1, keep_loaded=keep)


def test_200_prompts_leave_memory_where_the_20th_did(fresh: tuple[Server, float]) -> None:
    server, _ = fresh
    client = Client(server.address)
    after: dict[int, float] = {}
    for number in range(1, PROMPTS + 1):
        assert_drawn(client.run(nth_prompt(number)))
        if number in (SETTLED, PROMPTS):
            after[number] = resident_megabytes(server)
    client.close()
    assert after[PROMPTS] < 1.1 * after[SETTLED], after


SMALL_MAC = '''
"""This machine played as a Mac of 4 GB: models take of it what ComfyUI's accounting says they do."""

import psutil, torch
import comfy.model_management as management
from comfy.model_patcher import ModelPatcher

TOTAL, NATIVE = 4_000_000_000, 3_200_000_000
real = psutil.virtual_memory
def virtual_memory():
    used = sum(model.model_loaded_memory() for model in management.current_loaded_models if model.model is not None)
    return real()._replace(total=TOTAL, available=TOTAL - used)

psutil.virtual_memory = virtual_memory
management.cpu_state, management.vram_state = management.CPUState.MPS, management.VRAMState.SHARED
torch.mps.empty_cache = lambda: None

class NativeModel(torch.nn.Module): pass

class NativePatcher(ModelPatcher):
    """Moves nothing to a GPU that is not there, and counts as if it did."""
    def partially_load(self, *_, **__):
        self.model.model_loaded_weight_memory = self.size
        return self.size
    def detach(self, unpatch_all=True):
        if unpatch_all:
            self.model.model_loaded_weight_memory = 0
        return self.model

native = NativePatcher(NativeModel(), management.get_torch_device(), torch.device("cpu"), size=NATIVE)

def names():
    return [type(model.model.model).__name__ for model in management.current_loaded_models]

class LoadNative:
    @classmethod
    def INPUT_TYPES(cls): return {"required": {"load": ("BOOLEAN", {})}}
    @classmethod
    def IS_CHANGED(cls, **_): return float("nan")
    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "run", "test", True
    def run(self, load):
        if load:
            management.load_models_gpu([native])
        return {"ui": {"names": names()}}

NODE_CLASS_MAPPINGS = {"LoadNative": LoadNative}
'''
"""A pack for the test. It loads before ours, as its name comes first."""


@pytest.fixture(scope="module")
def small_mac(comfyui: Path, tiny_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    base = make_base(tmp_path_factory.mktemp("small") / "base")
    (base / "models" / "coreai" / "tiny").symlink_to(tiny_set, target_is_directory=True)
    pack = base / "custom_nodes" / "a-small-mac"
    pack.mkdir()
    (pack / "__init__.py").write_text(SMALL_MAC, encoding="utf-8")
    with running_server(comfyui, base) as server:
        yield server


def test_native_models_and_ours_make_room_for_each_other(small_mac: Server) -> None:
    client = Client(small_mac.address)

    def in_memory(*, load_native: bool = False) -> list[str]:
        run = client.run({"native": node("LoadNative", load=load_native)})
        assert_drawn(run)
        return [str(name) for name in run.outputs("native", "names")]

    def draw(seed: int) -> None:
        assert_drawn(client.run(latents("in turns", seed=seed, steps=1, keep_loaded="all")))

    draw(1)
    assert in_memory() == ["CoreAIBundles"]
    assert times_released(small_mac) == 0
    assert in_memory(load_native=True) == ["NativeModel"]
    assert times_released(small_mac) == 2  # the encoder and the DiT
    draw(2)
    assert in_memory() == ["CoreAIBundles"]
    free(client, small_mac)
    assert in_memory() == []
    assert times_released(small_mac) == 3
    draw(3)
    client.close()


def test_what_no_unloading_can_make_fit_is_refused(comfyui: Path, tmp_path: Path) -> None:
    with running_server(comfyui, make_base(tmp_path / "base"), {"COREAI_RGBA_MIN_FREE_GB": "1000000"}) as server:
        client = Client(server.address)
        run = client.run(latents("refused", model="demo", width=256, height=256))
        assert run.outcome == "execution_error"
        assert "the text encoder needs" in run.error
        assert "GB are available" in run.error
        client.close()
