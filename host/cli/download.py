"""``coreai-rgba download``."""

import argparse
import shlex
import sys
from pathlib import Path

from ..contract import ContractError
from ..download import LICENCE_NOTICE, NAME, DownloadRequest, LicenceError, Progress, download
from ..published import PUBLISHED_REPOSITORY
from .sets import MODELS_VARIABLE, model_folders


def download_command(options: argparse.Namespace) -> None:
    from tqdm import tqdm

    request = DownloadRequest(
        options.to or default_folder(), options.name, options.repo, options.revision, options.sizes,
        options.accept_license,
    )  # fmt: skip
    if request.repository == PUBLISHED_REPOSITORY:
        print(LICENCE_NOTICE)
    with tqdm(unit="B", unit_scale=True, disable=None) as bar:

        def show(progress: Progress) -> None:
            bar.total = progress.total
            bar.set_description_str(f"{progress.stage} {progress.file}", refresh=False)
            bar.update(progress.done - bar.n)

        try:
            path = download(request, show)
        except LicenceError as error:
            print(error.text)
            raise
        except KeyboardInterrupt:
            print(request.how_to_go_on, file=sys.stderr)
            raise
    known = shlex.quote(request.name if request.folder in model_folders() else str(path))
    print(f"{path} is whole", f"next: coreai-rgba compile {known}", sep="\n")


def default_folder() -> Path:
    """The first folder that commands look for model sets in."""
    folders = model_folders()
    if not folders:
        raise ContractError(
            f"where should the model set go? Give ComfyUI's models/coreai with --to, or set {MODELS_VARIABLE}"
        )
    return folders[0]


def add_download(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser("download", help="get a published model set; goes on where it stopped")
    command.add_argument("name", nargs="?", default=NAME, metavar="NAME", help="what to call it (default: %(default)s)")
    command.add_argument(
        "--repo", default=PUBLISHED_REPOSITORY, metavar="OWNER/NAME", help="on the hub (default: %(default)s)"
    )
    command.add_argument("--revision", metavar="COMMIT", help="default: that of an earlier run, else the newest")
    command.add_argument("--to", type=Path, metavar="FOLDER", help="of model sets (default: the first we look in)")
    command.add_argument(
        "--sizes", type=lambda text: tuple(text.split(",")), default=(), metavar="512,1024",
        help="only the VAE decoders of these picture sizes (default: all)",
    )  # fmt: skip
    command.add_argument("--accept-license", action="store_true", help="you accept the licence of the model")
    command.set_defaults(run=download_command)
