"""``coreai-rgba models``."""

import argparse

from ..model_set import available_model_sets
from .sets import MODELS_VARIABLE, model_folders


def models_command(options: argparse.Namespace) -> None:
    for name, model in available_model_sets(model_folders()).items():
        print(f"{name}  {model.path}")
        for line in model.report():
            print(f"  {line}")
    folders = ", ".join(map(str, model_folders()))
    print(f"looked in: {folders or 'no folder, set ' + MODELS_VARIABLE}")


def add_models(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    models = commands.add_parser("models", help="list model sets and what each lacks")
    models.set_defaults(run=models_command)
