"""How the pack enters a real ComfyUI: quickly, beside others, and without Core AI."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from coreai_rgba_image.host.latents import initial_noise

from .server import PACK, Client, Server, make_base, running_server
from .workflows import latents, node

pytestmark = pytest.mark.slow

BLOCK_COREAI = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("coreai", "coreai_torch"):
            raise ImportError(f"{name} is blocked here")
sys.meta_path.insert(0, Block())
"""


def import_seconds(server: Server) -> float:
    """As ComfyUI prints it."""
    [seconds] = re.findall(rf"([\d.]+) seconds(?! \(IMPORT FAILED\)).*{PACK}$", server.log, re.MULTILINE)
    return float(seconds)


def test_the_pack_is_imported_in_less_than_half_a_second(server: Server, comfyui: Path, tmp_path: Path) -> None:
    seconds = import_seconds(server)
    if seconds >= 0.5:  # other tests run at the same time, which can only add to it
        with running_server(comfyui, make_base(tmp_path / "base")) as again:
            seconds = import_seconds(again)
    assert seconds < 0.5


def test_a_pack_with_modules_of_the_same_names_keeps_them(server: Server, client: Client) -> None:
    """And so do we: our nodes ran in this server, whose path leads to that pack's ``host`` first."""
    assert client.run(latents("beside another pack", steps=1)).outcome == "execution_success"
    run = client.run({"other": node("OtherPackNode")})
    assert run.outputs("other", "owner") == ["the other pack", "the other pack"]
    assert "IMPORT FAILED" not in "".join(line for line in server.log.splitlines() if "custom_nodes" in line)


def test_without_core_ai_the_pack_loads_and_says_what_it_lacks(comfyui: Path, tiny_set: Path, tmp_path: Path) -> None:
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "sitecustomize.py").write_text(BLOCK_COREAI, encoding="utf-8")
    base = make_base(tmp_path / "base")
    (base / "models" / "coreai" / "tiny").symlink_to(tiny_set, target_is_directory=True)
    with running_server(comfyui, base, {"PYTHONPATH": str(tmp_path / "blocked")}) as server:
        client = Client(server.address)
        assert client.object_info("CoreAIRGBADecode")["display_name"]
        run = client.run(latents())
        assert run.outcome == "execution_error"
        assert "pip install coreai-core" in run.error
        client.close()


NOISE = """
import json, sys
sys.argv = ["main.py", "--cpu"]
import comfy.options
comfy.options.enable_args_parsing()
import comfy.sample, numpy, torch
for seed, shape, indices in json.loads(sys.stdin.read()):
    noise = comfy.sample.prepare_noise(torch.zeros(shape), seed, indices)
    sys.stdout.buffer.write(noise.numpy().tobytes())
"""


def test_noise_is_what_comfyui_prepares(comfyui: Path) -> None:
    cases = [
        (0, (1, 64, 8, 12), None),
        (2**64 - 1, (1, 64, 16, 16), None),
        (42, (3, 64, 9, 11), None),
        (42, (3, 64, 8, 8), [4, 0, 4]),
        (7, (1, 64, 8, 8), [2]),
        (7, (2, 64, 8, 8), [0, 1]),
    ]
    text = json.dumps(cases)
    command = [sys.executable, "-c", NOISE]
    process = subprocess.run(command, input=text.encode(), cwd=comfyui, stdout=subprocess.PIPE, check=True, timeout=120)
    ours = [initial_noise(seed, h, w, batch, indices) for seed, (batch, _, h, w), indices in cases]
    theirs = np.frombuffer(process.stdout, np.float32)
    np.testing.assert_array_equal(theirs, np.concatenate([noise.ravel() for noise in ours]))
