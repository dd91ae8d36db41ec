"""The massive activation: bf16 loses the token that has it, fp32 keeps it, and an fp32 residual alone may or may not.

The reference is transformers' own ``Qwen3VLTextModel`` on the same checkpoint, in fp32.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3VLForConditionalGeneration

from coreai_rgba_image.host import runtime
from coreai_rgba_image.host.bundle import Bundle
from coreai_rgba_image.host.export.checkpoint import load_text_encoder
from coreai_rgba_image.host.export.model_set import export_text_encoder
from coreai_rgba_image.host.gates.massive import CHANNEL, MASSIVE_TOKEN, write_massive_checkpoint
from coreai_rgba_image.host.graphs.text_encoder import TextEncoder
from coreai_rgba_image.host.prompt import PromptTokenizer

PROMPTS = (
    "a red apple on a wooden table, studio lighting", "", "a", "a blue potion bottle icon", "0123456789", "dragon",
    "cute cartoon dragon sticker transparent", "flat colours, thick outline", "studio", "table, wooden",
)  # fmt: skip
EVERY_TOKEN = 0.999
"""The bar of the published port for the correlation of each token with the reference's."""
VARIANTS = ("fp32", "r32", "bf16")

ROUNDED = 1e-3
"""Of the reference's largest value: more than fp32 is ever wrong by, less than bf16 is."""

Encode = Callable[[np.ndarray], np.ndarray]
"""Token ids ``[1, L]`` to the residual before the final norm, ``[L, width]`` float32."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_massive_checkpoint(tmp_path_factory.mktemp("massive") / "checkpoint")


@pytest.fixture(scope="module")
def ids(checkpoint: Path) -> list[np.ndarray]:
    tokenizer = PromptTokenizer.from_file(checkpoint / "processor")
    return [tokenizer.encode(prompt).ids for prompt in PROMPTS]


@pytest.fixture(scope="module")
def massive(checkpoint: Path, ids: list[np.ndarray]) -> list[np.ndarray]:
    """Which tokens of each prompt are massive: those that open the system's, the user's and the assistant's line."""
    token = Tokenizer.from_file(str(checkpoint / "processor" / "tokenizer.json")).token_to_id(MASSIVE_TOKEN)
    return [prompt[0] == token for prompt in ids]


