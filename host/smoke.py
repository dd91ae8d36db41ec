"""Two steps of the model that comes with the pack: whether anything can be drawn here at all.

In a process of its own, because what goes wrong in the runtime kills the process.
"""

import json
import os
import signal
import time

from . import mac, process
from .child import command_of
from .contract import ContractError

STEPS, PIXELS = 2, 256
TIME_LIMIT = 600
RESULT = "smoke run: "


def smoke_run() -> str:
    """How it went, in words; ``ContractError`` if no picture came of it."""
    try:
        ended = process.run(command_of("smoke"), time_limit=TIME_LIMIT)
    except TimeoutError as error:
        raise ContractError(f"no picture within {TIME_LIMIT // 60} minutes") from error
    if ended.status:
        how = f"died by {signal.Signals(-ended.status).name}" if ended.status < 0 else f"ended with {ended.status}"
        raise ContractError(f"the process {how}: {mac.last_words(ended.output)}")
    [line] = [line for line in ended.output.splitlines() if line.startswith(RESULT)]
    result = json.loads(line.removeprefix(RESULT))
    if result["shape"] != [PIXELS, PIXELS, 4] or result["lowest"] == result["highest"]:
        raise ContractError(f"it drew nothing: {result}")
    return f"{STEPS} steps, {PIXELS}x{PIXELS} pixels, {result['seconds']:.1f} s from prompt to picture"


def main() -> None:
    """In the process of its own."""
    from .model_set import EMBEDDED_FOLDER, ModelSet
    from .pipeline import generate
    from .prompt_cache import DISK_VARIABLE
    from .sampling import Settings

    os.environ[DISK_VARIABLE] = "0"  # a remembered prompt would leave the text encoder out
    started = time.perf_counter()
    picture = generate(ModelSet(EMBEDDED_FOLDER), "a large red star sticker", PIXELS, PIXELS, Settings(STEPS))
    seconds = time.perf_counter() - started
    found = {"lowest": int(picture.min()), "highest": int(picture.max()), "shape": picture.shape, "seconds": seconds}
    print(f"\n{RESULT}{json.dumps(found)}", flush=True)
