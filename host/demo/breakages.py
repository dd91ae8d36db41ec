"""The three graphs as plain callables, pictures from them, and ways to break them on purpose.

A measure that a broken pipeline passes measures nothing. Each breakage is a mistake a host could
make; after any of them fewer than half of the pictures may still be right.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ..export.checkpoint import load_dit, load_text_encoder, load_vae_decoder, read_json
from ..latents import LatentStatistics, initial_noise, pack, to_vae_space
from ..pixels import to_rgba8
from ..prompt import PromptTokenizer
from ..rope import AXIS_WIDTHS, rope_tables
from ..sampler import sample
from ..schedule import flow_match_schedule, named_config
from .captions import Scene
from .measure import Verdict, judge

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Graphs:
    """``encode(ids)``, ``denoise(**inputs)`` and ``decode(tokens, height, width)``, arrays as in the contract."""

    encode: Callable[[NDArray[np.int32]], Floats]
    denoise: Callable[..., Floats]
    decode: Callable[[Floats, int, int], Floats]


@dataclass(frozen=True)
class Question:
    """What to draw: a scene, a seed, and a grid in latent tokens."""

    scene: Scene
    seed: int
    height: int = 16
    width: int = 16


def torch_graphs(checkpoint: Path) -> Graphs:
    """The graphs in torch, from a checkpoint folder."""
    encoder, dit = load_text_encoder(checkpoint), load_dit(checkpoint).float()
    decoders: dict[tuple[int, int], torch.nn.Module] = {}

    @torch.inference_mode()
    def encode(ids: NDArray[np.int32]) -> Floats:
        return encoder(torch.from_numpy(ids)).numpy()

    @torch.inference_mode()
    def denoise(**inputs: Floats) -> Floats:
        return dit(**{name: torch.from_numpy(value) for name, value in inputs.items()}).numpy()

    @torch.inference_mode()
    def decode(tokens: Floats, height: int, width: int) -> Floats:
        if (height, width) not in decoders:
            decoders[height, width] = load_vae_decoder(checkpoint, height, width)
        return decoders[height, width](torch.from_numpy(tokens)).numpy()

    return Graphs(encode, denoise, decode)


def checkpoint_tokenizer(checkpoint: Path) -> PromptTokenizer:
    return PromptTokenizer.from_file(checkpoint / "processor")


def checkpoint_statistics(checkpoint: Path) -> LatentStatistics:
    config = read_json(checkpoint / "vae" / "config.json")
    return LatentStatistics(tuple(config["latents_mean"]), tuple(config["latents_std"]))


def sampled(
    graphs: Graphs,
    tokenizer: PromptTokenizer,
    prompt: str,
    seed: int,
    height: int,
    width: int,
    steps: int = 20,
    sampler: str = "euler",
    schedule: str = "model",
) -> Floats:
    """Prompt to tokens ``[1, N, 64]`` without guidance."""
    tokens = tokenizer.encode(prompt)
    text = np.ascontiguousarray(graphs.encode(tokens.ids)[:, tokens.drop_idx :])
    rope = vars(rope_tables(text.shape[1], height, width))

    def velocity(x: Floats, timestep: Floats) -> Floats:
        return graphs.denoise(img_tokens=x, txt_feats=text, timestep=timestep, **rope)

    x = pack(initial_noise(seed, height, width))
    plan = flow_match_schedule(steps, height * width, named_config(schedule))
    for step in sample(velocity, x, plan, sampler=sampler):
        x = step.x
    return x


def picture(
    graphs: Graphs, tokenizer: PromptTokenizer, prompt: str, seed: int, height: int, width: int, steps: int = 20
) -> NDArray[np.uint8]:
    """Prompt to RGBA ``[16 h, 16 w, 4]`` without guidance."""
    tokens = sampled(graphs, tokenizer, prompt, seed, height, width, steps)
    return to_rgba8(graphs.decode(tokens, height, width))[0]


def answers(
    graphs: Graphs, tokenizer: PromptTokenizer, questions: Iterable[Question], steps: int = 20
) -> list[tuple[Question, Verdict]]:
    """Draw and judge each question."""
    results = []
    for question in questions:
        grid = (question.height, question.width)
        made = picture(graphs, tokenizer, question.scene.caption, question.seed, *grid, steps)
        results.append((question, judge(made, question.scene)))
    return results


def axes_swapped(graphs: Graphs) -> Graphs:
    """Rows and columns of the image exchanged in the RoPE tables."""
    first, second, third = (width // 2 for width in AXIS_WIDTHS)
    order = [*range(first), *range(first + second, first + second + third), *range(first, first + second)]

    def denoise(**inputs: Floats) -> Floats:
        for name in ("img_cos", "img_sin"):
            inputs[name] = np.ascontiguousarray(inputs[name][..., order])
        return graphs.denoise(**inputs)

    return replace(graphs, denoise=denoise)


def timestep_halved(graphs: Graphs) -> Graphs:
    def denoise(**inputs: Floats) -> Floats:
        return graphs.denoise(**{**inputs, "timestep": inputs["timestep"] / 2})

    return replace(graphs, denoise=denoise)


def unnormalized_twice(graphs: Graphs, statistics: LatentStatistics) -> Graphs:
    """The host applies ``latents * std + mean`` although the decoder does."""
    return replace(graphs, decode=lambda x, height, width: graphs.decode(to_vae_space(x, statistics), height, width))


def alpha_inverted(graphs: Graphs) -> Graphs:
    flip = np.array([1, 1, 1, -1], dtype=np.float32).reshape(1, 4, 1, 1)
    return replace(graphs, decode=lambda x, height, width: graphs.decode(x, height, width) * flip)


def other_prompt(graphs: Graphs, tokenizer: PromptTokenizer, prompts: list[str]) -> Graphs:
    """Each prompt answered with the embedding of the next in ``prompts``; its rows are cut like the right ones."""
    following = dict(zip(prompts, [*prompts[1:], prompts[0]], strict=True))
    by_ids = {
        tokenizer.encode(prompt).ids.tobytes(): tokenizer.encode(other).ids for prompt, other in following.items()
    }
    return replace(graphs, encode=lambda ids: graphs.encode(by_ids[ids.tobytes()]))


def breakages(
    graphs: Graphs, tokenizer: PromptTokenizer, statistics: LatentStatistics, questions: list[Question]
) -> dict[str, Graphs]:
    """Every breakage by name."""
    prompts = list(dict.fromkeys(question.scene.caption for question in questions))
    return {
        "another prompt's embedding": other_prompt(graphs, tokenizer, prompts),
        "two RoPE axes swapped": axes_swapped(graphs),
        "timestep halved": timestep_halved(graphs),
        "latents un-normalised twice": unnormalized_twice(graphs, statistics),
        "alpha inverted": alpha_inverted(graphs),
    }
