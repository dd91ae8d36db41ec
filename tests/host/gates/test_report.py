"""The page as a browser reads it: parsed, never searched as a string of tags."""

import math

import numpy as np
import pytest

from coreai_rgba_image.host.gates import report
from coreai_rgba_image.host.gates.report import (
    LEAST_AMPLIFICATION,
    PAGE_LIMIT,
    amplification,
    report_page,
    visible_difference,
)
from coreai_rgba_image.host.gates.rows import Control, Findings, Measured, Probe, Row, at_least, at_most
from coreai_rgba_image.host.pixels import composite

from .pages import HOSTILE, charts_of, digits, one_row, pair, parsed, pictures_of, sample


def test_every_gate_has_a_row_with_its_verdict_figures_controls_and_published_figure() -> None:
    findings = sample()
    rows = parsed(findings).all("tbody")[0].all("tr")
    assert [row.all("th")[0].text for row in rows] == [row.gate for row in findings.rows]
    assert [row.all("td")[0].text for row in rows] == ["✓ passed", "✗ FAILED", "✗ FAILED", "○ not run", "✓ passed"]
    bundle, encoder, vae, reuse, end = ([cell.text for cell in row.all("td")[1:]] for row in rows)
    assert bundle == [
        f"lowest corr of a step {digits(0.999854)}, bar ≥ 0.999NaN or infinite 0, bar ≤ 040 steps",
        "40/40, corr 0.999978 to 0.999854",
        "RoPE grid not centred caught: lowest corr of a step 0.897 misses ≥ 0.999"
        "drop_idx + 1 caught: stopped with an error: the text has 17 tokens, not 18",
        "12.3",
    ]
    assert encoder[:2] == ["corr of a token 0.976, bar ≥ 0.999 MISSED", "0.9998"]
    assert vae == ["max|Δ| 1.35e-05, bar ≤ 0.01", "nothing", "alpha inverted NOT CAUGHT", "0.0"]
    assert reuse == ["Not run: the bundle holds main alone", "not published", "–", "–"]
    assert end[0] == "PSNR on white 46.7 dB, bar ≥ 30"


def test_the_head_says_verdict_counts_and_what_was_judged() -> None:
    page = parsed(sample())
    [header] = page.all("header")
    verdict, failed = header.all("p")
    assert verdict.text == "FAILED 2 passed, 2 FAILED, 1 not run, 3 of 4 planted defects caught"
    assert "failed" in verdict.classes
    assert failed.text == "Failed: encoder; VAE"
    assert [node.text for node in header.all("dt") + header.all("dd")] == [
        *("model set", "prompt"),
        *("demo 1.2", "a red apple"),
    ]
    good = parsed(Findings({}, sample().rows[:1]))
    [verdict] = good.all("header")[0].all("p")
    assert verdict.text.startswith("passed 1 passed, 0 FAILED, 0 not run")
    assert "failed" not in verdict.classes


def test_what_was_not_run_does_not_look_passed() -> None:
    rows = parsed(sample()).all("tbody")[0].all("tr")
    assert [row.classes for row in rows] == [["passed"], ["failed"], ["failed"], ["not-run"], ["passed"]]
    [verdict] = parsed(Findings({}, [Row("gate", "", None, reason="no Core AI here")])).all("header")[0].all("p")
    assert verdict.text.startswith("FAILED 0 passed, 0 FAILED, 1 not run")


def test_probes_are_tables_and_three_runs_or_more_have_a_spread() -> None:
    _, sensitivity, band = parsed(sample()).all("table")
    assert [row.text for row in sensitivity.all("tr")][-2:] == [
        f"run 4{digits(44)}{digits(0.9995)}",
        f"median (least to most){digits(42)} ({digits(40)} to {digits(44)})"
        f"{digits(0.9995)} ({digits(0.9995)} to {digits(0.9995)})",
    ]
    assert [row.text for row in band.all("tr")] == [
        "RunPSNR, dB",
        f"diffusers{digits(43.47)}",
        f"this port{digits(46.72)}",
    ]


