"""What ``make demo`` runs: the sticker workflow in a real ComfyUI server, its picture written to ``OUT.png``."""

import json
import sys
import tempfile
import time
from pathlib import Path

from get_comfyui import get_comfyui
from server import REPOSITORY, Client, make_base, running_server

WORKFLOW = REPOSITORY / "example_workflows" / "api" / "sticker.json"
SAVE_NODE = "5"


def main(out: Path) -> None:
    workflow = json.loads(WORKFLOW.read_text(encoding="utf-8"))
    with (
        tempfile.TemporaryDirectory(prefix="coreai-rgba-demo-") as folder,
        running_server(get_comfyui(), make_base(Path(folder) / "base")) as server,
    ):
        print(f"ComfyUI is up at {server.address}, drawing: {workflow['1']['inputs']['text']}")
        started = time.monotonic()
        client = Client(server.address)
        run = client.run(workflow)
        if run.outcome != "execution_success":
            raise SystemExit(f"the workflow failed: {run.outcome}\n{server.log[-5000:]}")
        picture = client.view(run.outputs(SAVE_NODE)[0])
        client.close()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(picture)
    print(f"{out.resolve()} ({time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
