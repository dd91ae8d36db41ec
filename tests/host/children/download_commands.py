"""``coreai-rgba`` commands in a process of its own, because HF_ENDPOINT is read on import; tries again without waiting.

``python download_commands.py ARGUMENT ...`` runs one command. Without arguments, each line of the
input is a JSON list of arguments, and each line of the output what came of it: ``[status, out, err]``.
"""

import contextlib
import io
import json
import logging
import sys

from coreai_rgba_image.host import hub
from coreai_rgba_image.host.cli import main

hub.FIRST_WAIT = 0


def serve() -> None:
    logging.basicConfig()  # to this process's own standard error, whichever command logs first
    for line in sys.stdin:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = main(json.loads(line))
            except SystemExit as left:
                status = left.code
        print(json.dumps([status, out.getvalue(), err.getvalue()]), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) if sys.argv[1:] else serve())
