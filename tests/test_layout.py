"""What holds for the project's files as a whole."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from .project_files import ROOT, tracked_files

CODE = [
    ROOT / "__init__.py",
    *(path for folder in ("host", "nodes", "tests") for path in (ROOT / folder).rglob("*.py")),
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

BLOCK = """
import builtins, importlib, pkgutil, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
"""


def run(code: str) -> str:
    """What ``code`` prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_module_of_host_imports_comfyui() -> None:
    blocked = {"comfy", "comfy_api", "comfy_extras", "comfy_execution", "folder_paths", "nodes", "server", "execution"}
    names = run(
        f"BLOCKED = {blocked!r}\n{BLOCK}"
        + """
import coreai_rgba_image.host as host
names = [found.name for found in pkgutil.walk_packages(host.__path__, host.__name__ + ".")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(len(names))
"""
    )
    assert int(names) == sum(path.name != "__init__.py" for path in (ROOT / "host").rglob("*.py")) + sum(
        path.parent != ROOT / "host" for path in (ROOT / "host").rglob("__init__.py")
    )


@pytest.mark.parametrize("name", ["coreai_rgba_image", "coreai_rgba_image.host.contract"])
def test_the_root_and_the_contract_import_nothing_heavy(name: str) -> None:
    heavy = {"torch", "coreai", "coreai_torch", "diffusers", "transformers", "tokenizers", "PIL", "safetensors"}
    assert run(f"import sys, {name}; print(sorted({heavy!r} & set(sys.modules)))").strip() == "[]"


@pytest.mark.parametrize("name", ["model_set", "pipeline", "runtime", "sampler"])
def test_running_needs_neither_converter_nor_reference(name: str) -> None:
    blocked = {"coreai", "coreai_torch", "diffusers", "transformers", "safetensors", "accelerate"}
    loaded = run(f"""
BLOCKED = {blocked!r}
{BLOCK}
import coreai_rgba_image.host.{name}
print([name for name in sys.modules if ".host.export" in name or ".host.graphs" in name])
""")
    assert loaded.strip() == "[]"


@pytest.mark.parametrize("path", CODE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_file_is_over_360_lines_and_no_function_over_70(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {node.name: (node.end_lineno or node.lineno) - node.lineno + 1 for node in functions}
    assert len(text.splitlines()) <= 360
    assert {name: length for name, length in lengths.items() if length > 70} == {}


def test_requirements_txt_is_the_projects_dependencies() -> None:
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == PROJECT["project"]["dependencies"]


def test_torch_is_no_requirement_because_comfyui_has_its_own() -> None:
    assert not any(line.startswith("torch") for line in PROJECT["project"]["dependencies"])
    assert PROJECT["project"]["optional-dependencies"]["torch"] == ["torch"]


def test_the_packages_listed_are_the_packages_there_are() -> None:
    folders = [ROOT, *(path.parent for folder in ("host", "nodes") for path in (ROOT / folder).rglob("__init__.py"))]
    names = [".".join(("coreai_rgba_image", *folder.relative_to(ROOT).parts)) for folder in folders]
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(names)


def test_every_folder_with_code_is_a_package() -> None:
    folders = {path.parent for folder in ("host", "nodes") for path in (ROOT / folder).rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_no_file_names_a_folder_of_the_machine_it_was_written_on() -> None:
    traces = [b"/" + b"work/", str(ROOT).encode()]
    found = [path.relative_to(ROOT) for path in tracked_files() if any(trace in path.read_bytes() for trace in traces)]
    assert found == []


def test_no_two_files_are_one_where_case_does_not_count() -> None:
    """As on a Mac's disk. A file and a folder collide as well."""
    names = {Path(*path.parts[:end]) for path in tracked_files() for end in range(1, len(path.parts) + 1)}
    folded: dict[str, list[str]] = {}
    for name in names:
        folded.setdefault(str(name).casefold(), []).append(str(name))
    assert [same for same in folded.values() if len(same) > 1] == []


def test_no_file_is_large() -> None:
    """What can be made again is not kept in the repository; only the model that ships may be large."""
    shipped = ROOT / "host" / "demo" / "data"
    others = [path for path in tracked_files() if shipped not in path.parents]
    assert [path.relative_to(ROOT) for path in others if path.stat().st_size > 2_000_000] == []
