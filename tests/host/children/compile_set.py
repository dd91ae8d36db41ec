"""``python compile_set.py BUNDLE``: compile it, made anew whatever there is, to be interrupted from outside."""

import signal
import sys
from pathlib import Path

from coreai_rgba_image.host.bundle import read_bundle
from coreai_rgba_image.host.compiler import compile_set

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
    compile_set([read_bundle(Path(sys.argv[1]))], force=True)
