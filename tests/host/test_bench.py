"""The bench: its arithmetic on clocks that do as they are told, and its sections at a tiny size on the real runtime."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from coreai_rgba_image.host.bench import command, fast, runs
from coreai_rgba_image.host.bench.command import bench, difference_bar
from coreai_rgba_image.host.bench.memory import megabytes_in_a_new_process, resident_megabytes, size_section
from coreai_rgba_image.host.bench.plot import plot
from coreai_rgba_image.host.bench.results import (
    Bar,
    Panel,
    Ratios,
    Result,
    Section,
    Spread,
    alternate,
    in_turns,
    number,
    timed,
)
from coreai_rgba_image.host.bench.steps import (
    LACKING,
    Setting,
    StepTimes,
    growth_section,
    measure_steps,
    random_bundles,
    reuse_section,
)
from coreai_rgba_image.host.bundle import Bundle
from coreai_rgba_image.host.cli import main
from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.graphs.dit import DiTConfig
from coreai_rgba_image.host.model_set import ModelSet

TINY = DiTConfig(num_layers=2, num_attention_heads=1, attention_head_dim=128, context_in_dim=64, mlp_ratio=1)
LARGE, SMALL = Setting(384, 384, 494), Setting(384, 384, 22)
AT_LEAST, AT_MOST = Bar(1.7, at_least=True), Bar(3.0, at_least=False)


class Clock:
    """Stands still but for what it is told to wait."""

    def __init__(self) -> None:
        self.now = 100.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.now

    def path(self, name: str, *seconds: float) -> Callable[[], str]:
        """Takes as long as ``seconds`` say, a value for each call."""
        waits = iter(seconds)

        def run() -> str:
            self.log.append(name)
            self.now += next(waits)
            return name

        return run


def test_paths_run_in_turns_and_each_turn_has_its_ratio() -> None:
    clock = Clock()
    ratios = alternate(clock.path("a", 2, 6, 10), clock.path("b", 1, 2, 4), 3, clock=clock)
    assert clock.log == ["a", "b"] * 3
    assert ratios == Ratios([2, 6, 10], [1, 2, 4])
    assert ratios.spread == Spread(2.5, 2.0, 3.0)


def test_a_machine_that_slows_down_changes_no_ratio() -> None:
    clock = Clock()
    slowing = [1.0, 2.0, 4.0, 8.0]
    ratios = alternate(clock.path("a", *(3 * s for s in slowing)), clock.path("b", *slowing), 4, clock=clock)
    assert ratios.spread == Spread(3.0, 3.0, 3.0)


def test_any_number_of_paths_can_take_turns() -> None:
    clock = Clock()
    seconds = in_turns([clock.path("a", 1, 2), clock.path("b", 3, 4), clock.path("c", 5, 6)], 2, clock=clock)
    assert (clock.log, seconds) == (["a", "b", "c"] * 2, [[1, 2], [3, 4], [5, 6]])
    assert timed(clock.path("d", 7), clock) == (7, "d")


def test_turns_of_different_number_are_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        _ = Ratios([1.0, 2.0], [1.0]).spread


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([1.83, 1.79, 1.86], "1.83 (1.79-1.86)"),
        ([1.0, 2.0], "1.50 (1.00-2.00)"),
        ([2.1e-6], "2.10e-06"),
        ([412.6, 398.2, 1504.0], "413 (398-1504)"),
        ([14, 12, 15], "14 (12-15)"),
        ([2, 2], "2.00"),
    ],
)
def test_a_spread_is_median_and_ends(values: list[float], text: str) -> None:
    assert str(Spread.of(values)) == text


def test_a_result_says_its_bar_and_whether_it_is_cleared() -> None:
    spread = Spread(1.83, 1.79, 1.86)
    assert str(Result("s", "a / b", spread)) == "a / b 1.83 (1.79-1.86)"
    assert str(Result("s", "a / b", spread, bar=AT_LEAST)) == "a / b 1.83 (1.79-1.86), bar >= 1.7: ok"
    assert str(Result("s", "share", spread, "%", AT_MOST, "of 2 s")) == (
        "share 1.83 (1.79-1.86) % [of 2 s], bar <= 3: ok"
    )
    assert str(Result("s", "a / b", None, note="no")) == "a / b not measured [no]"
    assert str(Result("s", "a / b", None, bar=AT_LEAST, note="no")) == "a / b not measured [no], bar >= 1.7: MISSED"


@pytest.mark.parametrize(
    ("bar", "median", "ok"),
    [
        (AT_LEAST, 1.7, True),
        (AT_LEAST, 1.69, False),
        (AT_MOST, 3.0, True),
        (AT_MOST, 3.01, False),
        (AT_LEAST, float("nan"), False),
        (AT_MOST, float("nan"), False),
        (None, 0.0, None),
    ],
)
def test_the_median_is_what_clears_a_bar(bar: Bar | None, median: float, ok: bool | None) -> None:
    assert Result("s", "w", Spread(median, 0.0, 100.0), bar=bar).ok is ok


@pytest.mark.parametrize("value", [Spread(1.0, 0.5, 2.0), None])
@pytest.mark.parametrize("bar", [AT_LEAST, None])
def test_a_result_survives_json(value: Spread | None, bar: Bar | None) -> None:
    result = Result("512x512", "a / b", value, "dB", bar, "why")
    content = json.loads(json.dumps(result.to_json()))
    assert Result.from_json(content) == result
    assert content["ok"] is result.ok


def test_a_section_has_a_line_for_each_setting() -> None:
    results = [Result("x", "a", Spread(1, 1, 1)), Result("x", "b", None), Result("y", "c", Spread(2, 2, 2))]
    assert str(Section("Title", results)) == "Title\n  x: a 1; b not measured\n  y: c 2"
    assert Section("Title", results).to_json()["results"] == [result.to_json() for result in results]


def test_text_reuse_is_judged_setting_by_setting() -> None:
    times = {
        LARGE: StepTimes([3.6, 3.8], [2.0, 2.0], preparation=1.0, difference=2e-6),
        SMALL: StepTimes([1.0, 1.0], [1.25, 1.25], difference=2e-5),
    }
    lines = str(reuse_section(times, {LARGE: 1.7, SMALL: 1.0}, 1e-5)).splitlines()
    assert lines[1:] == [
        "  384x384 L=494: contract loop / ours 1.85 (1.80-1.90) [plus 0.500 steps once a prompt], bar >= 1.7: ok; "
        "largest difference 2.00e-06, bar <= 1e-05: ok",
        "  384x384 L=22: contract loop / ours 0.800 [plus 0.00 steps once a prompt], bar >= 1: MISSED; "
        "largest difference 2.00e-05, bar <= 1e-05: MISSED",
    ]
    [unjudged, _] = reuse_section({LARGE: times[LARGE]}, {}, 1e-5).results
    assert unjudged.ok is None


def test_a_bundle_with_main_alone_is_said_to_lack_the_rest() -> None:
    [result] = reuse_section({LARGE: StepTimes([1.0], [])}, {LARGE: 1.7}, 1e-5).results
    assert (result.value, result.note, result.ok) == (None, LACKING, False)


def test_growth_is_relative_to_the_smallest_of_the_same_turn() -> None:
    times = {
        LARGE: StepTimes([4.0, 10.0], [1.5, 3.0]),
        SMALL: StepTimes([2.0, 4.0], [1.0, 2.0]),
        Setting(384, 384, 407): StepTimes([3.0, 6.0], [1.0, 2.0]),
        Setting(512, 512, 407): StepTimes([6.0, 12.0], [4.0, 8.0]),
    }
    section = growth_section(times)
    assert str(section).splitlines()[1:] == [
        "  384x384 L=407 / 384x384 L=22: contract loop 1.50; text reused 1.00",
        "  384x384 L=494 / 384x384 L=22: contract loop 2.25 (2.00-2.50); text reused 1.50",
        "  512x512 L=407 / 384x384 L=407: contract loop 2.00; text reused 4.00",
    ]
    by_text, by_picture = section.panels
    assert by_text.series["contract loop"] == [(22, 1.0, ""), (407, 1.5, ""), (494, 2.25, "")]
    assert by_picture.series["text reused"] == [(576, 1.0, ""), (1024, 4.0, "")]


def test_likeness_is_psnr_on_white() -> None:
    exact = np.full((4, 4, 4), 255, dtype=np.uint8)
    off_by_one = exact.copy()
    off_by_one[..., :3] -= 1
    unseen = exact.copy()
    unseen[..., 3] = 0  # white on nothing is white too
    assert fast.likeness(off_by_one, exact) == pytest.approx(20 * np.log10(255))
    assert fast.likeness(unseen, exact) == fast.likeness(exact, exact) == fast.IDENTICAL


def test_the_fast_modes_captions_are_those_the_demo_model_is_judged_by() -> None:
    from coreai_rgba_image.host.demo.train import held_out_questions

    questions = held_out_questions(8)
    assert fast.held_out_captions(8) == [question.scene.caption for question in questions]
    assert questions[0].seed == fast.FIRST_SEED


def test_the_recommended_modes_have_bars() -> None:
    bars = {name: fast.speed_bar(shortcuts) for name, shortcuts in fast.all_modes().items()}
    judged = {name: bar.limit for name, bar in bars.items() if bar}
    recommended = f"first-block cache {fast.BLOCK_CACHE.first_block_cache:g}"
    assert judged == {"step cache 0.25": 1.25, recommended: 1.5}


def test_likeness_is_asked_of_every_picture_and_speed_of_the_median() -> None:
    assert fast.LIKENESS_BAR.cleared_by(Spread(40.0, 30.0, 50.0))
    assert not fast.LIKENESS_BAR.cleared_by(Spread(40.0, 29.9, 50.0))
    assert fast.BLOCK_CACHE_BAR.cleared_by(Spread(1.5, 1.2, 1.9))
    assert not fast.BLOCK_CACHE_BAR.cleared_by(Spread(1.4, 1.2, 1.9))


@pytest.fixture
def sections() -> list[Section]:
    series = {"one": [(1.0, 40.0, "a"), (2.0, 30.0, "b")], "none": []}
    good = Section(
        "Good", [Result("x", "a / b", Spread(2, 2, 2), bar=AT_LEAST)], [Panel("P", "x", "y", series, (1, 30))]
    )
    return [good, Section("No bars", [Result("y", "c", Spread(1, 1, 1))])]


def test_the_bench_prints_and_writes_what_it_measured(
    sections: list[Section], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    assert bench(sections, data, picture) == 0
    assert capsys.readouterr().out == "Good\n  x: a / b 2, bar >= 1.7: ok\nNo bars\n  y: c 1\n"
    content = json.loads(data.read_text(encoding="utf-8"))
    assert content["sections"] == [section.to_json() for section in sections]
    assert set(content["machine"]) == {"platform", "python", "coreai-core"}
    assert len(np.unique(np.asarray(Image.open(picture)).reshape(-1, 3), axis=0)) > 3


def test_a_missed_bar_is_exit_status_1(sections: list[Section], capsys: pytest.CaptureFixture[str]) -> None:
    missed = Section("Bad", [Result("x", "a / b", Spread(1, 1, 1), bar=AT_LEAST)])
    assert bench([*sections, missed]) == 1
    assert capsys.readouterr().err == "coreai-rgba: 1 of 2 bars missed\n"


@pytest.mark.parametrize("name", ["nowhere/bench.json", "bench.txt"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(name: str, tmp_path: Path) -> None:
    def measured() -> Iterator[Section]:
        raise AssertionError("measured")
        yield

    with pytest.raises(ContractError, match="cannot be written"):
        bench(measured(), tmp_path / name)


def test_the_command_line_reaches_the_bench(
    tiny_set: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "default_sections", lambda: iter([Section("All", [])]))
    monkeypatch.setattr(command, "model_sections", lambda model: iter([Section(str(model.path), [])]))
    assert main(["bench"]) == main(["bench", "--model", str(tiny_set)]) == 0
    assert capsys.readouterr().out == f"All\n{tiny_set}\n"
    assert main(["bench", "--model", "nobody's"]) == 1


def test_panels_of_one_point_or_none_can_be_drawn(tmp_path: Path) -> None:
    panels = [Panel("One", "x", "y", {"a": [(1.0, 1.0, "")]}), Panel("None", "x", "y", {})]
    plot(panels, tmp_path / "plot.png")
    assert Image.open(tmp_path / "plot.png").size == (900, 840)


@pytest.fixture(scope="module")
def bundles() -> Iterator[tuple[Bundle, Bundle]]:
    with random_bundles(TINY) as pair:
        yield pair


@pytest.mark.slow
def test_text_reuse_and_size_at_a_tiny_size(bundles: tuple[Bundle, Bundle]) -> None:
    full, alone = bundles
    setting = Setting(128, 128, 300)
    times = measure_steps(full, [setting], repeats=5)
    ratio, difference = reuse_section(times, {setting: 1.5}, 1e-5).results
    assert len(times[setting].contract) == len(times[setting].reused) == 5
    assert ratio.ok  # 364 tokens against 64
    assert difference.ok
    assert measure_steps(alone, [setting], repeats=1)[setting].reused == []
    disk, memory = size_section(full, alone, repeats=1).results
    assert disk.value is not None
    assert 1 < disk.value.median < 1.5
    assert memory.ok


@pytest.mark.slow
def test_memory_is_that_of_the_process(bundles: tuple[Bundle, Bundle]) -> None:
    before = resident_megabytes()
    array = np.ones(25_000_000, dtype=np.float32)
    assert 80 < resident_megabytes() - before < 120 + array[0]
    full, _ = bundles
    with pytest.raises(ContractError, match=r"ended with 1: .*not an .aimodel folder"):
        megabytes_in_a_new_process(Bundle(full.path / "none", {}, {}, ""), "on")


@pytest.mark.slow
def test_a_model_set_is_measured_with_what_it_can_do(
    tiny_set: Path, bundles: tuple[Bundle, Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast, "STEPS", 3)
    monkeypatch.setattr(runs, "STEPS", 2)
    model = ModelSet(tiny_set)
    section = fast.fast_section(model, judged=False, pictures=1)
    assert all(result.value and result.bar is None for result in section.results)
    assert len(section.results) == 2 * (len(fast.all_modes()) - 1) + 1
    stages = runs.stages_section(model, steps=2)
    assert [r.setting for r in stages.results if r.unit == "MB"] == [
        "before", "load encoder", "encode", "load DiT", "text, first step", "step", "load decoder", "decode",
    ]  # fmt: skip
    [overhead] = runs.overhead_section(model, repeats=2).results
    assert overhead.value
    assert 0 < overhead.value.low < 100
    assert difference_bar(model.dit) == 1e-4
    assert difference_bar(bundles[1]) == 1e-5


@pytest.mark.slow
def test_what_main_alone_cannot_do_is_said(
    tiny_set: Path, bundles: tuple[Bundle, Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast, "STEPS", 8)
    for entry in tiny_set.iterdir():
        if not entry.name.startswith("qi21_dit"):
            (tmp_path / entry.name).symlink_to(entry)
    (tmp_path / "qi21_dit.aimodel").symlink_to(bundles[1].path)
    section = fast.fast_section(ModelSet(tmp_path), pictures=1)
    found = {result.setting: result for result in section.results if result.what == "exact / fast"}
    assert found["step cache 0.25"].value
    refused = found[f"first-block cache {fast.BLOCK_CACHE.first_block_cache:g}"]
    assert refused.ok is False
    assert "lacks the functions text_kv, head, tail, finish" in str(refused)


def test_numbers_have_three_digits() -> None:
    assert [number(value) for value in (0.0123456, 1.0, 99.96, 1234.5, 7)] == ["0.0123", "1.00", "100", "1234", "7"]
