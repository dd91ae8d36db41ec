"""The oracle: one run of diffusers' own pipeline, every boundary of it on disk to be compared with.

The pipeline runs from its start each time, but recorders stand in for what it calls and answer from
disk where the same question is on record. So a capture goes on where it was killed, and gives what
an uninterrupted run gives, bit for bit.
"""

import hashlib
import io
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from ..contract import ContractError
from ..export.checkpoint import checkpoint_scheduler, read_json
from ..files import hash_file, write_atomically
from ..pixels import composite
from ..prompt import PromptTokenizer
from .captured import (
    FORMAT,
    PROMPTS,
    SUFFIX,
    VERSION,
    Arrays,
    DamagedFileError,
    Header,
    Oracle,
    Request,
    read_file,
    step_name,
    write_file,
)
from .constants import same_bits

LIBRARIES = ("diffusers", "transformers", "torch")
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NEEDED = "the oracle runs diffusers' own pipeline, so run pip install -e '.[reference]'"

logger = logging.getLogger(__name__)


def perturbed(embeddings: np.ndarray, relative: float, seed: int) -> np.ndarray:
    """``embeddings * (1 + relative * N(0, 1))`` in fp32, the normal numbers being torch's of ``seed``.

    A probe of how far a picture moves when its prompt hardly does; ``relative`` 0 gives the same
    numbers. A bf16 pipeline rounds most of a change below about 4e-3 away.
    """
    noise = torch.randn(embeddings.shape, generator=torch.Generator("cpu").manual_seed(seed)).numpy()
    return embeddings * (np.float32(1) + np.float32(relative) * noise)


def capture(request: Request, folder: str | Path) -> Oracle:
    """Capture ``request`` into ``folder``, or finish what is there: the same files either way.

    Every file appears whole or not at all. Damaged ones are made again, with a warning. Raises
    ``ContractError``, before a network is loaded, for a request that the checkpoint cannot answer and
    for a folder that holds anything but this capture, made by the same libraries of the same weights.
    """
    folder = Path(folder)
    _check_checkpoint(request)
    recording = _Recording(folder, request, _header(request))
    if recording.missing:
        _run(request, recording)
    oracle = Oracle(folder)
    for name, picture in (("rgba", oracle.rgba8), ("white", oracle.white8)):
        png = io.BytesIO()
        Image.fromarray(picture[0]).save(png, "PNG")
        path = folder / f"{name}.png"
        with _writing(path):
            write_atomically(path, png.getvalue())
    return oracle


def _check_checkpoint(request: Request) -> None:
    """What would fail or be ignored late in the run, or could not be compared with our graphs."""
    config = checkpoint_scheduler(request.checkpoint)
    if config.nodes(request.steps)[-1] >= 1 and config.shift_terminal:
        raise ContractError(
            f"steps is {request.steps}: diffusers stretches a single step from pure noise by 0/0, so ask for 2 or more"
        )
    tokenizer = PromptTokenizer.from_file(request.checkpoint / "processor")
    for prompt in (request.prompt, request.negative_prompt or ""):
        tokenizer.encode(prompt)


def _header(request: Request) -> Header:
    """What every file of the capture says of its making."""
    try:
        made_by = {library: version(library) for library in LIBRARIES}
    except PackageNotFoundError as error:
        raise ContractError(f"{error.name} is not installed: {NEEDED}") from error
    files = checkpoint_files(request.checkpoint)
    hashes = {
        path.relative_to(request.checkpoint).as_posix(): hash_file(path)
        for path in tqdm(files, desc="hashing the checkpoint", unit="file", leave=False, disable=None)
    }
    together = hashlib.sha256("".join(f"{digest}  {name}\n" for name, digest in hashes.items()).encode()).hexdigest()
    made = {**made_by, "checkpoint_sha256": together, "checkpoint_files": hashes}
    return {"format": FORMAT, "version": VERSION, "request": request.to_json(), "made_by": made}


