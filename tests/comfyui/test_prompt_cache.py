"""A prompt that was encoded before a restart of the server is not encoded again after it."""

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

from coreai_rgba_image.host.bundle import Bundle
from coreai_rgba_image.host.files import CACHE_VARIABLE
from coreai_rgba_image.host.model_set import ModelSet
from coreai_rgba_image.host.prompt_cache import DISK_VARIABLE

from .server import Client, Server, make_base, running_server
from .workflows import latents

pytestmark = pytest.mark.slow


def times_loaded(server: Server, bundle: Bundle) -> int:
    """How often the engine logged that it loaded the bundle, or the compiled form, which is named by its hash."""
    return len(re.findall(rf"loaded \S*({bundle.sha256[:32]}|{bundle.path.stem})\S* in [\d.]+ s", server.log))


def drawn(server: Server, text: str, seed: int) -> np.ndarray:
    """The latents of a workflow that ran to its end."""
    client = Client(server.address)
    run = client.run(latents(text, seed=seed))
    assert run.outcome == "execution_success", run.messages[-1]
    [output] = run.outputs("save_latents", "latents")
    client.close()
    return load(client.view(output))["latent_tensor"]


def test_a_prompt_is_not_encoded_again_after_a_restart(
    comfyui: Path, tiny_set: Path, tiny_model: ModelSet, tmp_path: Path
) -> None:
    base = make_base(tmp_path / "base")
    (base / "models" / "coreai" / "tiny").symlink_to(tiny_set, target_is_directory=True)
    encoder, dit = tiny_model.text_encoder, tiny_model.dit
    environment = {CACHE_VARIABLE: str(tmp_path / "cache")}
    with running_server(comfyui, base, environment) as server:
        first = drawn(server, "kept", seed=1)
        assert (times_loaded(server, encoder), times_loaded(server, dit)) == (1, 1)
    with running_server(comfyui, base, environment) as server:
        again = drawn(server, "kept", seed=1)
        other_seed = drawn(server, "kept", seed=2)
        assert (times_loaded(server, encoder), times_loaded(server, dit)) == (0, 1)
        drawn(server, "another", seed=1)
        assert times_loaded(server, encoder) == 1
    np.testing.assert_array_equal(again, first)
    assert not np.array_equal(other_seed, first)
    with running_server(comfyui, base, environment | {DISK_VARIABLE: "0"}) as server:
        np.testing.assert_array_equal(drawn(server, "kept", seed=1), first)
        assert times_loaded(server, encoder) == 1
