"""The engine on the real Core AI runtime. What could kill a process runs in one of its own."""

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coreai_rgba_image.host import runtime
from coreai_rgba_image.host.bundle import MAIN, Bundle, read_bundle
from coreai_rgba_image.host.contract import VAE_DECODER, ContractError
from coreai_rgba_image.host.files import CACHE_VARIABLE

CHILDREN = Path(__file__).parent / "children"

pytestmark = pytest.mark.slow
keeps_compiled = pytest.mark.skipif(sys.platform == "darwin", reason="macOS keeps compiled bundles by itself")


def start(script: str, *arguments: str | Path, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a script of ``children/`` to its end."""
    environment = os.environ | ({CACHE_VARIABLE: str(cache)} if cache else {})
    command = [sys.executable, str(CHILDREN / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)


def result_of(script: str, *arguments: str | Path, cache: Path | None = None) -> Any:
    """What the script prints last, which is JSON."""
    process = start(script, *arguments, cache=cache)
    assert process.returncode == 0, f"exit status {process.returncode}\n{process.stderr[-3000:]}"
    return json.loads(process.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``children/make_bundles.py`` writes."""
    folder = tmp_path_factory.mktemp("bundles")
    process = start("make_bundles.py", folder)
    assert process.returncode == 0, process.stderr
    return folder


REMEDY = (
    r"missing|convert it to|pass a numpy array|it takes|this graph takes|make them equal"
    r"|download|git lfs pull|the contract says|none of the graphs of this model|export it again"
)


def assert_all_refused(results: dict[str, list[str]]) -> None:
    """Each case ended in a ``ContractError`` with a message that says what to do."""
    classes = ("ContractError", "DamagedBundleError")
    wrong = {case: end for case, end in results.items() if end[0] not in classes or not re.search(REMEDY, end[1])}
    assert not wrong


def compiled_folder(cache: Path) -> Path:
    """The one compiled form that is kept there."""
    [folder] = (cache / "compiled").iterdir()
    return folder


def growth(first: dict[str, float], last: dict[str, float]) -> float:
    """How much resident memory grew, as a share of the first; pages of libraries come and go, and do not count."""
    own = [memory["resident"] - memory["libraries"] for memory in (first, last)]
    return (own[1] - own[0]) / first["resident"]


def test_300_calls_grow_memory_by_less_than_5_percent(bundles: Path) -> None:
    before, after = result_of("engine.py", "repeated_calls", bundles / "big.aimodel")
    assert growth(before, after) < 0.05


def test_calls_on_a_plain_event_loop_leak(bundles: Path) -> None:
    """Else the test above could not fail, and the engine's own loop would not be needed."""
    before, after = result_of("engine.py", "repeated_calls_on_a_plain_loop", bundles / "big.aimodel")
    assert growth(before, after) * before["resident"] > 0.9 * 100 * 8.4


def test_ten_loads_of_200_mb_end_where_the_second_did(bundles: Path) -> None:
    assert (bundles / "big.aimodel" / "main.mlirb").stat().st_size > 200e6
    after = result_of("engine.py", "repeated_loads", bundles / "big.aimodel")
    assert len(after) == 10
    assert growth(after[1], after[-1]) < 0.15, after


def test_30_of_30_processes_that_exit_right_after_a_call_exit_0(bundles: Path) -> None:
    bundle = bundles / "set" / "encoder.aimodel"
    start("engine.py", "one_call", bundle)  # compiles
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda _: start("engine.py", "one_call", bundle), range(30)))
    assert [process.returncode for process in done] == [0] * 30
    assert len({process.stdout.splitlines()[-1] for process in done}) == 1


def test_processes_that_exit_during_a_call_exit_0(bundles: Path) -> None:
    done = [start("engine.py", "exit_during_a_call", bundles / "set" / "dit.aimodel") for _ in range(5)]
    assert [process.returncode for process in done] == [0] * 5


def test_control_c_during_a_call_harms_nothing(bundles: Path) -> None:
    result = result_of("engine.py", "control_c", bundles / "set" / "dit.aimodel")
    assert result == {"interrupted": 5, "finished": 5}


def test_a_stopped_run_makes_no_further_call_and_the_next_one_is_whole(bundles: Path) -> None:
    assert result_of("engine.py", "stopped_sampling", bundles / "set") == {"closed": 2, "raised": 3, "whole": 5}


def test_calls_from_eight_threads_are_made_one_at_a_time_and_right(bundles: Path) -> None:
    result = result_of("engine.py", "calls_from_threads", bundles / "set" / "encoder.aimodel")
    assert result == {"right": 80, "most_at_once": 1}