def test_a_spread_is_that_of_finite_values() -> None:
    runs = {"a": [math.nan, math.nan], "b": [2.0, math.inf], "c": [4.0, -math.inf]}
    rows = parsed(Findings({}, [], [Probe("p", "", ("x", "y"), runs)])).all("table")[1].all("tr")
    finite = f"{digits(3)} ({digits(2)} to {digits(4)}), 1 not finite"
    assert rows[-1].text == f"median (least to most){finite}none, 3 not finite"


def test_text_of_the_findings_never_becomes_markup() -> None:
    figure = at_most(HOSTILE, 1, 0, HOSTILE)
    measured = Measured([figure], HOSTILE, {f"{HOSTILE} by {HOSTILE}": [1.0, 2.0]}, {HOSTILE: pair()["ours"]})
    rows = [
        Row(HOSTILE, HOSTILE, measured, [Control(HOSTILE, [figure]), Control(HOSTILE, [], HOSTILE)]),
        Row(HOSTILE, HOSTILE, None, reason=HOSTILE),
    ]
    probe = Probe(HOSTILE, HOSTILE, (HOSTILE,), {HOSTILE: [1.0]})
    harmless = parsed(sample())
    page = parsed(Findings({HOSTILE: HOSTILE}, rows, [probe]))
    assert {node.tag for node in page.all()} <= {node.tag for node in harmless.all()}
    assert {name for node in page.all() for name in node.attributes} <= {
        name for node in harmless.all() for name in node.attributes
    }
    # Twice in about, twice in links to the failed gate; the rest once for each use.
    [table, probes] = page.all("table")
    assert page.all("header")[0].text.count(HOSTILE) == 3
    assert table.text.count(HOSTILE) == 2 + 3 + 3 + 2 + 3
    assert probes.text.count(HOSTILE) == 2
    assert page.all("figcaption")[0].text == HOSTILE
    [chart] = charts_of(page)
    assert chart.all("svg")[0].text.count(HOSTILE) == 1
    assert chart.all("figcaption")[0].text.count(HOSTILE) == 2


def test_nothing_is_fetched_and_every_link_has_its_target() -> None:
    page = parsed(sample())
    assert not {node.tag for node in page.all()} & {"script", "link", "iframe", "object", "base", "form"}
    identifiers = [node.attributes["id"] for node in page.all() if "id" in node.attributes]
    assert len(set(identifiers)) == len(identifiers)
    for node in page.all():
        for name, value in node.attributes.items():
            assert "//" not in value or value.startswith("data:image/"), (node.tag, name)
            assert name != "src" or value.startswith("data:image/")
            assert name not in ("href", "aria-labelledby") or value.removeprefix("#") in identifiers
    style = page.all("style")[0].text
    assert "url(" not in style
    assert "@import" not in style
    [policy] = [node.attributes["content"] for node in page.all("meta") if "http-equiv" in node.attributes]
    assert "default-src 'none'" in policy


def test_a_screen_reader_finds_names() -> None:
    page = parsed(sample())
    assert page.all("html")[0].attributes["lang"] == "en"
    assert all(node.attributes["alt"] for node in page.all("img"))
    assert all(node.attributes["scope"] in ("row", "col") for node in page.all("th"))
    assert all(node.attributes["aria-labelledby"] for node in page.all("table"))
    assert all(node.attributes["role"] == "img" and node.attributes["aria-label"] for node in page.all("svg"))
    regions = [node for node in page.all("div") if "scroll" in node.classes]
    assert len(regions) == len(page.all("table"))
    assert all(node.attributes["tabindex"] == "0" and node.attributes["aria-labelledby"] for node in regions)


