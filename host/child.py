"""Running a module of this pack in a process of its own, under whatever name ComfyUI loaded the pack."""

import sys
from pathlib import Path

START = """
import importlib, importlib.util, sys
root, module, *arguments = sys.argv[1:]
spec = importlib.util.spec_from_file_location("pack", root + "/__init__.py", submodule_search_locations=[root])
sys.modules["pack"] = importlib.util.module_from_spec(spec)
importlib.import_module("pack.host." + module).main(*arguments)
"""
"""By its folder, because a pack that ComfyUI loaded has no name that another process could import."""


def command_of(module: str, *arguments: str) -> list[str]:
    """The command that calls ``main`` of a module of ``host``."""
    return [sys.executable, "-P", "-c", START, str(Path(__file__).parents[1]), module, *arguments]
