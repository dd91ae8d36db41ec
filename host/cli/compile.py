"""``coreai-rgba compile``."""

import argparse
from collections.abc import Sequence

from ..bundle import Bundle
from ..compiled import PARTS
from ..compiler import Progress, compile_set, minutes
from ..contract import ContractError
from ..model_set import ModelSet
from .sets import choose


def compile_command(options: argparse.Namespace) -> None:
    from tqdm import tqdm

    bundles = chosen_bundles(choose(options.set), options.parts)
    with tqdm(bar_format="{desc}", leave=False, disable=None) as bar:

        def report(progress: Progress) -> None:
            bar.set_description_str(f"{progress.stage} {minutes(progress.seconds)}")
            if progress.seconds == 0 or progress.stage == "done":
                tqdm.write(f"{progress.bundle.path.name}: {progress.text}")

        copies = compile_set(bundles, options.architecture, report, force=options.force)
    for copy in copies:
        print(copy.resolve())


def chosen_bundles(model: ModelSet, parts: Sequence[str]) -> list[Bundle]:
    """The bundles of ``parts``, all of the set if none is named."""
    if unknown := sorted(set(parts) - PARTS.keys()):
        raise ContractError(f"there is no part {', '.join(unknown)}: a set has {', '.join(PARTS)}")
    kinds = {PARTS[part] for part in parts or PARTS}
    bundles = model.whole(*kinds)
    if parts and (missing := kinds - {bundle.spec.kind for bundle in bundles}):
        raise ContractError(f"{model.path} holds no {', '.join(sorted(missing))}: run coreai-rgba models")
    return bundles


def add_compile(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    compiling = commands.add_parser("compile", help="compile a model set for this Mac, with Xcode")
    compiling.add_argument("set", metavar="SET", help="name or folder of a model set")
    compiling.add_argument("parts", nargs="*", metavar="PART", help="dit, encoder, vae (default: all)")
    compiling.add_argument(
        "--architecture",
        metavar="A",
        help="in place of this Mac's own; h16c is the M4 Max. It is kept only if it loads",
    )
    compiling.add_argument("--force", action="store_true", help="compile also what is up to date")
    compiling.set_defaults(run=compile_command)