def test_pictures_are_those_of_the_gate_and_the_difference_is_amplified() -> None:
    pictures = pair()
    apart = []
    for background in (255, 0):
        first, second = (composite(pictures[name][None], [background] * 3)[0] for name in ("reference", "ours"))
        apart.append(np.abs(first.astype(int) - second))
    difference = np.maximum(*apart)
    factor = 255 // difference.max()
    assert factor > LEAST_AMPLIFICATION
    caption = f"difference × {factor}; the largest is {difference.max()} of 255, on white or on black"
    shown = pictures_of(parsed(one_row(pictures=pictures)))
    assert list(shown) == ["reference", "ours", caption, "alpha, reference", "alpha, ours"]
    np.testing.assert_array_equal(shown["reference"], pictures["reference"])
    np.testing.assert_array_equal(shown["ours"], pictures["ours"])
    np.testing.assert_array_equal(shown[caption], difference * factor)
    for name, picture in pictures.items():
        alpha = shown[f"alpha, {name}"]  # WebP has no grey pictures: three equal channels
        np.testing.assert_array_equal(alpha if alpha.ndim == 2 else alpha[..., 0], picture[..., 3])


def test_only_what_can_be_seen_is_a_difference() -> None:
    reference = np.array([[[10, 20, 30, 0], [10, 20, 30, 255], [200, 200, 200, 255], [0, 0, 0, 255]]], np.uint8)
    ours = np.array([[[99, 99, 99, 0], [10, 20, 30, 254], [200, 203, 200, 255], [0, 0, 0, 0]]], np.uint8)
    assert visible_difference(reference, ours).tolist() == [[[0] * 3, [1] * 3, [0, 3, 0], [255] * 3]]
    assert visible_difference(reference[..., :3], ours[..., :3])[0, 0].tolist() == [89, 79, 69]
    with pytest.raises(ValueError, match=r"\[1, 4, 4\], ours \[1, 3, 4\]"):
        visible_difference(reference, ours[:, :3])


@pytest.mark.parametrize(("largest", "factor"), [(0, 255), (1, 255), (3, 85), (40, 16), (255, 16)])
def test_small_differences_show(largest: int, factor: int) -> None:
    assert amplification(np.array([[0, largest]], np.uint8)) == factor


def test_equal_and_opaque_pictures() -> None:
    opaque = pair()["reference"][..., :3]
    shown = pictures_of(parsed(one_row(pictures={"reference": opaque, "ours": opaque})))
    assert list(shown) == ["reference", "ours", "no difference"]
    assert not shown["no difference"].any()
    assert list(pictures_of(parsed(one_row(pictures={"ours": opaque})))) == ["ours"]


def test_only_transparent_pictures_lie_on_a_checkerboard_and_small_ones_keep_hard_pixels() -> None:
    images = parsed(one_row(pictures=pair())).all("img")
    assert [image.classes for image in images] == [["board", "small"]] * 2 + [["small"]] * 3


def test_a_large_picture_is_reduced_and_one_wrong_pixel_stays() -> None:
    reference = np.full((1030, 600, 4), 255, np.uint8)
    ours = reference.copy()
    ours[1029, 599, 1] = 215
    shown = pictures_of(parsed(one_row(pictures={"reference": reference, "ours": ours})))
    difference = shown["difference × 16; the largest is 40 of 255, on white or on black (shown at 1/3 of its size)"]
    assert difference.shape == (344, 200, 3)
    assert np.argwhere(difference).tolist() == [[343, 199, 1]]
    assert difference.max() == 255
    assert shown["reference (shown at 1/3 of its size)"].shape[:2] == (344, 200)


def test_the_page_stays_small_with_pictures_that_cannot_be_compressed() -> None:
    page = report_page(one_row(pictures=pair(512, 512)))
    assert 1_000_000 < len(page.encode()) < PAGE_LIMIT
    assert "shown at" not in page


def test_pictures_are_reduced_until_the_page_is_small_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = one_row(pictures=pair(64, 64))
    monkeypatch.setattr(report, "SIDES", (64, 32, 16))
    whole = len(report_page(findings).encode())
    for limit, shown in ((whole + 1, None), (whole, 2), (1, 4)):
        monkeypatch.setattr(report, "PAGE_LIMIT", limit)
        captions = list(pictures_of(parsed(findings)))
        assert captions[0] == ("reference" if shown is None else f"reference (shown at 1/{shown} of its size)")