def test_a_forked_child_is_told_to_spawn(bundles: Path) -> None:
    assert "spawn" in result_of("engine.py", "fork", bundles / "set" / "encoder.aimodel")


def test_a_released_graph_says_so(bundles: Path) -> None:
    graph = runtime.load(read_bundle(bundles / "set" / "encoder.aimodel"))
    graph.release()
    graph.release()
    with pytest.raises(RuntimeError, match="load it again"):
        graph(input_ids=np.zeros((1, 16), np.int32))


def test_no_malformed_input_reaches_the_runtime(bundles: Path) -> None:
    results = result_of("malformed.py", bundles / "set")
    for name in ("encoder", "dit", "vae"):
        assert results.pop(f"{name}: good after all") == ["True", ""]
    assert len(results) >= 40
    assert_all_refused(results)


def test_no_damaged_bundle_is_loaded(bundles: Path, tmp_path: Path) -> None:
    results = result_of("damaged.py", bundles, tmp_path)
    assert results.pop("good after all") == ["no error", ""]
    assert len(results) >= 12
    assert_all_refused(results)


@keeps_compiled
def test_the_compiled_form_is_kept_for_the_next_process(bundles: Path, tmp_path: Path) -> None:
    bundle = bundles / "set" / "encoder.aimodel"
    first, second = (result_of("engine.py", "compile_and_call", bundle, cache=tmp_path) for _ in range(2))
    assert (first["compiled"], second["compiled"]) == (True, False)
    assert first["sha256"] == second["sha256"]
    assert compiled_folder(tmp_path).is_dir()


@keeps_compiled
@pytest.mark.parametrize("damage", ["truncated", "missing", "no manifest"])
def test_a_damaged_compiled_form_is_made_again(bundles: Path, tmp_path: Path, damage: str) -> None:
    bundle = bundles / "set" / "encoder.aimodel"
    first = result_of("engine.py", "compile_and_call", bundle, cache=tmp_path)
    folder = compiled_folder(tmp_path)
    largest = max(folder.iterdir(), key=lambda path: path.stat().st_size)
    if damage == "truncated":
        os.truncate(largest, largest.stat().st_size // 2)
    else:
        (largest if damage == "missing" else folder / "manifest.json").unlink()
    second = result_of("engine.py", "compile_and_call", bundle, cache=tmp_path)
    assert second == first
    assert second["compiled"]


@keeps_compiled
def test_processes_that_compile_the_same_bundle_at_once_all_succeed(bundles: Path, tmp_path: Path) -> None:
    bundle = bundles / "big.aimodel"
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda _: result_of("engine.py", "one_call", bundle, cache=tmp_path), range(3)))
    assert len(set(results)) == 1
    assert compiled_folder(tmp_path).name.startswith(read_bundle(bundle).sha256[:32])


@keeps_compiled
def test_a_compiled_form_that_another_process_finished_meanwhile_is_left_alone(
    bundles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be loading it at this moment."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    bundle = read_bundle(bundles / "set" / "encoder.aimodel")
    write_manifest = runtime._write_manifest
    theirs: list[Path] = []

    def both_finish(folder: Path) -> None:
        write_manifest(folder)
        other = tmp_path / "compiled" / f"{bundle.sha256[:32]}-coreai-core-{version('coreai-core')}"
        theirs.append(Path(shutil.copytree(folder, other)))
        (other / "theirs").touch()

    monkeypatch.setattr(runtime, "_write_manifest", both_finish)
    assert runtime.compiled_for_linux(bundle) == theirs[0]
    assert (theirs[0] / "theirs").exists()
    assert compiled_folder(tmp_path) == theirs[0]


@keeps_compiled
def test_a_full_disk_is_refused_before_compiling(
    bundles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(ContractError, match=CACHE_VARIABLE):
        runtime.load(read_bundle(bundles / "big.aimodel"))


def test_a_mac_loads_with_the_default_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``None`` instead of the default options leaves symbols unresolved there."""
    loaded: list[tuple[object, ...]] = []

    class Runtime:
        class SpecializationOptions:
            default = staticmethod(lambda: "default options")

        class AIModel:
            @staticmethod
            async def load(*arguments: object) -> str:
                loaded.append(arguments)
                return "model"

    bundle = Bundle(tmp_path / "small.aimodel", {MAIN: VAE_DECODER}, {}, "")
    bundle.path.mkdir()
    (bundle.path / "main.mlirb").touch()
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(runtime, "import_coreai", lambda: (Runtime, None))
    runtime.load(bundle)
    assert loaded == [(bundle.path, "default options")]
