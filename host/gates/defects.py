"""Mistakes that this port could well have made, each planted in the running code for as long as a context lasts.

They are the gates' negative controls: a gate that does not see the mistake it is there for is worth
nothing. Nothing here changes a file.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .. import latents, pipeline, pixels, prompt, rope, sampler, schedule
from ..denoiser import PromptSlot
from ..graphs import dit, text_encoder, vae_decoder
from ..runtime import LoadedFunction

PACKAGE = __name__.split(".host.", maxsplit=1)[0]

Defect = Callable[[], AbstractContextManager[None]]


@contextmanager
def function(original: Callable[..., Any], mistaken: Callable[..., Any]) -> Iterator[None]:
    """``mistaken`` in place of a function, in every module of this package that uses it by name."""
    modules = [module for name, module in sys.modules.items() if name.startswith(PACKAGE)]
    with ExitStack() as stack:
        for module in modules:
            for name in [name for name, value in vars(module).items() if value is original]:
                stack.enter_context(patch.object(module, name, mistaken))
        yield


@contextmanager
def method(owner: type, name: str, mistaken: Callable[..., Any]) -> Iterator[None]:
    """``mistaken(original, self, ...)`` in place of a method."""
    original = vars(owner)[name]
    with patch.object(owner, name, lambda self, *args, **named: mistaken(original, self, *args, **named)):
        yield


def rope_grid_off_centre() -> AbstractContextManager[None]:
    original = rope.image_positions

    def from_zero(text_len: int, height: int, width: int) -> rope.Positions:
        frames, rows, columns = original(text_len, height, width)
        return frames, rows - rows.min(), columns - columns.min()

    return function(original, from_zero)


def one_token_dropped_too_many() -> AbstractContextManager[None]:
    def encode(original: Any, self: Any, text: str) -> prompt.PromptTokens:
        tokens = original(self, text)
        return replace(tokens, drop_idx=tokens.drop_idx + 1)

    return method(prompt.PromptTokenizer, "encode", encode)


def braces_are_fields() -> AbstractContextManager[None]:
    """A prompt that went through ``str.format`` lost its empty fields."""
    original = prompt.apply_template
    return function(original, lambda text: original(text.replace("{", "").replace("}", "")))


def special_tokens_are_text() -> AbstractContextManager[None]:
    original = prompt.apply_template
    return function(original, lambda text: original(text.replace("<|", "< |")))


def empty_prompt_stays_empty() -> AbstractContextManager[None]:
    original, nothing = prompt.apply_template, "\0"
    return function(original, lambda text: original(text or nothing).replace(nothing, ""))


def final_norm_applied() -> AbstractContextManager[None]:
    def forward(original: Any, self: Any, input_ids: Tensor) -> Tensor:
        hidden: Tensor = original(self, input_ids)
        return F.rms_norm(hidden, (hidden.shape[-1],))

    return method(text_encoder.TextEncoder, "forward", forward)


def encoder_not_causal() -> AbstractContextManager[None]:
    attention = F.scaled_dot_product_attention
    return function_of_torch(lambda *args, is_causal=False, **named: attention(*args, **named))


@contextmanager
def function_of_torch(mistaken: Callable[..., Any]) -> Iterator[None]:
    with patch.object(F, "scaled_dot_product_attention", mistaken):
        yield


def encoder_positions_off_by_one() -> AbstractContextManager[None]:
    """Each query and key is rotated by the position before its own, the first one by its own."""
    original = text_encoder.rotate_halves

    def late(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        before = torch.arange(len(cos)).sub(1).clamp(min=0)
        return original(x, cos[before], sin[before])

    return function(original, late)


def hidden_states_one_token_late() -> AbstractContextManager[None]:
    def call(original: Any, self: Any, **arrays: Any) -> dict[str, np.ndarray]:
        outputs: dict[str, np.ndarray] = original(self, **arrays)
        return {name: np.roll(value, 1, axis=1) if name == "hidden" else value for name, value in outputs.items()}

    return method(LoadedFunction, "__call__", call)


def image_modulated_from_0() -> AbstractContextManager[None]:
    def modulate(original: Any, self: Any, embedding: Tensor) -> Any:
        return original(self, self.embed_timestep(torch.zeros(1)))

    return method(dit.DiT, "modulate", modulate)


def text_not_causal() -> AbstractContextManager[None]:
    return function(dit.text_attention, F.scaled_dot_product_attention)


def timestep_frequencies_in_bf16() -> AbstractContextManager[None]:
    original = dit.timestep_embedding

    def rounded(timestep: Tensor) -> Tensor:
        exp = torch.exp
        with patch.object(torch, "exp", lambda x: exp(x).bfloat16().float()):
            return original(timestep)

    return function(original, rounded)


def sigmas_off_by_one() -> AbstractContextManager[None]:
    def nodes(original: Any, self: Any, steps: int) -> np.ndarray:
        return original(self, steps + 1)[:-1]

    return method(schedule.SchedulerConfig, "nodes", nodes)


def timesteps_of_the_next_step() -> AbstractContextManager[None]:
    original = sampler.timestep_of
    return function(original, lambda plan, index: original(plan, min(index + 1, plan.steps - 1)))


def timestep_halved() -> AbstractContextManager[None]:
    original = sampler.timestep_of
    return function(original, lambda plan, index: original(plan, index) / 2)


def no_terminal_stretch() -> AbstractContextManager[None]:
    original = schedule.shifted
    return function(original, lambda nodes, mu, config: original(nodes, mu, replace(config, shift_terminal=0.0)))


def another_seed() -> AbstractContextManager[None]:
    original = latents.initial_noise
    return function(original, lambda seed, *rest, **named: original(seed + 1, *rest, **named))


@contextmanager
def un_normalised_twice() -> Iterator[None]:
    """On the host, and again in the decoder: in torch and where the bundle is called."""
    original = pipeline.decode

    def forward(original: Any, self: Any, latents_packed: Tensor) -> Tensor:
        image: Tensor = original(self, latents_packed * self.std.view(1, 1, -1) + self.mean.view(1, 1, -1))
        return image

    def decode(model: Any, tokens: np.ndarray, height: int, width: int) -> Iterator[np.ndarray]:
        return original(model, latents.to_vae_space(tokens, model.latent_statistics), height, width)

    with method(vae_decoder.VAEDecoder, "forward", forward), function(original, decode):
        yield


def red_and_blue_swapped() -> AbstractContextManager[None]:
    original = pixels.to_rgba8
    return function(original, lambda image: original(image)[..., [2, 1, 0, 3]])


def alpha_inverted() -> AbstractContextManager[None]:
    original = pixels.to_rgba8
    return function(original, lambda image: original(image) ^ np.array([0, 0, 0, 255], dtype=np.uint8))


def keys_and_values_of_another_prompt() -> AbstractContextManager[None]:
    """Of two prompts in the DiT, each reads what the other one's slot holds."""
    slots: list[PromptSlot] = []

    def after(original: Any, self: PromptSlot) -> None:
        original(self)
        slots.append(self)
        if len(slots) % 2 == 0:
            slots[-1].text, slots[-2].text = slots[-2].text, slots[-1].text

    return method(PromptSlot, "__post_init__", after)


DEFECTS: Mapping[str, Defect] = MappingProxyType(
    {
        "RoPE grid not centred": rope_grid_off_centre,
        "drop_idx + 1": one_token_dropped_too_many,
        "braces removed": braces_are_fields,
        "special tokens read as text": special_tokens_are_text,
        "empty prompt left empty": empty_prompt_stays_empty,
        "final norm applied": final_norm_applied,
        "encoder not causal": encoder_not_causal,
        "encoder positions off by one": encoder_positions_off_by_one,
        "hidden states one token late": hidden_states_one_token_late,
        "image modulated from t = 0": image_modulated_from_0,
        "text not causal": text_not_causal,
        "timestep frequencies in bf16": timestep_frequencies_in_bf16,
        "sigmas off by one": sigmas_off_by_one,
        "timestep of the next step": timesteps_of_the_next_step,
        "timestep halved": timestep_halved,
        "no terminal stretch": no_terminal_stretch,
        "another seed": another_seed,
        "un-normalised twice": un_normalised_twice,
        "red and blue swapped": red_and_blue_swapped,
        "alpha inverted": alpha_inverted,
        "keys and values of another prompt": keys_and_values_of_another_prompt,
    }
)
"""Every defect by the name that reports give it."""