def test_a_curve_has_a_point_for_each_step_axes_and_its_bar() -> None:
    [chart] = charts_of(parsed(sample()))
    assert len(chart.all("circle")) == 40
    assert len(chart.all("polyline")) == 1
    assert [node.text for node in chart.all("text") if node.text in ("step no.", "bar")] == ["step no.", "bar"]
    labels = {node.text for node in chart.all("text")}
    assert {"0.999", "0.9995", "1", "0", "10", "30"} <= labels
    [caption] = chart.all("figcaption")
    assert caption.text.startswith(
        f"corr by step; {digits(0.999854)} (no. 39) to {digits(0.999978)} (no. 0); bar ≥ 0.999"
    )
    assert len(caption.all("li")) == 40
    heights = [float(node.attributes["cy"]) for node in chart.all("circle")]
    [bar] = [node for node in chart.all("path") if "bar" in node.classes]
    assert heights == sorted(heights)
    assert float(bar.attributes["d"].split()[1].split("H")[0]) > max(heights)


def test_values_of_many_magnitudes_are_drawn_on_a_logarithmic_axis() -> None:
    curves = {"relative": [1e-6, 1e-4, 1e-2, 0.0]}
    [chart] = charts_of(parsed(one_row(curves=curves)))
    heights = [float(node.attributes["cy"]) for node in chart.all("circle")]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)
    assert {"1e-06", "0.0001", "0.01"} <= {node.text for node in chart.all("text")}
    caption = f"relative by step, logarithmic; {digits(1e-6)} (no. 0) to {digits(0.01)} (no. 2)"
    assert chart.all("figcaption")[0].text.startswith(f"{caption}; 1 of 4 values cannot be drawn")


@pytest.mark.parametrize(
    ("name", "has_bar"),
    [
        ("corr", True),
        ("corr, 32 tokens by Lfull", True),
        ("lowest corr of a step", True),
        ("corr of a", True),
        ("cor", False),
        ("max|Δ|", False),
        ("of", False),
    ],
)
def test_a_bar_is_drawn_where_the_figures_tell_which(name: str, has_bar: bool) -> None:
    figures = [
        at_least("lowest corr of a step", 0.9, 0.5),
        at_most("norm of x", 1, 2),
        at_most("max|Δ|/max|ref|", 1, 2),
    ]
    findings = Findings({}, [Row("gate", "", Measured(figures, "", {name: [0.9, 0.95]}))])
    [chart] = charts_of(parsed(findings))
    assert bool([node for node in chart.all("path") if "bar" in node.classes]) is has_bar
    assert ("Lfull no." in chart.text) is ("Lfull" in name)


@pytest.mark.parametrize(
    ("values", "points", "lines"),
    [
        ([1.0, math.nan, 2.0, 3.0, math.inf, -math.inf, 4.0], 4, 3),
        ([math.nan] * 3, 0, 0),
        ([math.inf, 1.0], 1, 1),
        ([], 0, 0),
        ([0.0, 0.0], 2, 1),
        ([0.0], 1, 1),
        ([1.0, 1.0, 1.0], 3, 1),
        ([1.0, 1.0 - 2**-53], 2, 1),
        ([-1e300, 1e300, 1e-300, 1.0], 2, 1),
        ([1e-300, 1e149], 2, 1),
        ([-5.0, 100.0, 1e9], 3, 1),
        ([0.0, 0.0, 1e-45], 3, 1),
    ],
)
def test_no_value_breaks_a_curve(values: list[float], points: int, lines: int) -> None:
    findings = Findings({}, [Row("gate", "", Measured([at_most("x", 0, 0)], "", {"x": values}))])
    [chart] = charts_of(parsed(findings))
    assert len(chart.all("circle")) == points
    assert len(chart.all("polyline")) == lines
    assert len(chart.all("li")) == len(values)
    for node in chart.all("circle"):
        assert 0 <= float(node.attributes["cx"]) <= 460
        assert 0 <= float(node.attributes["cy"]) <= 240
    assert len(chart.all("text")) < 30
