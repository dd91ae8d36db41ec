"""Each breakage changes what it names and nothing else."""

from typing import Any

import numpy as np
import pytest

from coreai_rgba_image.host.demo.breakages import (
    Graphs,
    alpha_inverted,
    axes_swapped,
    other_prompt,
    timestep_halved,
    unnormalized_twice,
)
from coreai_rgba_image.host.demo.captions import all_scenes
from coreai_rgba_image.host.demo.layout import build_tokenizer
from coreai_rgba_image.host.latents import LatentStatistics
from coreai_rgba_image.host.prompt import PromptTokenizer
from coreai_rgba_image.host.rope import rope_tables


class Recorder:
    """Stands in for the three graphs and keeps what they were given."""

    def __init__(self) -> None:
        self.inputs: dict[str, Any] = {}
        self.graphs = Graphs(self.encode, self.denoise, self.decode)

    def encode(self, ids: np.ndarray) -> np.ndarray:
        self.inputs["ids"] = ids
        return np.zeros((1, ids.shape[1], 4), dtype=np.float32)

    def denoise(self, **inputs: np.ndarray) -> np.ndarray:
        self.inputs = inputs
        return inputs["img_tokens"]

    def decode(self, tokens: np.ndarray, height: int, width: int) -> np.ndarray:
        self.inputs["tokens"] = tokens
        return np.ones((1, 4, 16 * height, 16 * width), dtype=np.float32)


@pytest.fixture
def inputs() -> dict[str, np.ndarray]:
    tokens = np.ones((1, 24, 64), dtype=np.float32)
    return {"img_tokens": tokens, "timestep": np.ones(1, dtype=np.float32), **vars(rope_tables(9, 6, 4))}


def test_swapped_axes_are_the_tables_of_transposed_positions(inputs: dict[str, np.ndarray]) -> None:
    recorder = Recorder()
    axes_swapped(recorder.graphs).denoise(**inputs)
    transposed = rope_tables(9, 4, 6)
    order = np.arange(24).reshape(4, 6).T.ravel()
    assert np.array_equal(recorder.inputs["img_cos"], transposed.img_cos[:, order])
    assert np.array_equal(recorder.inputs["img_sin"], transposed.img_sin[:, order])
    assert recorder.inputs["txt_cos"] is inputs["txt_cos"]


def test_the_timestep_alone_is_halved(inputs: dict[str, np.ndarray]) -> None:
    recorder = Recorder()
    timestep_halved(recorder.graphs).denoise(**inputs)
    assert recorder.inputs.pop("timestep") == np.float32(0.5)
    assert all(value is inputs[name] for name, value in recorder.inputs.items())


def test_decoder_breakages() -> None:
    recorder = Recorder()
    statistics = LatentStatistics((1.0,) * 64, (3.0,) * 64)
    tokens = np.ones((1, 4, 64), dtype=np.float32)
    unnormalized_twice(recorder.graphs, statistics).decode(tokens, 2, 2)
    assert (recorder.inputs["tokens"] == 4.0).all()
    image = alpha_inverted(recorder.graphs).decode(tokens, 2, 2)
    assert (image[:, :3] == 1).all()
    assert (image[:, 3] == -1).all()


def test_prompts_are_exchanged_in_a_circle() -> None:
    tokenizer = PromptTokenizer(build_tokenizer(("a red circle", "a blue ring"), 600))
    prompts = [scene.caption for scene in all_scenes()[:3]]
    recorder = Recorder()
    broken = other_prompt(recorder.graphs, tokenizer, prompts)
    for prompt, other in zip(prompts, [prompts[1], prompts[2], prompts[0]], strict=True):
        broken.encode(tokenizer.encode(prompt).ids)
        assert np.array_equal(recorder.inputs["ids"], tokenizer.encode(other).ids)
