"""The model that ships: small, what its checkpoint exports to, and telling right from wrong."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from coreai_rgba_image.host import runtime
from coreai_rgba_image.host.bundle import Bundle
from coreai_rgba_image.host.demo.breakages import (
    Graphs,
    Question,
    answers,
    breakages,
    checkpoint_statistics,
    checkpoint_tokenizer,
    picture,
    sampled,
    torch_graphs,
)
from coreai_rgba_image.host.demo.captions import Scene
from coreai_rgba_image.host.demo.measure import BARS, Pixels, Scores, judge, score
from coreai_rgba_image.host.demo.ship import CHECKPOINT_FOLDER, SIZES, export_shipped
from coreai_rgba_image.host.demo.train import held_out_questions
from coreai_rgba_image.host.denoiser import Shortcuts
from coreai_rgba_image.host.latents import initial_noise
from coreai_rgba_image.host.model_set import EMBEDDED_FOLDER, ModelSet
from coreai_rgba_image.host.pipeline import encode_prompts
from coreai_rgba_image.host.pixels import composite
from coreai_rgba_image.host.prompt import PromptTokenizer
from coreai_rgba_image.host.sampling import Sampling, Settings

pytestmark = pytest.mark.slow

ON_RUNTIME = slice(4, None, 8)
"""Of the 200 questions, spread evenly over them: 25."""

BROKEN = 24
BREAKAGES = (
    "another prompt's embedding",
    "two RoPE axes swapped",
    "timestep halved",
    "latents un-normalised twice",
    "alpha inverted",
)


@pytest.fixture(scope="module")
def in_torch() -> Graphs:
    return torch_graphs(CHECKPOINT_FOLDER)


@pytest.fixture(scope="module")
def on_runtime() -> Iterator[Graphs]:
    model = ModelSet(EMBEDDED_FOLDER)
    with ExitStack() as loaded:
        encoder, dit = (loaded.enter_context(runtime.load(bundle)) for bundle in (model.text_encoder, model.dit))
        decoders = {
            (height // 16, width // 16): loaded.enter_context(runtime.load(bundle))
            for (height, width), bundle in model.vae_decoders.items()
        }
        yield Graphs(
            encode=lambda ids: encoder(input_ids=ids)["hidden"],
            denoise=lambda **inputs: dit(**inputs)["vel"],
            decode=lambda x, height, width: decoders[height, width](latents_packed=x)["image"],
        )


@pytest.fixture(scope="module")
def tokenizer() -> PromptTokenizer:
    return checkpoint_tokenizer(CHECKPOINT_FOLDER)


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    return held_out_questions(200)


def scores_of(graphs: Graphs, tokenizer: PromptTokenizer, questions: list[Question]) -> Scores:
    return score([(question.scene, verdict) for question, verdict in answers(graphs, tokenizer, questions)])


def missed_bars(scores: Scores) -> set[str]:
    found = asdict(scores)
    return {name for name, bar in BARS.items() if not found[name] >= bar}


def test_checkpoint_and_bundles_weigh_less_than_16_mb() -> None:
    data = EMBEDDED_FOLDER.parent
    assert sum(path.stat().st_size for path in data.rglob("*") if path.is_file()) < 16e6
    assert (data / "LICENSE").is_file()


def test_the_prompt_starts_elsewhere_than_in_the_published_model(tokenizer: PromptTokenizer) -> None:
    assert tokenizer.encode("a star").drop_idx != 14


def arrays_for(bundle: Bundle) -> dict[str, np.ndarray]:
    """Random input of the smallest size the bundle takes."""
    rng = np.random.default_rng(0)
    low = {axis: limits[0] for axis, limits in bundle.spec.limits.items()}
    shapes = {
        tensor.name: [low[size] if isinstance(size, str) else size for size in tensor.shape]
        for tensor in bundle.spec.inputs
    }
    if "input_ids" in shapes:
        return {"input_ids": rng.integers(0, 300, shapes["input_ids"]).astype(np.int32)}
    return {name: rng.random(shape, dtype=np.float32) for name, shape in shapes.items()}


def test_the_checkpoint_exports_to_the_same_numbers(tmp_path: Path) -> None:
    export_shipped(CHECKPOINT_FOLDER, tmp_path / "again")
    shipped, again = ModelSet(EMBEDDED_FOLDER).bundles, ModelSet(tmp_path / "again").bundles
    assert [bundle.path.name for bundle in again] == [bundle.path.name for bundle in shipped]
    assert len(shipped) == 2 + len(SIZES)
    for one, other in zip(shipped, again, strict=True):
        if one.spec.kind == "VAE decoder" and one.spec.output("image").shape[2:] != (256, 256):
            continue  # the same network at a size that takes long
        arrays = arrays_for(one)
        with runtime.load(one) as first, runtime.load(other) as second:
            expected, found = first(**arrays), second(**arrays)
        for name, values in expected.items():
            assert np.array_equal(found[name], values), (one.path.name, name)


@pytest.fixture(scope="module")
def scores(in_torch: Graphs, tokenizer: PromptTokenizer, questions: list[Question]) -> Scores:
    return scores_of(in_torch, tokenizer, questions)


def test_pictures_in_torch_show_what_was_asked_for(scores: Scores) -> None:
    assert not missed_bars(scores), scores


def test_most_pictures_are_right_in_everything(scores: Scores) -> None:
    """Else the breakages below, after which fewer than half may be, would show nothing."""
    assert scores.all_right > 0.7


@pytest.fixture(scope="module")
def on_both(
    in_torch: Graphs, on_runtime: Graphs, tokenizer: PromptTokenizer, questions: list[Question]
) -> list[tuple[Question, Pixels, Pixels]]:
    """Questions with the runtime's picture and torch's."""
    pairs = []
    for question in questions[ON_RUNTIME]:
        asked = (tokenizer, question.scene.caption, question.seed, question.height, question.width)
        pairs.append((question, picture(on_runtime, *asked), picture(in_torch, *asked)))
    return pairs


def test_pictures_of_the_runtime_show_what_was_asked_for(on_both: list[tuple[Question, Pixels, Pixels]]) -> None:
    scores = score([(question.scene, judge(found, question.scene)) for question, found, _ in on_both])
    assert not missed_bars(scores), scores


def test_pictures_of_the_runtime_are_those_of_torch(on_both: list[tuple[Question, Pixels, Pixels]]) -> None:
    for _, found, expected in on_both:
        error = composite(found[None]).astype(np.float64) - composite(expected[None])
        assert 10 * np.log10(255**2 / max((error**2).mean(), 1e-12)) >= 45
        assert np.abs(found[..., 3].astype(int) - expected[..., 3]).max() <= 2


@pytest.mark.parametrize("name", BREAKAGES)
def test_the_measure_notices(
    name: str, in_torch: Graphs, tokenizer: PromptTokenizer, questions: list[Question]
) -> None:
    broken = breakages(in_torch, tokenizer, checkpoint_statistics(CHECKPOINT_FOLDER), questions[:BROKEN])
    assert set(broken) == set(BREAKAGES)
    assert scores_of(broken[name], tokenizer, questions[:BROKEN]).all_right < 0.5


WAYS = {
    "20 of Euler's": (20, "euler", "model"),
    "Adams-Bashforth": (10, "adams_bashforth_2m", "model"),
    "DPM++ 2M": (10, "dpmpp_2m", "unstretched"),
}


def test_ten_steps_of_second_order_are_nearer_to_the_flow_than_twenty_of_eulers(
    in_torch: Graphs, tokenizer: PromptTokenizer, questions: list[Question]
) -> None:
    """The flow: a hundred steps of Euler's. Root mean squares of the latents' differences over eight pictures."""
    squares: dict[str, list[float]] = {name: [] for name in WAYS}
    for question in questions[:8]:
        asked = (in_torch, tokenizer, question.scene.caption, question.seed, question.height, question.width)
        flow = sampled(*asked, 100)
        for name, way in WAYS.items():
            squares[name].append(float(np.square(sampled(*asked, *way) - flow).mean()))
    euler, *others = (np.sqrt(np.mean(values)) for values in squares.values())
    assert max(others) < euler


@pytest.mark.parametrize("cfg", [1.0, 3.0])
def test_reusing_the_text_gives_the_same_bits(questions: list[Question], cfg: float) -> None:
    """Small pictures, of which the runtime makes many; equal latents decode to equal bytes."""
    model = ModelSet(EMBEDDED_FOLDER)
    for question in questions[:20]:
        prompts = encode_prompts(model, [question.scene.caption, "a large black cross sticker"])
        results = []
        for choice in ("on", "off"):
            settings = Settings(4, cfg, shortcuts=Shortcuts(choice))
            sampling = Sampling(model, prompts[0], initial_noise(question.seed, 8, 8), settings, negative=prompts[1])
            list(sampling.run())
            results.append(sampling.tokens)
        assert np.array_equal(*results)


@pytest.mark.parametrize(("height", "width"), [(32, 32), (16, 24)])
def test_other_sizes_show_what_was_asked_for(
    height: int, width: int, in_torch: Graphs, tokenizer: PromptTokenizer
) -> None:
    scene = Scene("large", False, "red", "star")
    verdict = judge(picture(in_torch, tokenizer, scene.caption, 1, height, width), scene)
    assert (verdict.colour, verdict.corners, verdict.size) == (True, True, True)