def transformers_encoder(checkpoint: Path, compute: str) -> Encode:
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[compute]
    model = Qwen3VLForConditionalGeneration.from_pretrained(checkpoint / "text_encoder", dtype=dtype)
    text = model.model.language_model.eval()
    seen: list[Tensor] = []
    text.norm.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))

    def encode(ids: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            text(input_ids=torch.from_numpy(ids).long())
        return seen.pop()[0].float().numpy()

    return encode


def our_encoder(checkpoint: Path, compute: str) -> Encode:
    return encoder_of(load_text_encoder(checkpoint, compute))


def encoder_of(model: TextEncoder) -> Encode:
    def encode(ids: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model(torch.from_numpy(ids))[0].numpy()

    return encode


@pytest.fixture(scope="module")
def expected(checkpoint: Path, ids: list[np.ndarray]) -> list[np.ndarray]:
    return list(map(transformers_encoder(checkpoint, "fp32"), ids))


class Correlations(NamedTuple):
    """With the reference, one for each token of all prompts; ``massive`` has a column for each line of the template."""

    massive: np.ndarray
    others: np.ndarray


def correlations(
    encode: Encode, ids: list[np.ndarray], expected: list[np.ndarray], massive: list[np.ndarray]
) -> Correlations:
    tokens = [
        list(map(correlation, encode(prompt), reference)) for prompt, reference in zip(ids, expected, strict=True)
    ]
    split = [(np.array(row)[mask], np.array(row)[~mask]) for row, mask in zip(tokens, massive, strict=True)]
    return Correlations(np.stack([grown for grown, _ in split]), np.concatenate([rest for _, rest in split]))


def correlation(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.corrcoef(found.astype(np.float64), expected.astype(np.float64))[0, 1])


Judge = Callable[[Encode], Correlations]


@pytest.fixture(scope="module")
def judge(ids: list[np.ndarray], expected: list[np.ndarray], massive: list[np.ndarray]) -> Judge:
    return lambda encode: correlations(encode, ids, expected, massive)


def test_a_token_grows_to_thousands_and_is_cancelled(
    checkpoint: Path, ids: list[np.ndarray], massive: list[np.ndarray]
) -> None:
    model = load_text_encoder(checkpoint)
    residuals: list[Tensor] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda module, arguments, output: residuals.append(output[0]))
    for prompt, grown in zip(ids, massive, strict=True):
        residuals.clear()
        encoder_of(model)(prompt)
        lengths = torch.stack(residuals).norm(dim=-1).numpy()
        assert grown.sum() == 3
        assert (lengths[4:6, grown] > 9000).all()
        assert (lengths[-1, grown] < 120).all()
        assert lengths[:, ~grown].max() < 200
        assert (torch.stack(residuals)[:, ~grown, CHANNEL] == 0).all()


def test_fp32_keeps_every_token(checkpoint: Path, judge: Judge) -> None:
    kept = judge(our_encoder(checkpoint, "fp32"))
    assert min(kept.massive.min(), kept.others.min()) >= 0.999999


@pytest.mark.parametrize("encoder", [our_encoder, transformers_encoder])
def test_bf16_loses_the_massive_tokens_of_every_prompt_and_no_other(
    checkpoint: Path, judge: Judge, encoder: Callable[[Path, str], Encode]
) -> None:
    """Measured, the same for both: 0.962 and 0.990 for the first two, 0.82 to 0.996 for the third; others 0.9997."""
    lost = judge(encoder(checkpoint, "bf16"))
    assert lost.massive.max() < EVERY_TOKEN
    assert lost.massive.min() < 0.9
    assert lost.others.min() >= 0.9995


def test_an_fp32_residual_keeps_the_massive_tokens_of_some_prompts_alone(checkpoint: Path, judge: Judge) -> None:
    """Measured: 0.9999 and 0.9992 for the first two, which no prompt changes; 0.9982 to 0.9999 for the third.

    It is far from bf16's loss, but of ten prompts three miss the bar that it must meet for every one.
    """
    between, lost = (judge(our_encoder(checkpoint, compute)) for compute in ("r32", "bf16"))
    assistant = between.massive[:, 2]
    assert assistant.max() >= EVERY_TOKEN
    assert assistant.min() < EVERY_TOKEN
    assert between.massive.min() > max(0.995, lost.massive.min())
    assert between.others.min() >= 0.9995


def test_the_same_seed_gives_the_same_weights(checkpoint: Path, tmp_path: Path) -> None:
    name = Path("text_encoder") / "model.safetensors"
    again, other = (write_massive_checkpoint(tmp_path / f"{seed}", seed) / name for seed in (0, 1))
    assert again.read_bytes() == (checkpoint / name).read_bytes()
    assert other.read_bytes() != (checkpoint / name).read_bytes()


class Encoded(NamedTuple):
    """A bundle, and what it gave on the runtime for each prompt."""

    bundle: Bundle
    hidden: list[np.ndarray]


@pytest.fixture(scope="module")
def on_the_runtime(
    checkpoint: Path, ids: list[np.ndarray], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Encoded]:
    folder = tmp_path_factory.mktemp("variants")
    found = {}
    for compute in VARIANTS:
        bundle = export_text_encoder(checkpoint, folder, compute)
        with runtime.load(bundle) as encoder:
            found[compute] = Encoded(bundle, [encoder(input_ids=prompt)["hidden"][0] for prompt in ids])
    return found


def replay(hidden: list[np.ndarray]) -> Encode:
    each = iter(hidden)
    return lambda ids: next(each)


def test_weights_are_bf16_in_every_bundle(on_the_runtime: dict[str, Encoded]) -> None:
    sizes = [encoded.bundle.size for encoded in on_the_runtime.values()]
    assert max(sizes) <= 1.03 * min(sizes)


@pytest.mark.parametrize("compute", VARIANTS)
def test_a_bundle_computes_in_its_variant(
    checkpoint: Path,
    ids: list[np.ndarray],
    expected: list[np.ndarray],
    massive: list[np.ndarray],
    on_the_runtime: dict[str, Encoded],
    compute: str,
) -> None:
    """Away from fp32 by what the variant rounds, and near the same variant in torch.

    Massive tokens are left out of the latter: a step of 64 taken up here and down there, as it was for one of
    thirty in bf16, brings two implementations to a correlation of 0.70 with each other.
    """
    found = on_the_runtime[compute].hidden
    away = max(difference(ours, reference) for ours, reference in zip(found, expected, strict=True))
    assert (away > ROUNDED) == (compute != "fp32")
    in_torch = list(map(our_encoder(checkpoint, compute), ids))
    same = correlations(replay(found), ids, in_torch, massive)
    assert same.others.min() >= (0.999999 if compute == "fp32" else 0.995)


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def test_the_fp32_bundle_keeps_every_token_and_the_bf16_bundle_loses_the_massive_ones(
    on_the_runtime: dict[str, Encoded], judge: Judge
) -> None:
    """Other tokens reach 0.998 where torch's bf16 reaches 0.9997: the runtime's is coarser on a Linux CPU."""
    kept, between, lost = (judge(replay(on_the_runtime[compute].hidden)) for compute in VARIANTS)
    assert min(kept.massive.min(), kept.others.min()) >= 0.999999
    assert lost.massive.max() < EVERY_TOKEN
    assert lost.massive.min() < 0.9
    assert between.massive.min() > 0.995
    assert min(lost.others.min(), between.others.min()) >= 0.995
