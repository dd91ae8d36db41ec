"""``coreai-rgba models``."""

import argparse
import json

from ..describe import describe
from ..model_set import available_model_sets
from .sets import MODELS_VARIABLE, choose, model_folders


def models_command(options: argparse.Namespace) -> None:
    sets = {name: choose(name) for name in options.sets} or available_model_sets(model_folders())
    looked_in = [str(folder) for folder in model_folders()]
    if options.json:
        listed = [
            {"name": name, "path": str(model.path), "bundles": model.names}
            if options.list
            else describe(name, model).to_json()
            for name, model in sets.items()
        ]
        print(json.dumps({"sets": listed, "looked_in": looked_in}, indent=2))
        return
    for name, model in sets.items():
        print(f"{name}  {model.path}", flush=True)  # the first look into a large set takes a minute
        for line in [f"bundles: {len(model.names)}"] if options.list else describe(name, model).lines():
            print(f"  {line}")
    print(f"looked in: {', '.join(looked_in) or 'no folder, set ' + MODELS_VARIABLE}")


def add_models(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    models = commands.add_parser("models", help="what each model set holds and lacks, and the command that mends it")
    models.add_argument("sets", nargs="*", metavar="SET", help="name or folder (default: all that are found)")
    models.add_argument("--list", action="store_true", help="only look at names: quick, however many there are")
    models.add_argument("--json", action="store_true", help="for scripts")
    models.set_defaults(run=models_command)