def checkpoint_files(checkpoint: Path) -> list[Path]:
    """The index and every file in the folders of the parts it names, sorted; hidden files are left out."""
    index = checkpoint / "model_index.json"
    parts = [checkpoint / name for name in read_json(index) if (checkpoint / name).is_dir()]
    files = [path for part in parts for path in part.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return sorted([index, *files])


class _Recording:
    """The folder of a capture while it is made."""

    def __init__(self, folder: Path, request: Request, header: Header):
        self.folder, self.request, self.header = folder, request, header
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        damaged = [path for path in sorted(folder.glob("*" + SUFFIX)) if not self._is_whole(path)]
        for path in damaged:  # only now: a folder that is refused is left as it was
            path.unlink()

    def _is_whole(self, path: Path) -> bool:
        """False for a damaged file. Raises ``ContractError`` for a file of something else."""
        try:
            found, _ = read_file(path)
        except DamagedFileError as error:
            logger.warning("%s", error)
            found = None
        differences = [] if found is None else _differences(found, self.header)
        if path.stem not in self.request.files:
            differences = differences or [f"{path.name} is no file of this one"]
        if differences:
            raise ContractError(
                f"{self.folder} holds another capture: {'; '.join(differences)}. Choose another folder for this "
                "capture, or delete that one"
            )
        # The other may name another path of the same checkpoint, and all files are to say the same.
        self.header = found or self.header
        return found is not None

    @property
    def missing(self) -> list[str]:
        return [name for name in self.request.files if not self._path(name).is_file()]

    def _path(self, name: str) -> Path:
        return self.folder / (name + SUFFIX)

    def known(self, name: str, **inputs: Tensor) -> Arrays | None:
        """What is on record under ``name``, if it was made from exactly these ``inputs``."""
        if not self._path(name).is_file():
            return None
        _, arrays = read_file(self._path(name))
        return arrays if _on_record(inputs, arrays) else None

    def keep(self, name: str, **results: Tensor | np.ndarray) -> None:
        """Write ``results``, unless they are on record."""
        path = self._path(name)
        if path.is_file():
            _, arrays = read_file(path)
            if _on_record(results, arrays):
                return
            logger.warning("%s does not follow from what was captured before it: it is made anew", path)
        with _writing(path):
            write_file(path, self.header, {key: _array(result) for key, result in results.items()})


def _identity(header: Header) -> dict[str, Any]:
    """What tells two captures apart; where the checkpoint lies does not count, only what it holds."""
    told = {**header["request"], **header["made_by"]}
    return {key: value for key, value in told.items() if key not in ("checkpoint", "checkpoint_files")}


def fingerprint(request: Request) -> str:
    """The same for captures that one folder may hold: of this request, this checkpoint and these libraries."""
    identity = json.dumps(_identity(_header(request)), sort_keys=True)
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def _differences(found: Header, asked: Header) -> list[str]:
    """What tells two captures apart, one line each."""
    there, here = _identity(found), _identity(asked)
    return [
        f"{key} is {there.get(key)!r} there and {value!r} here"
        for key, value in here.items()
        if there.get(key) != value
    ]


def _array(values: Tensor | np.ndarray) -> np.ndarray:
    if isinstance(values, Tensor):
        values = (values.float() if values.is_floating_point() else values).numpy()
    return np.ascontiguousarray(values)


def _on_record(values: dict[str, Tensor] | dict[str, Tensor | np.ndarray], arrays: Arrays) -> bool:
    return all(key in arrays and same_bits(_array(value), arrays[key]) for key, value in values.items())


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ContractError(
            f"cannot write {path} ({error}): make room or choose another folder, then run the same command again, "
            "which goes on from what is there"
        ) from error


def _run(request: Request, recording: _Recording) -> None:
    """The pipeline, once, as anybody would call it."""
    try:
        from diffusers import QwenImage21Pipeline
    except ImportError as error:
        raise ContractError(f"diffusers has no QwenImage21Pipeline ({error}): {NEEDED}") from error
    pipeline = QwenImage21Pipeline.from_pretrained(request.checkpoint, dtype=TORCH_DTYPES[request.dtype])
    pipeline.set_progress_bar_config(desc="oracle", unit="step", disable=None)
    _Recorder(pipeline, request, recording)
    [picture] = pipeline(
        request.prompt, negative_prompt=request.negative_prompt, true_cfg_scale=request.cfg,
        width=request.width, height=request.height, num_inference_steps=request.steps,
        generator=torch.Generator("cpu").manual_seed(request.seed),
    ).images  # fmt: skip
    rgba8 = np.asarray(picture)[None]
    recording.keep("picture", rgba8=rgba8, white8=composite(rgba8))


class _Recorder:
    """Stands between the pipeline and what it calls. Each method takes the call's place, and first the original."""

    def __init__(self, pipeline: Any, request: Request, recording: _Recording):
        self.pipeline, self.request, self.recording = pipeline, request, recording
        self.prompts = iter(PROMPTS)
        self.encoded: dict[str, Tensor] = {}
        self.noise: Tensor
        self.step = 0
        self.inputs: dict[str, Tensor] = {}
        self.velocities: dict[str, Tensor] = {}
        self.caches_to_fill: dict[str, Callable[[], Any]] = {}
        self.latents: Tensor
        _replace(pipeline, "encode_prompt", self.encode_prompt)
        _replace(pipeline.text_encoder, "forward", self.text_encoder)
        _replace(pipeline, "prepare_latents", self.prepare_latents)
        _replace(pipeline.scheduler, "set_timesteps", self.set_timesteps)
        _replace(pipeline.transformer, "forward", self.transformer)
        _replace(pipeline.scheduler, "step", self.scheduler_step)
        _replace(pipeline.vae, "decode", self.decode)

    def _tensor(self, array: np.ndarray) -> Tensor:
        """As the network gave it: a float32 that was made of a bf16 number is one again, exactly."""
        return torch.from_numpy(array).to(TORCH_DTYPES[self.request.dtype])

    def encode_prompt(self, run: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, ...]:
        self.prompt = next(self.prompts)
        embeddings, *masks = run(*arguments, **options)
        if self.request.embed_perturb:
            changed = perturbed(_array(embeddings), self.request.embed_perturb, self.request.perturb_seed)
            embeddings = self._tensor(changed)
        drop_idx = np.array([self.pipeline._drop_idx], np.int32)
        self.recording.keep(self.prompt, **self.encoded, drop_idx=drop_idx, embeddings=embeddings)
        return embeddings, *masks

    def text_encoder(self, run: Callable[..., Any], input_ids: Tensor, **options: Any) -> SimpleNamespace:
        ids = input_ids.to(torch.int32)
        known = self.recording.known(self.prompt, ids=ids)
        if known is None:
            hidden = run(input_ids=input_ids, **options).hidden_states[-1]
        else:
            hidden = self._tensor(known["hidden"])
        self.encoded = {"ids": ids, "hidden": hidden}
        return SimpleNamespace(hidden_states=(hidden,))

    def prepare_latents(self, run: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.noise, condition = run(*arguments, **options)
        return self.noise, condition

    def set_timesteps(self, run: Callable[..., Any], *arguments: Any, mu: float, **options: Any) -> None:
        run(*arguments, mu=mu, **options)
        scheduler = self.pipeline.scheduler
        self.recording.keep(
            "start", noise=self.noise, sigmas=scheduler.sigmas, timesteps=scheduler.timesteps, mu=np.array([mu])
        )

    def transformer(self, run: Callable[..., Any], **call: Any) -> tuple[Tensor]:
        if not self.velocities:
            self.inputs = {"latents": call["hidden_states"], "timestep": call["timestep"]}
            self.known = self.recording.known(step_name(self.step), **self.inputs)
        branch = "unconditional" if self.velocities else "conditional" if self.request.guided else "velocity"
        image_tokens = call["hidden_states"].shape[1]
        if self.known is None:
            self._fill_cache(branch)
            velocity = run(**call)[0][:, -image_tokens:]
        else:
            velocity = self._tensor(self.known[branch])
            if call["kv_cache_mode"] == "extract":
                self.caches_to_fill[branch] = partial(self._extract, run, call, velocity)
        self.velocities[branch] = velocity
        return (velocity,)

    def _fill_cache(self, branch: str) -> None:
        """The first step leaves keys and values of the text for the later ones: run it, if it was not run."""
        if fill := self.caches_to_fill.pop(branch, None):
            fill()

    def _extract(self, run: Callable[..., Any], call: dict[str, Any], recorded: Tensor) -> None:
        velocity = run(**call)[0][:, -recorded.shape[1] :]
        if not same_bits(_array(velocity), _array(recorded)):
            difference = float((velocity - recorded).abs().max())
            raise ContractError(
                f"step 0 differs from what {self.recording.folder} holds by up to {difference:.1e}, so the capture "
                "would be of two kinds: finish it on the machine, with the number of threads (OMP_NUM_THREADS), that "
                "it was begun with, or make a new one in another folder"
            )

    def scheduler_step(
        self, run: Callable[..., Any], velocity: Tensor, time: Tensor, latents: Tensor, **options: Any
    ) -> Any:
        stepped = run(velocity, time, latents, **options)
        self.recording.keep(step_name(self.step), **self.inputs, **{**self.velocities, "velocity": velocity})
        self.step, self.velocities, self.latents = self.step + 1, {}, stepped[0]
        return stepped

    def decode(self, run: Callable[..., Any], latents: Tensor, **options: Any) -> tuple[Tensor]:
        known = self.recording.known("decode", vae_input=latents)
        picture = run(latents, **options)[0][:, :, 0] if known is None else self._tensor(known["vae_output"])
        self.recording.keep("decode", final_latents=self.latents, vae_input=latents, vae_output=picture)
        return (picture[:, :, None],)


def _replace(owner: Any, name: str, method: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @wraps(original)  # the pipeline looks at the signature of ``set_timesteps``
    def instead(*arguments: Any, **options: Any) -> Any:
        return method(original, *arguments, **options)

    setattr(owner, name, instead)
