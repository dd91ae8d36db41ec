"""The gates on the random tiny model and on the trained one, and every defect they are there for, planted."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from coreai_rgba_image.host.cli import main
from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.export.checkpoint import load_dit
from coreai_rgba_image.host.export.convert import convert
from coreai_rgba_image.host.export.model_set import dit_parts
from coreai_rgba_image.host.gates.captured import Request
from coreai_rgba_image.host.gates.command import EMBEDDED_CHECKPOINT, EMBEDDED_REQUEST, Options, control_steps, own_band
from coreai_rgba_image.host.gates.defects import DEFECTS
from coreai_rgba_image.host.gates.oracle import capture
from coreai_rgba_image.host.gates.rows import FAIL, NOT_RUN, PASS, Findings, Row
from coreai_rgba_image.host.gates.subject import Subject
from coreai_rgba_image.host.gates.table import END_TO_END, GATES, Gate, judge
from coreai_rgba_image.host.model_set import EMBEDDED_FOLDER, ModelSet

pytestmark = pytest.mark.slow

STEPS = 6

PLANTED = (
    "RoPE grid not centred", "drop_idx + 1", "final norm applied", "image modulated from t = 0", "text not causal",
    "sigmas off by one", "no terminal stretch", "un-normalised twice", "red and blue swapped", "alpha inverted",
    "timestep frequencies in bf16", "keys and values of another prompt",
)  # fmt: skip
"""The twelve mistakes that somebody was most likely to make."""


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint: Path, tiny_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    request = Request(tiny_checkpoint, width=192, height=128, steps=STEPS)
    oracle = capture(request, tmp_path_factory.mktemp("oracle") / "tiny")
    return Subject(oracle, tiny_checkpoint, ModelSet(tiny_set), range(STEPS))


@pytest.fixture(scope="module")
def tiny_rows(tiny: Subject) -> list[Row]:
    return [judge(gate, tiny, control_steps(STEPS)) for gate in GATES]


def test_every_gate_passes_on_the_tiny_model_and_every_control_is_caught(tiny_rows: list[Row]) -> None:
    for row in tiny_rows:
        assert row.verdict == PASS, str(row)
        assert row.controls
        assert all(control.caught for control in row.controls)
    assert sum(len(row.controls) for row in tiny_rows) >= 25


def test_every_gate_passes_on_the_model_that_ships(tmp_path_factory: pytest.TempPathFactory) -> None:
    request = Request(EMBEDDED_CHECKPOINT, EMBEDDED_REQUEST.prompt, steps=STEPS)
    oracle = capture(request, tmp_path_factory.mktemp("oracle") / "trained")
    subject = Subject(oracle, EMBEDDED_CHECKPOINT, ModelSet(EMBEDDED_FOLDER), range(STEPS))
    for gate in GATES:
        row = judge(gate, subject, control_steps(STEPS))
        assert row.verdict == PASS, str(row)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_defect_is_caught(name: str, tiny: Subject) -> None:
    few = Subject(tiny.oracle, tiny.checkpoint, tiny.model, (0, STEPS - 1))
    with DEFECTS[name]():
        rows = [judge(Gate(gate.name, gate.published, gate.measure), few, ()) for gate in GATES]
    assert [row.gate for row in rows if row.verdict == FAIL], [str(row) for row in rows]


def test_a_defect_is_gone_with_its_context(tiny: Subject) -> None:
    for defect in DEFECTS.values():
        with defect():
            pass
    cheap = [gate for gate in GATES if gate.name in ("sampler", "tokenizer", "VAE decoder in torch")]
    assert [judge(gate, tiny, (0,)).verdict for gate in cheap] == [PASS] * 3


def test_a_bundle_without_the_functions_is_not_run_and_has_not_passed(tiny: Subject, tmp_path: Path) -> None:
    main_part, *_ = dit_parts(load_dit(tiny.checkpoint))
    convert(*main_part, tmp_path / "qi21_dit_full_w16a32_dyn_iofp32.aimodel", {}, [])
    published = Subject(tiny.oracle, tiny.checkpoint, ModelSet(tmp_path), tiny.steps)
    [gate] = [gate for gate in GATES if gate.name == "text reuse"]
    row = judge(gate, published, (0,))
    assert row.verdict == NOT_RUN
    assert "holds main alone" in row.reason
    assert not Findings({}, [row]).passed


def test_what_is_not_installed_is_named(tiny: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    [gate] = [gate for gate in GATES if gate.name == "M-RoPE collapse"]
    row = judge(gate, tiny, (0,))
    assert row.verdict == NOT_RUN
    assert "transformers is missing: pip install" in row.reason


def test_a_set_of_another_checkpoint_fails(tiny: Subject) -> None:
    other = Subject(tiny.oracle, tiny.checkpoint, ModelSet(EMBEDDED_FOLDER), tiny.steps)
    verdicts = {gate.name: judge(gate, other, ()).verdict for gate in GATES if gate.name.endswith("bundle")}
    assert set(verdicts.values()) == {FAIL}


@pytest.fixture
def reports(tmp_path: Path) -> list[str]:
    return ["--json", str(tmp_path / "gates.json"), "--html", str(tmp_path / "gates.html")]


def test_the_command_prints_the_table_with_the_verdict_last(
    tiny: Subject, reports: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = ["--oracle", str(tiny.oracle.folder), "--set", str(tiny.model.path), "--perturb-runs", "1"]
    assert main(["gates", *named, *reports]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == f"passed: {len(GATES)} pass, 0 FAIL, 0 not run"
    for gate in GATES:
        assert f"pass     {gate.name} (" in printed
    content = json.loads((tmp_path / "gates.json").read_text(encoding="utf-8"))
    assert content["passed"]
    assert [gate["gate"] for gate in content["gates"]] == [gate.name for gate in GATES]
    assert content["probes"][0]["title"] == "Sensitivity"
    assert END_TO_END in (tmp_path / "gates.html").read_text(encoding="utf-8")


def test_the_command_fails_for_another_checkpoints_set(tiny: Subject, capsys: pytest.CaptureFixture[str]) -> None:
    named = ["--oracle", str(tiny.oracle.folder), "--set", "demo", "--embed-perturb", "0"]
    assert main(["gates", *named]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAILED: ")


def test_the_models_own_band_is_what_bf16_does_to_the_reference(
    tiny: Subject, tiny_rows: list[Row], tmp_path: Path
) -> None:
    in_bf16 = capture(Request(tiny.checkpoint, width=192, height=128, steps=STEPS, dtype="bf16"), tmp_path / "bf16")
    probe = own_band(tiny, in_bf16, tiny_rows)
    (reference_psnr, _, reference_corr), (own_psnr, _, own_corr) = probe.runs.values()
    assert reference_psnr < own_psnr
    assert reference_corr < own_corr
    expected = np.corrcoef(in_bf16.final_latents.ravel(), tiny.oracle.final_latents.ravel())[0, 1]
    assert reference_corr == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", ["gates.json", "gates.html"])
def test_a_report_that_cannot_be_written_is_refused_before_anything_is_measured(name: str, tmp_path: Path) -> None:
    kind = {"gates.json": "json_path", "gates.html": "html_path"}[name]
    with pytest.raises(ContractError, match="cannot be written"):
        Options(**{kind: tmp_path / "nowhere" / name})
    with pytest.raises(ContractError, match="cannot be written"):
        Options(**{kind: tmp_path / "gates.txt"})


def test_an_oracle_without_a_set_is_refused(capsys: pytest.CaptureFixture[str], tiny: Subject) -> None:
    assert main(["gates", "--oracle", str(tiny.oracle.folder)]) == 1
    assert "give both" in capsys.readouterr().err
