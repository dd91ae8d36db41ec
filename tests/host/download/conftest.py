"""A repository as published, the hub that serves it, and a process that downloads from there."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coreai_rgba_image.host.download import NAME
from coreai_rgba_image.host.model_set import EMBEDDED_FOLDER, find_model_sets

from ..hub_server import HubServer
from .runs import CHILD, DIT, LICENCE, PROGRAM, REPOSITORY, SECONDS, VAE, Run, arguments_for, contents, process


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository as published: two bundles of the set that ships with the pack, and what belongs to them."""
    folder = tmp_path_factory.mktemp("published")
    for name in (DIT, VAE, "tokenizer", "host"):
        shutil.copytree(EMBEDDED_FOLDER / name, folder / name)
    (folder / "LICENSE").write_text(LICENCE, encoding="utf-8")
    (folder / ".gitattributes").write_text("*.mlirb filter=lfs\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def running_hub(published: Path) -> Iterator[HubServer]:
    with HubServer(published, REPOSITORY) as hub:
        yield hub


@pytest.fixture
def hub(running_hub: HubServer) -> HubServer:
    running_hub.forget()
    return running_hub


@pytest.fixture(scope="session")
def environment(running_hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    own = {"HF_HOME": str(tmp_path_factory.mktemp("hf")), "HF_TOKEN": "hf_of_the_test"}
    return {**os.environ, **running_hub.environment, **own}


@pytest.fixture(scope="session")
def process_of_commands(environment: dict[str, str]) -> Iterator[Run]:
    with subprocess.Popen(
        [sys.executable, CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as child:

        def command(*arguments: object) -> tuple[int, str, str]:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(json.dumps([str(argument) for argument in arguments]) + "\n")
            child.stdin.flush()
            status, out, err = json.loads(child.stdout.readline())
            return status, out, err

        yield command


@pytest.fixture
def run(process_of_commands: Run, hub: HubServer) -> Run:
    """Runs a command of ``coreai-rgba`` that downloads from ``hub``."""
    return process_of_commands


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A models folder that does not exist yet."""
    return tmp_path / "models" / "coreai"


@pytest.fixture
def arrives(run: Run, models: Path, published: Path) -> Callable[[], None]:
    """Downloads what is published: it must be there, the whole of it and nothing else."""

    def check() -> None:
        status, out, err = run(*arguments_for(models))
        assert (status, err) == (0, "")
        assert f"{models / NAME} is whole" in out
        assert contents(models / NAME) == contents(published)
        assert [path.name for path in models.iterdir()] == [NAME]

    return check


@pytest.fixture
def nothing_there(models: Path) -> Callable[[], None]:
    """Nothing in ``models`` that a command or ComfyUI would take for a model set."""

    def check() -> None:
        assert find_model_sets([models]) == {}
        assert [path.name for path in models.glob("*") if not path.name.startswith(".")] == []

    return check


@pytest.fixture
def stopped(hub: HubServer, environment: dict[str, str], models: Path) -> Callable[[int], tuple[int, str]]:
    """Stops a download with a signal after a million bytes of the DiT; its exit status and last words."""

    def stop(signum: int) -> tuple[int, str]:
        hub.fault(PROGRAM, hold_after=1_000_000, times=1)
        child = process(environment, arguments_for(models))
        hub.wait_until_held()
        deadline = time.monotonic() + SECONDS
        while sum(path.stat().st_size for path in models.rglob("*.part")) < 900_000 and time.monotonic() < deadline:
            time.sleep(0.01)
        child.send_signal(signum)
        _, err = child.communicate(timeout=SECONDS)
        hub.heal()
        return child.returncode, err

    return stop
