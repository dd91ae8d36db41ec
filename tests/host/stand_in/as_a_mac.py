"""``python as_a_mac.py COMMAND ...``: the ``coreai-rgba`` command in a process that takes itself for a Mac.

Two things stay as they are here: a load has no options, and nothing is compiled just in time, however small.
"""

import sys

from coreai_rgba_image.host import compiled, mac


def become_a_mac() -> None:
    mac.on_mac = lambda: True
    mac.load_options = lambda runtime: None
    compiled.JUST_IN_TIME_LIMIT = 0


if __name__ == "__main__":
    become_a_mac()
    from coreai_rgba_image.host.cli import main

    sys.exit(main())
