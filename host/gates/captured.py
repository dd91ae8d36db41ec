"""What a capture of the reference pipeline is: its request, its files, and the reading of them.

A capture is a folder of safetensors files, one for each stage and one for each step. Every file says
what made it: the request, the hashes of the checkpoint's files, the versions of the libraries, and a
SHA-256 of itself. All that is one metadata entry, because safetensors writes several in random order
and the same request is to give the same bytes. Floats are float32, which holds every bf16 number.

Reading needs neither diffusers nor the checkpoint.
"""

import hashlib
import json
import math
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ..bundle import METADATA_KEY
from ..contract import PIXELS_PER_TOKEN, ContractError
from ..export.checkpoint import some
from ..files import write_atomically
from ..latents import MAX_SEED
from ..sampling import Settings, check_grid

FORMAT = "coreai-rgba oracle"
VERSION = 1
SUFFIX = ".safetensors"
DTYPES = ("fp32", "bf16")

PROMPTS = ("prompt", "negative_prompt")
"""Files of what was read, in the order in which the pipeline encodes."""

PIXELS_MULTIPLE = 32
"""``QwenImage21Pipeline`` rounds other sizes down: it counts image slots of 2 x 2 tokens."""

Arrays = dict[str, np.ndarray]
Header = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What to capture: sizes in pixels, ``dtype`` the precision that all networks compute in.

    Guidance is on where ``cfg`` is above 1, as in the pipeline. ``embed_perturb`` and
    ``perturb_seed`` are for ``perturbed``, which then changes what the DiT reads of each prompt.
    Raises ``ContractError`` for what the pipeline would reject, round or ignore.
    """

    checkpoint: Path
    prompt: str = "a red apple on a wooden table, studio lighting"
    width: int = 256
    height: int = 256
    steps: int = 40
    seed: int = 1234
    negative_prompt: str | None = None
    cfg: float = 1.0
    dtype: str = "fp32"
    embed_perturb: float = 0.0
    perturb_seed: int = 0

    def __post_init__(self) -> None:
        for name, pixels in (("width", self.width), ("height", self.height)):
            if pixels < PIXELS_MULTIPLE or pixels % PIXELS_MULTIPLE:
                lower = max(1, pixels // PIXELS_MULTIPLE) * PIXELS_MULTIPLE
                raise ContractError(
                    f"the {name} is {pixels} pixels: diffusers' pipeline takes multiples of {PIXELS_MULTIPLE}, "
                    f"{lower} or {lower + PIXELS_MULTIPLE} for instance"
                )
        check_grid(*self.grid)
        Settings(self.steps, self.cfg).check_negative(self.negative_prompt is not None)
        if self.cfg < 1:
            raise ContractError(f"cfg is {self.cfg}: diffusers' pipeline guides above 1 only, so set it to 1 or more")
        if self.negative_prompt is not None and not self.guided:
            raise ContractError("a negative prompt does nothing at cfg 1: set cfg above 1, or leave the prompt out")
        for name, seed in (("seed", self.seed), ("perturb seed", self.perturb_seed)):
            if not 0 <= seed <= MAX_SEED:
                raise ContractError(f"the {name} is {seed}: it must be from 0 to {MAX_SEED}")
        if self.dtype not in DTYPES:
            raise ContractError(f"dtype is {self.dtype!r}: choose one of {', '.join(DTYPES)}")
        if not 0 <= self.embed_perturb < math.inf:
            raise ContractError(f"embed perturb is {self.embed_perturb}: it must be 0 or a relative size, such as 1e-5")

    @property
    def grid(self) -> tuple[int, int]:
        """``(height, width)`` in latent tokens."""
        return self.height // PIXELS_PER_TOKEN, self.width // PIXELS_PER_TOKEN

    @property
    def guided(self) -> bool:
        return self.cfg > 1

    @property
    def files(self) -> list[str]:
        """Names of the files of the capture, in the order they are made."""
        prompts = PROMPTS if self.guided else PROMPTS[:1]
        return [*prompts, "start", *map(step_name, range(self.steps)), "decode", "picture"]

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Request":
        return cls(**{**content, "checkpoint": Path(content["checkpoint"])})

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "checkpoint": str(self.checkpoint.resolve())}

    def command(self, folder: Path) -> str:
        """The command line that makes the capture, or finishes it."""
        values = {"out": folder, "size": f"{self.width}x{self.height}", **self.to_json()}
        options = [
            f"--{name.replace('_', '-')}={value}"
            for name, value in values.items()
            if name not in ("width", "height") and value is not None
        ]
        return shlex.join(["coreai-rgba", "oracle", *options])


def step_name(index: int) -> str:
    return f"step_{index:04d}"


class DamagedFileError(ContractError):
    """A file of a capture that is not what was written."""


def _digest(header: Header, arrays: Arrays) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def write_file(path: Path, header: Header, arrays: Arrays) -> None:
    text = json.dumps({**header, "content": _digest(header, arrays)})
    write_atomically(path, save(arrays, {METADATA_KEY: text}))


def read_file(path: Path) -> tuple[Header, Arrays]:
    """Header and arrays of a file.

    Raises ``DamagedFileError``, or ``ContractError`` for what is no part of a capture, or of another format's.
    """
    advice = "run coreai-rgba oracle on this folder again with the same options, which makes it anew"
    try:
        with safe_open(path, "np") as file:
            metadata, arrays = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if METADATA_KEY not in metadata:
            raise ContractError(f"{path} is no part of a capture: choose another folder")
        header = json.loads(metadata[METADATA_KEY])
        if (header["format"], header["version"]) != (FORMAT, VERSION):
            raise ContractError(
                f"{path} is {header['format']!r} version {header['version']}, this pack reads {FORMAT!r} version "
                f"{VERSION}: choose another folder"
            )
        content = header.pop("content")
    except (OSError, SafetensorError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise DamagedFileError(f"{path} is damaged ({error}): {advice}") from error
    if content != _digest(header, arrays):
        raise DamagedFileError(f"{path} is damaged (it is not what its SHA-256 says): {advice}")
    return header, arrays


class Oracle:
    """A whole capture, read from disk when asked; arrays are float32 unless said otherwise.

    N is the number of image tokens, Lfull that of the whole template, L that of the part the DiT
    reads, D the width of the embeddings. Raises ``ContractError`` for a capture that is not
    finished, and, when it is read, for a file that is damaged or from another capture.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        paths = sorted(self.folder.glob("*" + SUFFIX))
        if not paths:
            raise ContractError(
                f"{folder} holds no capture: make one with coreai-rgba oracle --checkpoint DIR --out {folder}"
            )
        self.header, _ = read_file(paths[0])
        self.request = Request.from_json(self.header["request"])
        missing = set(self.request.files) - {path.stem for path in paths}
        if missing:
            raise ContractError(
                f"the capture in {folder} is not finished, it lacks {some(list(missing))}. To go on where it stopped: "
                f"{self.request.command(self.folder)}"
            )

    def _read(self, name: str) -> Arrays:
        header, arrays = read_file(self.folder / (name + SUFFIX))
        if header != self.header:
            raise ContractError(f"{name + SUFFIX} in {self.folder} is from another capture: restore it, or delete it")
        return arrays

    @property
    def made_by(self) -> dict[str, Any]:
        """Versions of the libraries, ``checkpoint_sha256``, and ``checkpoint_files``, the SHA-256 of each file."""
        return self.header["made_by"]

    @property
    def ids(self) -> np.ndarray:
        """Token ids of the whole template, ``[1, Lfull]`` int32."""
        return self._read("prompt")["ids"]

    @property
    def drop_idx(self) -> int:
        """Tokens of the system part, which the DiT does not read."""
        return int(self._read("prompt")["drop_idx"][0])

    @property
    def hidden(self) -> np.ndarray:
        """What the text encoder's last layer gives, before the final norm, ``[1, Lfull, D]``."""
        return self._read("prompt")["hidden"]

    @property
    def embeddings(self) -> np.ndarray:
        """What the DiT reads of the prompt, perturbed where asked for, ``[1, L, D]``."""
        return self._read("prompt")["embeddings"]

    def negative(self, name: str) -> np.ndarray:
        """``ids``, ``hidden`` or ``embeddings`` of the negative prompt."""
        self._check_guided()
        return self._read("negative_prompt")[name]

    @property
    def noise(self) -> np.ndarray:
        """``[1, N, 64]``, the latents before the first step."""
        return self._read("start")["noise"]

    @property
    def sigmas(self) -> np.ndarray:
        """``[steps + 1]``, ending in 0."""
        return self._read("start")["sigmas"]

    @property
    def timesteps(self) -> np.ndarray:
        """``[steps]``, a thousand times what the DiT takes."""
        return self._read("start")["timesteps"]

    @property
    def mu(self) -> float:
        return float(self._read("start")["mu"][0])

    @property
    def steps(self) -> int:
        return self.request.steps

    def latents(self, step: int) -> np.ndarray:
        """``[1, N, 64]`` before the step, in model space."""
        return self._step(step)["latents"]

    def timestep(self, step: int) -> np.ndarray:
        """``[1]``, as the DiT takes it."""
        return self._step(step)["timestep"]

    def velocity(self, step: int) -> np.ndarray:
        """``[1, N, 64]``, with guidance what it makes of the two velocities."""
        return self._step(step)["velocity"]

    def conditional(self, step: int) -> np.ndarray:
        """``[1, N, 64]`` for the prompt, without guidance the velocity."""
        return self._step(step)["conditional" if self.request.guided else "velocity"]

    def unconditional(self, step: int) -> np.ndarray:
        """``[1, N, 64]`` for the negative prompt."""
        self._check_guided()
        return self._step(step)["unconditional"]

    def _step(self, step: int) -> Arrays:
        if not 0 <= step < self.steps:
            raise ContractError(f"step is {step}: the capture in {self.folder} has 0 to {self.steps - 1}")
        return self._read(step_name(step))

    def _check_guided(self) -> None:
        if not self.request.guided:
            raise ContractError(f"the capture in {self.folder} has no guidance: make one with --negative-prompt, --cfg")

    @property
    def final_latents(self) -> np.ndarray:
        """``[1, N, 64]`` after the last step, in model space."""
        return self._read("decode")["final_latents"]

    @property
    def vae_input(self) -> np.ndarray:
        """What the VAE's decoder is given, in VAE space, ``[1, 64, 1, h, w]``."""
        return self._read("decode")["vae_input"]

    @property
    def vae_output(self) -> np.ndarray:
        """``[1, 4, H, W]`` in about [-1, 1]."""
        return self._read("decode")["vae_output"]

    @property
    def rgba8(self) -> np.ndarray:
        """The picture, uint8 ``[1, H, W, 4]``."""
        return self._read("picture")["rgba8"]

    @property
    def white8(self) -> np.ndarray:
        """The picture on white, uint8 ``[1, H, W, 3]``."""
        return self._read("picture")["white8"]
