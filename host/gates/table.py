"""The table of gates, what the port's author measured for each, and the defects that must make it fail."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from ..bundle import CoreAIUnavailableError
from ..contract import ContractError
from . import checks
from .defects import DEFECTS, Defect, function
from .rows import Control, Measured, Row, at_least
from .subject import NotRunError, Subject


@dataclass(frozen=True)
class Gate:
    """One row of the table. ``controls`` are defects, by name, that must make it fail."""

    name: str
    published: str
    measure: Callable[[Subject], Measured]
    controls: Mapping[str, Defect] = field(default_factory=dict)


def of(*names: str) -> dict[str, Defect]:
    return {name: DEFECTS[name] for name in names}


@contextmanager
def axes_apart() -> Iterator[None]:
    """Rows and columns of M-RoPE at other positions than frames, as for a picture in the prompt."""
    steps = torch.tensor([1, 2, 3]).view(3, 1, 1)
    original = checks.axis_positions
    with function(original, lambda length: original(length) * steps):
        yield


END_TO_END = "end to end"

GATES = (
    Gate(
        "DiT in torch, random weights", "max|Δ| 7.2e-7, corr 1.0, RoPE tables 0", checks.random_dit,
        of("RoPE grid not centred", "image modulated from t = 0", "text not causal", "timestep frequencies in bf16"),
    ),
    Gate(
        "DiT in torch, checkpoint", "40/40 corr 1.000000000, max|Δ|/max|ref| <= 2.4e-4; controls 0.897, 0.837, 0.9969",
        checks.dit_in_torch,
        of("RoPE grid not centred", "image modulated from t = 0", "text not causal", "timestep halved"),
    ),
    Gate(
        "DiT bundle", "40/40 corr 0.999978 to 0.999854, |Δ|/|ref| 0.4-1.7 %, NaN 0 (GPU)", checks.dit_bundle,
        of("timestep halved"),
    ),
    Gate(
        "text encoder in torch", "bit-exact, 32 tokens; controls 0.356, 0.988, 0.518", checks.encoder_in_torch,
        of("final norm applied", "encoder not causal", "encoder positions off by one"),
    ),
    Gate("M-RoPE collapse", "bit-exact", checks.mrope_collapse, {"axes at positions of their own": axes_apart}),
    Gate(
        "tokenizer", "3 prompts identical, drop_idx 14", checks.tokenizer,
        of("drop_idx + 1", "braces removed", "special tokens read as text", "empty prompt left empty"),
    ),
    Gate(
        "text encoder bundle",
        "min token corr 0.999999999, 3 prompts x 7 lengths: 21/21 >= 0.99999998, velocity 1.000000",
        checks.encoder_bundle, of("hidden states one token late"),
    ),
    Gate(
        "VAE decoder in torch", "corr 1.0000000, max|Δ| 1.3e-5", checks.vae_in_torch,
        of("un-normalised twice", "red and blue swapped", "alpha inverted"),
    ),
    Gate(
        "VAE decoder bundle", "corr 1.0000000, max|Δ| 1.35e-5 at 256², 1.29e-5 at 512²", checks.vae_bundle,
        of("un-normalised twice", "red and blue swapped", "alpha inverted"),
    ),
    Gate(
        "sampler", "sigmas, timesteps and 40 Euler steps bit-exact", checks.sampling_loop,
        of("sigmas off by one", "timestep of the next step", "no terminal stretch", "another seed"),
    ),
    Gate(
        "text reuse", "not part of the published port", checks.text_reuse, of("keys and values of another prompt"),
    ),
    Gate(
        END_TO_END, "256²: 46.72 dB, alpha 1/255, corr 0.999987; 512²: 35.49 dB, 2/255, 0.999559", checks.end_to_end,
        of("another seed", "no terminal stretch", "un-normalised twice", "alpha inverted"),
    ),
)  # fmt: skip


def judge(gate: Gate, subject: Subject, control_steps: Sequence[int]) -> Row:
    """Measure a gate, then again with each of its defects planted, on the ``control_steps`` alone."""
    started = time.perf_counter()

    def row(measured: Measured | None, controls: Sequence[Control] = (), reason: str = "") -> Row:
        return Row(gate.name, gate.published, measured, controls, reason, time.perf_counter() - started)

    try:
        measured = gate.measure(subject)
    except ImportError as error:
        return row(None, reason=f"{error.name} is missing: pip install 'coreai-rgba-image[reference]'")
    except (CoreAIUnavailableError, NotRunError) as error:
        return row(None, reason=str(error))
    except ContractError as error:  # of a model set that cannot do what its reference did
        return row(Measured([at_least("measured", 0, 1)], str(error)))
    fewer = replace(subject, steps=control_steps)
    return row(measured, [control(gate, name, fewer) for name in gate.controls])


def control(gate: Gate, name: str, subject: Subject) -> Control:
    try:
        with gate.controls[name]():
            return Control(name, gate.measure(subject).figures)
    except (ContractError, ValueError) as error:
        return Control(name, (), str(error))
