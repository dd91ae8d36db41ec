"""What the tests share: a cache of their own, the tiny checkpoint, and the model set exported from it."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from coreai_rgba_image.host.demo.tiny import write_tiny_checkpoint
from coreai_rgba_image.host.export.model_set import export_model_set
from coreai_rgba_image.host.files import CACHE_VARIABLE
from coreai_rgba_image.host.prompt import PromptTokenizer

TINY_SIZES = ("256", "192x128", "176x144")
"""Pictures of the tiny set: square, not square, and one whose latent grid (9 x 11) is odd."""

_cache = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Nothing that a test starts, subprocesses included, may write to the user's cache."""
    config.stash[_cache] = tempfile.mkdtemp(prefix="coreai-rgba-tests-")
    os.environ[CACHE_VARIABLE] = config.stash[_cache]


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_cache], ignore_errors=True)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random weights in the layout of Qwen/Qwen-Image-2.1."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="session")
def tiny_set(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model set of ``tiny_checkpoint``, its DiT computing in fp32 to be comparable with the reference."""
    out = tmp_path_factory.mktemp("models") / "tiny"
    export_model_set(tiny_checkpoint, out, sizes=TINY_SIZES, dit_compute="fp32", report=lambda line: None)
    return out


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_checkpoint: Path) -> PromptTokenizer:
    return PromptTokenizer.from_file(tiny_checkpoint / "processor")


@pytest.fixture(scope="session")
def reference_pipeline(tiny_checkpoint: Path) -> Any:
    """diffusers' own pipeline on the tiny checkpoint, in fp32."""
    from diffusers import QwenImage21Pipeline

    pipeline = QwenImage21Pipeline.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="session")
def comfyui_dir() -> Path:
    """A ComfyUI checkout, which some tests read data of."""
    folder = os.environ.get("COMFYUI_DIR")
    if not folder:
        pytest.skip("COMFYUI_DIR is not set: it names the ComfyUI folder whose files this test reads")
    return Path(folder)


@pytest.fixture(scope="session")
def randomize() -> Callable[[nn.Module], nn.Module]:
    """Gives a module seeded weights that keep the scale of what passes through, so that every part shows."""

    def fill(module: nn.Module) -> nn.Module:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in module.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                fan_in = parameter[0].numel() if parameter.ndim > 1 else 1
                parameter.copy_(noise * fan_in**-0.5 if fan_in > 1 else parameter + 0.1 * noise)
        return module.eval().requires_grad_(False)

    return fill
