"""The model set that works without a download."""

import logging
import shutil
import tempfile
from pathlib import Path

from .bundle import import_coreai
from .contract import ContractError
from .files import cache_folder
from .model_set import ModelSet

NAME = "demo"

logger = logging.getLogger(__name__)


def embedded_model_set() -> ModelSet:
    """The tiny random model, exported into the cache on first use. Its pictures mean nothing yet.

    The first use needs the converter and the reference: ``pip install 'coreai-rgba-image[export,reference]'``.
    """
    folder = cache_folder() / NAME / "1"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            _build(temporary)
            _move_into_place(temporary / "set", folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return ModelSet(folder)


def _move_into_place(made: Path, folder: Path) -> None:
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was first
            raise


def _build(temporary: Path) -> None:
    import_coreai()
    try:
        import torch

        from .demo.tiny import write_tiny_checkpoint
        from .export.model_set import export_model_set
    except ImportError as error:
        raise ContractError(
            f"the {NAME} model set is made on first use, which needs more than is installed ({error}): "
            "pip install 'coreai-rgba-image[export,reference]'"
        ) from error
    logger.info("making the demo model set, once")
    with torch.inference_mode(False):
        checkpoint = write_tiny_checkpoint(temporary / "checkpoint")
        export_model_set(
            checkpoint, temporary / "set", sizes=("256", "384x256", "512"), dit_compute="fp32", report=logger.info
        )
