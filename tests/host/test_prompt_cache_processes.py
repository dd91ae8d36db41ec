"""What one process encoded, the next one finds, and several may be at it at once."""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coreai_rgba_image.host import runtime
from coreai_rgba_image.host.files import cache_folder
from coreai_rgba_image.host.model_set import ModelSet

PROMPT = "a red apple on a wooden table"

CHILD = """
import hashlib, json, sys
from pathlib import Path
from coreai_rgba_image.host import runtime
from coreai_rgba_image.host.model_set import ModelSet
from coreai_rgba_image.host.pipeline import encode_prompts
loaded, load = [], runtime.load
runtime.load = lambda bundle: loaded.append(bundle.spec.kind) or load(bundle)
embeddings = encode_prompts(ModelSet(Path(sys.argv[1])), sys.argv[2:])
print(json.dumps([loaded, [hashlib.sha256(array).hexdigest() for array in embeddings]]))
"""


@pytest.fixture
def model(tiny_set: Path) -> ModelSet:
    return ModelSet(tiny_set)


@pytest.fixture
def folder() -> Iterator[Path]:
    """The cache's folder, with nothing in it."""
    folder = cache_folder() / "prompts"
    shutil.rmtree(folder, ignore_errors=True)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def hashes(model: ModelSet, texts: list[str]) -> list[str]:
    """Of what the encoder itself says, without any of the cache's code."""
    result = []
    with runtime.load(model.text_encoder) as encoder:
        for tokens in map(model.tokenizer.encode, texts):
            embeddings = encoder(input_ids=tokens.ids)["hidden"][:, tokens.drop_idx :]
            result.append(hashlib.sha256(embeddings).hexdigest())
    return result


def start(model: ModelSet, *texts: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, str(model.path), *texts]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> tuple[list[str], list[str]]:
    """What was loaded, and the hash of each prompt's embeddings."""
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "cached prompt" not in errors
    assert "disk" not in errors
    loaded, embeddings = json.loads(out)
    return loaded, embeddings


def test_the_next_process_does_not_load_the_encoder(model: ModelSet, folder: Path) -> None:
    texts = [PROMPT, "blurry"]
    expected = hashes(model, texts)
    assert end(start(model, *texts)) == (["text encoder"], expected)
    assert end(start(model, *texts)) == ([], expected)
    assert end(start(model, *texts, "another")) == (["text encoder"], hashes(model, [*texts, "another"]))


def test_processes_that_encode_the_same_prompts_at_once_agree(model: ModelSet, folder: Path) -> None:
    texts = [PROMPT, "blurry", "one more"]
    processes = [start(model, *texts) for _ in range(3)]
    results = [end(process)[1] for process in processes]
    assert results == [hashes(model, texts)] * 3
    assert len(list(folder.iterdir())) == len(texts)
    assert end(start(model, *texts)) == ([], results[0])
