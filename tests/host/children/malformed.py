"""Calls that no graph can take, each of which would kill the process if it reached the runtime.

``python malformed.py FOLDER`` makes them all in one process, with a good call after each graph's,
and prints what each ended in as JSON: ``{case: [error class, message]}``.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine import inputs_for

from coreai_rgba_image.host import runtime
from coreai_rgba_image.host.bundle import read_bundle
from coreai_rgba_image.host.runtime import LoadedGraph

Arrays = dict[str, Any]


def changed(good: Arrays, **changes: Any) -> Arrays:
    return {**good, **changes}


def without(good: Arrays, name: str) -> Arrays:
    return {key: value for key, value in good.items() if key != name}


def zeros(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.zeros(shape, dtype)


def encoder_cases(good: Arrays) -> Iterator[tuple[str, Arrays]]:
    yield "no ids", {}
    yield "ids under another name", {"ids": good["input_ids"]}
    yield "an unknown input beside the ids", changed(good, attention_mask=zeros(1, 16))
    for dtype in ("int64", "uint32", "int16", "float32", "bool", ">i4", "complex64", "object"):
        yield f"ids in {dtype}", {"input_ids": good["input_ids"].astype(dtype)}
    for shape in ((16,), (1, 1, 16), (), (2, 16), (16, 1), (0, 16)):
        yield f"ids of shape {shape}", {"input_ids": zeros(*shape, dtype="int32")}
    for length in (0, 1, 15, 513, 100_000):
        yield f"{length} ids", {"input_ids": zeros(1, length, dtype="int32")}
    yield "ids in a list", {"input_ids": good["input_ids"].tolist()}
    yield "ids in a torch tensor", {"input_ids": torch.from_numpy(good["input_ids"])}
    yield "ids missing", {"input_ids": None}


def dit_cases(good: Arrays) -> Iterator[tuple[str, Arrays]]:
    for name in good:
        yield f"no {name}", without(good, name)
    for dtype in ("float16", "float64", "int32", ">f4"):
        yield f"img_tokens in {dtype}", changed(good, img_tokens=good["img_tokens"].astype(dtype))
    yield "timestep in float64", changed(good, timestep=np.ones(1))
    yield "timestep a number", changed(good, timestep=1.0)
    yield "timestep a numpy number", changed(good, timestep=np.float32(1))
    for shape in ((), (0,), (2,), (1, 1)):
        yield f"timestep of shape {shape}", changed(good, timestep=zeros(*shape))
    for channels in (0, 1, 32, 63, 65):
        yield f"{channels} latent channels", changed(good, img_tokens=zeros(1, 64, channels))
    for width in (1, 63, 65, 4096):
        yield f"text {width} wide", changed(good, txt_feats=zeros(1, 8, width))
    yield "img_tokens not packed", changed(good, img_tokens=zeros(1, 64, 8, 8))
    yield "a batch of two", changed(good, img_tokens=zeros(2, 64, 64))
    for name, length in (("txt_cos", 9), ("txt_sin", 1), ("img_cos", 65), ("img_sin", 1), ("img_tokens", 80)):
        yield f"{name} of length {length}", changed(good, **{name: zeros(1, length, 64)})
    for tokens in (0, 63, 4097):
        sized = {name: zeros(1, tokens, 64) for name in ("img_tokens", "img_cos", "img_sin")}
        yield f"{tokens} image tokens", changed(good, **sized)
    for tokens in (0, 7, 513):
        sized = {name: zeros(1, tokens, 64) for name in ("txt_feats", "txt_cos", "txt_sin")}
        yield f"{tokens} text tokens", changed(good, **sized)


def vae_cases(good: Arrays) -> Iterator[tuple[str, Arrays]]:
    for shape in ((1, 63, 64), (1, 65, 64), (1, 64, 16), (1, 64, 8, 8), (64, 64), (0, 64, 64), (2, 64, 64)):
        yield f"latents of shape {shape}", {"latents_packed": zeros(*shape)}
    yield "latents in float16", {"latents_packed": zeros(1, 64, 64, dtype="float16")}


def good_calls_in_other_forms(graph: LoadedGraph, good: Arrays) -> bool:
    """Strided and Fortran-ordered arrays are fine: whether they give what contiguous ones give."""
    expected = graph(**good)
    strided = {name: np.repeat(array, 2, axis=-1)[..., ::2] for name, array in good.items()}
    fortran = {name: np.asfortranarray(array) for name, array in good.items()}
    return all(
        np.array_equal(graph(**arrays)[name], expected[name]) for arrays in (strided, fortran) for name in expected
    )


def outcome(graph: LoadedGraph, arrays: Arrays) -> list[str]:
    try:
        graph(**arrays)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["no error", ""]


def main(folder: Path) -> None:
    results: dict[str, list[str]] = {}
    rng = np.random.default_rng(0)
    for name, cases in (("encoder", encoder_cases), ("dit", dit_cases), ("vae", vae_cases)):
        with runtime.load(read_bundle(folder / f"{name}.aimodel")) as graph:
            good = {key: (rng.random(a.shape) * 100).astype(a.dtype) for key, a in inputs_for(graph.spec).items()}
            results |= {f"{name}: {case}": outcome(graph, arrays) for case, arrays in cases(good)}
            results[f"{name}: good after all"] = [str(good_calls_in_other_forms(graph, good)), ""]
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
