"""Runs that are watched for the memory they take, each in a process of its own.

``python memory.py CASE PATH`` runs a function of this file and prints its result as JSON.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from coreai_rgba_image.host import residency
from coreai_rgba_image.host.latents import initial_noise
from coreai_rgba_image.host.memory import FREE_VARIABLE, Memory, NotEnoughMemoryError
from coreai_rgba_image.host.model_set import EMBEDDED_FOLDER, ModelSet
from coreai_rgba_image.host.pipeline import encode_prompt, generate
from coreai_rgba_image.host.sampling import Sampling, Settings

PROMPT = "a large red star sticker, transparent background"
GRID, SIZE, STEPS = (8, 8), (128, 128), Settings(3)
MARGIN = 1 << 30
"""Bytes that other processes may take or give back meanwhile without changing what happens."""


def starved_sampling(path: Path) -> dict[str, object]:
    """A run of four steps in a process that after two of them takes more memory than the limit leaves."""
    model = ModelSet(path)
    embeddings = encode_prompt(model, PROMPT)

    def new_run() -> Sampling:
        return Sampling(model, embeddings, initial_noise(0, *GRID), Settings(4), keep_loaded="all")

    os.environ[FREE_VARIABLE] = str((Memory.now().available - MARGIN) / 1e9)
    steps, message, hog = 0, "", np.zeros(0)
    try:
        for _ in new_run().run():
            steps += 1
            if steps == 2:
                hog = np.ones(2 * MARGIN, np.uint8)
    except NotEnoughMemoryError as error:
        message = str(error)
    loaded = len(residency.loaded())
    del hog, os.environ[FREE_VARIABLE]
    return {"steps": steps, "message": message, "loaded": loaded, "after": len(list(new_run().run()))}


def kept_at_exit(path: Path) -> int:
    """How many bundles are kept while the process exits, right after a call of one of them."""
    model = ModelSet(path)
    for bundle in model.bundles:
        with residency.using(bundle, "all"):
            pass
    with residency.using(model.text_encoder, "all") as encoder:
        encoder(input_ids=model.tokenizer.encode(PROMPT).ids)
    return len(residency.loaded())


def peak_of_sampling(path: Path) -> float:
    model = ModelSet(path)
    embeddings = np.zeros((1, 16, int(model.dit.spec.inputs[1].shape[2])), np.float32)
    return peak_of(lambda: list(Sampling(model, embeddings, initial_noise(0, *GRID), STEPS).run()))


def peak_of_a_run(path: Path) -> float:
    return peak_of(lambda: generate(ModelSet(path), PROMPT, *SIZE, STEPS))


def peak_of_a_run_that_keeps_all(path: Path) -> float:
    return peak_of(lambda: generate(ModelSet(path), PROMPT, *SIZE, STEPS, keep_loaded="all"))


def peak_of(call: Callable[[], object]) -> float:
    """Megabytes that ``call`` adds at its highest to the resident memory of a process that used the runtime before."""
    model = ModelSet(EMBEDDED_FOLDER)
    with residency.using(model.text_encoder) as encoder:
        encoder(input_ids=model.tokenizer.encode(PROMPT).ids)
    time.sleep(0.5)
    before = megabytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM counts from here
    call()
    return megabytes("VmHWM") - before


def megabytes(name: str) -> float:
    """What Linux tells of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1e3


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](Path(sys.argv[2]))))
