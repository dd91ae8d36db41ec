"""A real ComfyUI server with this pack, the tiny model set, and somebody else's pack beside it."""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from coreai_rgba_image.host.model_set import EMBEDDED_FOLDER, ModelSet
from coreai_rgba_image.host.published import PUBLISHED_REPOSITORY

from ..host import stand_in
from ..host.hub_server import HubServer
from .browser import running_browser
from .get_comfyui import get_comfyui
from .get_frontend import get_frontend
from .server import Client, Server, make_base, running_server

OTHER_PACK = {
    "__init__.py": """
import os, sys
sys.path.insert(0, os.path.dirname(__file__))
import host, utils
class OtherPackNode:
    @classmethod
    def INPUT_TYPES(cls): return {"required": {}}
    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "run", "other", True
    def run(self):
        import host.pipeline
        return {"ui": {"owner": [host.OWNER, host.pipeline.OWNER]}}
NODE_CLASS_MAPPINGS = {"OtherPackNode": OtherPackNode}
""",
    "host/__init__.py": "OWNER = 'the other pack'\n",
    "host/pipeline.py": "OWNER = 'the other pack'\n",
    "utils.py": "",
    "nodes/__init__.py": "raise ImportError('this is not ComfyUI')\n",
}
"""A pack that puts itself first on the path, with modules called as ours are. It loads before ours."""


@pytest.fixture(scope="session")
def comfyui() -> Path:
    return get_comfyui()


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    """Where the server downloads from: the published repository, played by the set that comes with the pack."""
    folder = Path(shutil.copytree(EMBEDDED_FOLDER, tmp_path_factory.mktemp("hub") / "published"))
    (folder / "LICENSE").write_text("You may do research with this.\n", encoding="utf-8")
    with HubServer(folder, PUBLISHED_REPOSITORY) as hub:
        yield hub


@pytest.fixture(scope="session")
def start_server(
    comfyui: Path, tiny_set: Path, hub: HubServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Server]]:
    """Starts a server, with ComfyUI's own frontend or with the one in the folder ``frontend``."""
    with contextlib.ExitStack() as running:

        def start(frontend: Path | None = None) -> Server:
            base = make_base(tmp_path_factory.mktemp("comfyui") / "base")
            for name, content in OTHER_PACK.items():
                path = base / "custom_nodes" / "another-pack" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content, encoding="utf-8")
            (base / "models" / "coreai" / "tiny").symlink_to(tiny_set, target_is_directory=True)
            disk = tmp_path_factory.mktemp("disk")
            (disk / "on-a-disk").symlink_to(tiny_set, target_is_directory=True)
            (base / "extra_model_paths.yaml").write_text(f"disk:\n  coreai: {disk}\n", encoding="utf-8")
            environment = {**stand_in.environment(tmp_path_factory.mktemp("mac")), **hub.environment}
            environment["HF_HOME"] = str(tmp_path_factory.mktemp("hf"))
            return running.enter_context(running_server(comfyui, base, environment, frontend=frontend))

        yield start


@pytest.fixture(scope="session")
def server(start_server: Callable[..., Server]) -> Server:
    return start_server()


@pytest.fixture(scope="session")
def newest_server(start_server: Callable[..., Server]) -> Server:
    """The same ComfyUI with the newest frontend."""
    return start_server(frontend=get_frontend())


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    client = Client(server.address)
    yield client
    client.close()


@pytest.fixture(scope="session")
def tiny_model(tiny_set: Path) -> ModelSet:
    """The server's model set ``tiny``, used without a server."""
    return ModelSet(tiny_set)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as browser:
        yield browser


@pytest.fixture
def screenshots(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder for this test in the one that ``COREAI_RGBA_SCREENSHOTS`` names, else in pytest's temporary one."""
    name = re.sub(r"\W+", "-", request.node.name).strip("-")
    folder = Path(os.environ.get("COREAI_RGBA_SCREENSHOTS", tmp_path)) / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder
