"""The DiT bundle as a denoiser: what is reused is exact, what is skipped is counted, what cannot be is refused."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coreai_rgba_image.host import denoiser, runtime
from coreai_rgba_image.host.contract import DIT_FUNCTIONS, ContractError, HeldArray
from coreai_rgba_image.host.denoiser import EXACT, PromptSlot, Shortcuts, Skipped
from coreai_rgba_image.host.export.checkpoint import load_dit
from coreai_rgba_image.host.export.convert import convert
from coreai_rgba_image.host.export.model_set import dit_parts
from coreai_rgba_image.host.latents import initial_noise, pack
from coreai_rgba_image.host.model_set import ModelSet
from coreai_rgba_image.host.pipeline import encode_prompts
from coreai_rgba_image.host.rope import rope_tables
from coreai_rgba_image.host.runtime import LoadedFunction, LoadedGraph
from coreai_rgba_image.host.sampling import Sampling, Settings

GRID = (8, 12)
RESTLESS = 1.0
"""A threshold at which even a model of random weights skips: its first block changes by 0.9 to 1.3 of itself."""
TIME = np.array([0.6], dtype=np.float32)


@pytest.fixture(scope="module")
def model(tiny_set: Path) -> ModelSet:
    return ModelSet(tiny_set)


@pytest.fixture(scope="module")
def published(tiny_set: Path, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelSet:
    """The same model set with a DiT that holds ``main`` alone, as the published bundles do."""
    folder = tmp_path_factory.mktemp("published")
    for entry in tiny_set.iterdir():
        if not entry.name.startswith("qi21_dit"):
            (folder / entry.name).symlink_to(entry)
    main, *_ = dit_parts(load_dit(tiny_checkpoint))
    convert(*main, folder / "qi21_dit_full_w16a32_dyn_iofp32.aimodel", {})
    return ModelSet(folder)


@pytest.fixture(scope="module")
def prompts(model: ModelSet) -> list[np.ndarray]:
    return encode_prompts(model, ["a red apple on a wooden table", "blurry"])


@pytest.fixture(scope="module")
def dit(model: ModelSet) -> Iterator[LoadedGraph]:
    with runtime.load(model.dit) as loaded:
        yield loaded


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each function of a bundle is called."""
    counts: Counter[str] = Counter()
    call = LoadedFunction._call

    def counting(function: LoadedFunction, *arguments: Any) -> Any:
        counts[function.spec.function] += 1
        return call(function, *arguments)

    monkeypatch.setattr(LoadedFunction, "_call", counting)
    return counts


def slot(dit: LoadedGraph, embeddings: np.ndarray, grid: tuple[int, int] = GRID, **shortcuts: Any) -> PromptSlot:
    return PromptSlot(dit, embeddings, rope_tables(embeddings.shape[1], *grid), Shortcuts(**shortcuts))


def tokens(seed: int = 0, grid: tuple[int, int] = GRID) -> np.ndarray:
    return pack(initial_noise(seed, *grid))


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def sampled(
    model: ModelSet, prompts: list[np.ndarray], batch: int = 1, steps: int = 4, shortcuts: Shortcuts = EXACT
) -> Sampling:
    noise = np.concatenate([initial_noise(seed, *GRID) for seed in range(batch)])
    positive, *negative = prompts
    settings = Settings(steps, 3.0 if negative else 1.0, shortcuts=shortcuts)
    sampling = Sampling(model, positive, noise, settings, negative=negative[0] if negative else None)
    for _ in sampling.run():
        pass
    return sampling


def test_an_exported_dit_holds_every_function(model: ModelSet, published: ModelSet) -> None:
    assert list(model.dit.functions) == ["main", *(spec.function for spec in DIT_FUNCTIONS)]
    assert list(published.dit.functions) == ["main"]
    assert published.dit.spec == model.dit.spec
    assert model.dit.functions["text_kv"].output("txt_keys").shape == (2, 2, "L", 128)
    assert model.dit.functions["step"].limits == {"L": (8, 512), "N": (64, 4096)}
    assert model.dit.functions["finish"].limits == {"N": (64, 4096)}


def test_functions_share_their_weights_on_disk(model: ModelSet, published: ModelSet) -> None:
    """Six functions with weights of their own would be five times as large; what is added is program."""
    assert 0 < model.dit.size - published.dit.size < 200_000


@pytest.mark.parametrize(("length", "grid"), [(8, (8, 8)), (512, (9, 11)), (33, (64, 64))])
def test_a_step_gives_what_the_whole_graph_gives(dit: LoadedGraph, length: int, grid: tuple[int, int]) -> None:
    embeddings = np.random.default_rng(0).standard_normal((1, length, 64), np.float32)
    found = slot(dit, embeddings, grid)
    x = tokens(grid=grid)
    expected = found.whole(x, TIME)
    assert difference(found.step(x, TIME), expected) < 1e-5
    assert difference(found.denoiser()(x, TIME), expected) < 1e-5
    assert found.text_bytes == 2 * 2 * 2 * length * 128 * 4


def test_a_step_with_another_prompts_text_misses(dit: LoadedGraph, prompts: list[np.ndarray]) -> None:
    found = slot(dit, prompts[0])
    found.text = slot(dit, prompts[1]).text
    assert difference(found.step(tokens(), TIME), found.whole(tokens(), TIME)) > 1e-3


@pytest.mark.parametrize("guided", [False, True], ids=["cfg 1", "cfg 3"])
def test_reusing_the_text_changes_no_picture(model: ModelSet, prompts: list[np.ndarray], guided: bool) -> None:
    asked = prompts if guided else prompts[:1]
    reused, repeated = (sampled(model, asked, shortcuts=Shortcuts(choice)).tokens for choice in ("on", "off"))
    assert difference(reused, repeated) < 1e-5


def test_a_batch_computes_the_text_once_and_equals_single_runs(
    model: ModelSet, prompts: list[np.ndarray], called: Counter[str]
) -> None:
    batch = sampled(model, prompts, batch=3)
    assert called == {"text_kv": 2, "step": 3 * 4 * 2}
    for seed in range(3):
        noise = initial_noise(seed, *GRID)
        single = Sampling(model, prompts[0], noise, Settings(4, 3.0), negative=prompts[1])
        for _ in single.run():
            pass
        assert np.array_equal(batch.tokens[seed : seed + 1], single.tokens)


def test_without_reuse_only_the_whole_graph_is_called(
    model: ModelSet, prompts: list[np.ndarray], called: Counter[str]
) -> None:
    sampled(model, prompts[:1], shortcuts=Shortcuts("off"))
    assert called == {"main": 4}


