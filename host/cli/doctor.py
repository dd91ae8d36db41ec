"""``coreai-rgba doctor``."""

import argparse
import sys

from .sets import comfyui_folder, model_folders


def doctor_command(options: argparse.Namespace) -> int:
    from ..doctor import examine

    print("looking: two steps of the small model, a minute or so the first time", file=sys.stderr)
    page = examine(model_folders(), comfyui_folder())
    print(page.text, end="")
    return 0 if page.works else 1


def add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    doctor = commands.add_parser(
        "doctor", help="a page about this machine for a bug report, without private things; 1 if nothing can be drawn"
    )
    doctor.set_defaults(run=doctor_command)
