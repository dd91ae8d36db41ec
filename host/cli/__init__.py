"""The ``coreai-rgba`` command."""

import argparse
import logging
import sys
from collections.abc import Sequence

from ..bundle import CoreAIUnavailableError
from ..contract import ContractError
from .checks import add_bench, add_gates, add_host_constants, add_oracle
from .compile import add_compile
from .doctor import add_doctor
from .download import add_download
from .export import add_export
from .generate import add_generate
from .models import add_models
from .sets import MODELS_VARIABLE

__all__ = ["MODELS_VARIABLE", "main"]

INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="coreai-rgba", description="RGBA pictures on Apple's Core AI runtime.")
    parser.add_argument("-v", "--verbose", action="store_true", help="say what is loaded and how long it takes")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (
        add_generate, add_models, add_download, add_compile, add_doctor, add_export, add_bench, add_oracle, add_gates,
        add_host_constants,
    ):  # fmt: skip
        add(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0, or 1 with a message on standard error."""
    options = build_parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(message)s")
    try:
        return options.run(options) or 0
    except (ContractError, CoreAIUnavailableError) as error:
        print(f"coreai-rgba: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("coreai-rgba: interrupted", file=sys.stderr)
        return INTERRUPTED