def test_a_published_bundle_runs_and_says_what_it_cannot_do(
    published: ModelSet,
    model: ModelSet,
    prompts: list[np.ndarray],
    called: Counter[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger=denoiser.__name__)
    tokens = sampled(published, prompts[:1]).tokens
    assert called == {"main": 4}
    assert "holds main alone" in caplog.text
    assert difference(tokens, sampled(model, prompts[:1]).tokens) < 1e-5


@pytest.mark.parametrize("shortcuts", [Shortcuts("check"), Shortcuts(first_block_cache=0.1)], ids=str)
def test_what_a_published_bundle_cannot_do_is_refused_before_it_is_loaded(
    published: ModelSet, prompts: list[np.ndarray], shortcuts: Shortcuts, called: Counter[str]
) -> None:
    with pytest.raises(ContractError, match=r"lacks the functions text_kv, .*export it again"):
        sampled(published, prompts[:1], shortcuts=shortcuts)
    assert not called


def test_the_check_compares_every_step(model: ModelSet, prompts: list[np.ndarray], called: Counter[str]) -> None:
    sampled(model, prompts[:1], shortcuts=Shortcuts("check"))
    assert called == {"text_kv": 1, "step": 4, "main": 4}


def test_the_check_notices_a_text_that_is_not_the_prompts(dit: LoadedGraph, prompts: list[np.ndarray]) -> None:
    found = slot(dit, prompts[0], text_reuse="check")
    found.denoiser()(tokens(), TIME)
    assert found.largest_difference < 1e-5
    found.text = slot(dit, prompts[1]).text
    with pytest.raises(ContractError, match=r"changes the velocity by .* turn text_reuse off"):
        found.denoiser()(tokens(), TIME)


def test_a_first_block_cache_that_never_skips_is_exact(
    model: ModelSet, prompts: list[np.ndarray], called: Counter[str]
) -> None:
    cached = sampled(model, prompts[:1], shortcuts=Shortcuts(first_block_cache=1e-9))
    assert called == {"text_kv": 1, "head": 4, "tail": 4, "finish": 4}
    assert cached.skipped == Skipped()
    assert difference(cached.tokens, sampled(model, prompts[:1]).tokens) < 1e-4


def test_a_first_block_cache_skips_what_changes_little_and_counts_it(
    model: ModelSet, prompts: list[np.ndarray], called: Counter[str]
) -> None:
    cached = sampled(model, prompts, batch=2, steps=12, shortcuts=Shortcuts(first_block_cache=RESTLESS))
    assert called["head"] == called["finish"] == 2 * 2 * 12
    assert 0 < cached.skipped.blocks == called["head"] - called["tail"]
    assert called["tail"] >= 2 * 2  # every picture's first step runs all blocks
    assert difference(cached.tokens, sampled(model, prompts, batch=2, steps=12).tokens) > 0


def test_a_cached_batch_equals_cached_single_runs(model: ModelSet, prompts: list[np.ndarray]) -> None:
    """One picture's steps must not be answered with another's."""
    shortcuts = Shortcuts(first_block_cache=RESTLESS)
    batch = sampled(model, prompts[:1], batch=2, steps=12, shortcuts=shortcuts).tokens
    single = Sampling(model, prompts[0], initial_noise(1, *GRID), Settings(12, shortcuts=shortcuts))
    for _ in single.run():
        pass
    assert np.array_equal(batch[1:], single.tokens)


def test_a_step_cache_calls_the_dit_less_often_also_with_main_alone(
    published: ModelSet, prompts: list[np.ndarray], called: Counter[str]
) -> None:
    cached = sampled(published, prompts, batch=2, steps=12, shortcuts=Shortcuts(step_cache=0.25))
    assert cached.skipped == Skipped(steps=2 * 3)
    assert called == {"main": 2 * 2 * (12 - 3)}


def test_held_arrays_are_checked_like_any_other(dit: LoadedGraph, prompts: list[np.ndarray]) -> None:
    found = slot(dit, prompts[0])
    keys = found.text["txt_keys"]
    wrong = HeldArray(keys.array, "bfloat16", keys.shape)
    with pytest.raises(ContractError, match="txt_keys is bfloat16: convert it to float32"):
        dit["step"](img_tokens=tokens(), timestep=TIME, **found.img_rope, **{**found.text, "txt_keys": wrong})
    with pytest.raises(ContractError, match="another input has"):
        dit["step"](img_tokens=tokens(grid=(8, 8)), timestep=TIME, **found.img_rope, txt_keys=keys, txt_values=keys)


def test_a_released_graph_gives_no_function_and_its_functions_no_result(model: ModelSet) -> None:
    graph = runtime.load(model.dit)
    step = graph["step"]
    graph.release()
    with pytest.raises(RuntimeError, match="was released: load it again"):
        graph["step"]
    with pytest.raises(RuntimeError, match="was released: load it again"):
        step()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"text_reuse": "maybe"}, "text_reuse is 'maybe': choose one of on, off, check"),
        ({"first_block_cache": -0.1}, "first_block_cache is -0.1: it must be from 0"),
        ({"first_block_cache": 1.5}, "first_block_cache is 1.5: it must be from 0"),
        ({"step_cache": 0.6}, "share of re-used steps is 0.6"),
        ({"first_block_cache": float("nan")}, "first_block_cache is nan: it must be from 0"),
    ],
)
def test_other_shortcuts_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        Shortcuts(**settings)
