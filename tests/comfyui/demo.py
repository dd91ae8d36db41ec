"""What ``make demo`` runs: the sticker workflow in a real ComfyUI server, its picture written to ``OUT.png``."""

import asyncio
import json
import runpy
import shutil
import sys
import tempfile
import time
from pathlib import Path

from get_comfyui import get_comfyui
from server import REPOSITORY, make_base, running_server

EXAMPLES = REPOSITORY / "example_workflows" / "api"


def main(out: Path) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="coreai-rgba-demo-") as folder,
        running_server(get_comfyui(), make_base(Path(folder) / "base")) as server,
    ):
        print(f"ComfyUI is up at {server.address}, drawing example_workflows/api/sticker.json", flush=True)
        started = time.monotonic()
        draw = runpy.run_path(str(EXAMPLES / "client.py"))["draw"]
        workflow = json.loads((EXAMPLES / "sticker.json").read_text(encoding="utf-8"))
        [picture] = asyncio.run(draw(server.address, workflow, Path(folder) / "pictures"))
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, out)
    print(f"{out.resolve()} ({time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
