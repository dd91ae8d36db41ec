"""What an export writes: the published names, axes and files, and bundles that compute what the graphs do."""

import getpass
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coreai_rgba_image.host import runtime
from coreai_rgba_image.host.bundle import METADATA_KEY, import_coreai, read_bundle
from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.export.checkpoint import load_dit, load_text_encoder, load_vae_decoder
from coreai_rgba_image.host.export.model_set import export_host, export_model_set, parse_size
from coreai_rgba_image.host.graphs.text_encoder import PRECISIONS
from coreai_rgba_image.host.latents import QWEN_IMAGE_21
from coreai_rgba_image.host.model_set import ModelSet
from coreai_rgba_image.host.rope import axis_tables, rope_tables
from coreai_rgba_image.host.schedule import SchedulerConfig

ENCODER = "qi21_encoder_dynL_w16a32_ids_iofp32.aimodel"
ENCODERS = {compute: f"qi21_encoder_dynL_{compute}_ids_iofp32.aimodel" for compute in ("r32", "bf16")}
DIT_FP32 = "qi21_dit_full_w16a32_dyn_iofp32.aimodel"
DIT_BF16 = "qi21_dit_full_bf16_dyn_iofp32.aimodel"
VAES = {
    "qi21_vae_256_fp32.aimodel": (16, 16),
    "qi21_vae_192x128_fp32.aimodel": (8, 12),
    "qi21_vae_176x144_fp32.aimodel": (9, 11),
}
BAR = 1e-4
"""Of the reference's largest value: how far a bundle on the runtime may be from its torch graph."""


@pytest.fixture(scope="module")
def bf16_set(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bf16")
    export_model_set(tiny_checkpoint, out, parts=["dit"], dit_compute="bf16", report=lambda line: None)
    return out


@pytest.fixture(scope="module")
def encoder_sets(tiny_checkpoint: Path, tiny_set: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A set for each precision of the text encoder; that in fp32 is the whole one, the others have no other bundle."""
    sets = {compute: tmp_path_factory.mktemp(compute) for compute in ENCODERS}
    for compute, out in sets.items():
        export_model_set(tiny_checkpoint, out, ["encoder"], encoder_compute=compute, report=lambda line: None)
    return {"fp32": tiny_set, **sets}


def dit_inputs(text: int, height: int, width: int, features: int = 64) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "img_tokens": random.standard_normal((1, height * width, 64), dtype=np.float32),
        "txt_feats": random.standard_normal((1, text, features), dtype=np.float32),
        "timestep": np.array([0.7], dtype=np.float32),
        **vars(rope_tables(text, height, width)),
    }


@torch.no_grad()
def in_torch(model: torch.nn.Module, inputs: dict[str, np.ndarray]) -> np.ndarray:
    return model(**{name: torch.from_numpy(array) for name, array in inputs.items()}).numpy()


def on_the_runtime(path: Path, inputs: dict[str, np.ndarray]) -> np.ndarray:
    with runtime.load(read_bundle(path)) as graph:
        [output] = graph(**inputs).values()
    return output


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype == np.float32
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def described(path: Path) -> tuple[list[str], list[tuple[str, str]], list[tuple[str, str]]]:
    """Functions, inputs and outputs as Core AI itself tells them."""
    summary = import_coreai()[1].AIModelAsset.load(path).summary(include_statistics=False)
    return list(summary.function_names), summary.function_inputs("main"), summary.function_outputs("main")


def metadata_of(path: Path) -> dict[str, Any]:
    custom = import_coreai()[1].AIModelAsset.load(path).metadata.creator_defined_metadata
    assert list(custom) == [METADATA_KEY]
    assert isinstance(custom[METADATA_KEY], str)
    return json.loads(custom[METADATA_KEY])


def test_a_set_has_the_published_layout(tiny_set: Path) -> None:
    tables = {f"rope_axis{axis}_{part}.f32" for axis in range(3) for part in ("cos", "sin")}
    assert {path.name for path in tiny_set.iterdir()} == {ENCODER, DIT_FP32, *VAES, "config.json", "host", "tokenizer"}
    assert {path.name for path in (tiny_set / "host").iterdir()} == {*tables, "scheduler.json"}
    assert (tiny_set / "tokenizer" / "tokenizer.json").is_file()
    for bundle in (ENCODER, DIT_FP32, *VAES):
        assert {path.name for path in (tiny_set / bundle).iterdir()} == {"main.mlirb", "main.hash", "metadata.json"}


@pytest.mark.parametrize("compute", PRECISIONS)
def test_the_encoder_has_the_published_names_dtypes_and_axes(encoder_sets: dict[str, Path], compute: str) -> None:
    bundle = encoder_sets[compute] / {"fp32": ENCODER, **ENCODERS}[compute]
    assert ModelSet(encoder_sets[compute]).text_encoder.path == bundle
    assert described(bundle) == (
        ["main"],
        [("input_ids", "NDArray (Int32, 1 × ?)")],
        [("hidden", "NDArray (Float32, 1 × ? × 64)")],
    )


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_the_dit_has_the_published_names_dtypes_and_axes(tiny_set: Path, bf16_set: Path, compute: str) -> None:
    rope = "NDArray (Float32, 1 × ? × 64)"
    assert described({"fp32": tiny_set / DIT_FP32, "bf16": bf16_set / DIT_BF16}[compute]) == (
        ["main", "text_kv", "step", "head", "tail", "finish"],
        [
            ("img_tokens", "NDArray (Float32, 1 × ? × 64)"),
            ("txt_feats", "NDArray (Float32, 1 × ? × 64)"),
            ("timestep", "NDArray (Float32, 1)"),
            ("txt_cos", rope),
            ("txt_sin", rope),
            ("img_cos", rope),
            ("img_sin", rope),
        ],
        [("vel", "NDArray (Float32, 1 × ? × 64)")],
    )


@pytest.mark.parametrize("name", VAES)
def test_a_vae_has_the_published_names_dtypes_and_axes(tiny_set: Path, name: str) -> None:
    height, width = VAES[name]
    assert described(tiny_set / name) == (
        ["main"],
        [("latents_packed", f"NDArray (Float32, 1 × {height * width} × 64)")],
        [("image", f"NDArray (Float32, 1 × 4 × {height * 16} × {width * 16})")],
    )


def test_two_encoders_in_one_set_are_one_too_many(encoder_sets: dict[str, Path], tmp_path: Path) -> None:
    for compute, name in ENCODERS.items():
        shutil.copytree(encoder_sets[compute] / name, tmp_path / name)
    with pytest.raises(ContractError, match=r"holds 2 text encoder bundles, \['.*bf16.*r32.*'\]: keep one"):
        _ = ModelSet(tmp_path).text_encoder


@pytest.mark.parametrize("compute", PRECISIONS)
def test_the_precision_of_an_encoder_is_in_its_metadata(encoder_sets: dict[str, Path], compute: str) -> None:
    assert metadata_of(ModelSet(encoder_sets[compute]).text_encoder.path) == {
        "kind": "text encoder", "limits": {"Lfull": [16, 512]}, "weights": "bf16", "compute": compute,
    }  # fmt: skip


def test_limits_sizes_and_statistics_are_in_the_metadata(tiny_set: Path, bf16_set: Path) -> None:
    for compute, path in (("fp32", tiny_set / DIT_FP32), ("bf16", bf16_set / DIT_BF16)):
        assert metadata_of(path) == {
            "kind": "DiT", "limits": {"L": [8, 512], "N": [64, 4096]}, "weights": "bf16", "compute": compute,
            "num_layers": 2,
        }  # fmt: skip
    metadata = metadata_of(tiny_set / "qi21_vae_192x128_fp32.aimodel")
    assert (metadata["height"], metadata["width"]) == (128, 192)
    assert (metadata["latents_mean"], metadata["latents_std"]) == (list(QWEN_IMAGE_21.mean), list(QWEN_IMAGE_21.std))


def test_nothing_of_this_machine_is_inside(tiny_set: Path, bf16_set: Path, tiny_checkpoint: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    traces = [str(tiny_checkpoint), str(tiny_set), str(root), str(Path.home()), "site-packages", ".py", "/tmp/"]
    traces += [f"/{getpass.getuser()}/", f"-of-{getpass.getuser()}"]
    for folder in (tiny_set, bf16_set):
        for path in folder.glob("*.aimodel/*"):
            content = path.read_bytes()
            assert [trace for trace in traces if trace.encode() in content] == [], path.name


def test_bf16_weights_cost_two_bytes_each_also_where_the_graph_computes_in_fp32(
    tiny_set: Path, tiny_checkpoint: Path
) -> None:
    parameters = sum(parameter.numel() for parameter in load_dit(tiny_checkpoint).parameters())
    assert 2.0 <= (tiny_set / DIT_FP32 / "main.mlirb").stat().st_size / parameters < 2.2


def test_an_encoder_is_of_one_size_whatever_it_computes_in(encoder_sets: dict[str, Path]) -> None:
    sizes = [ModelSet(path).text_encoder.size for path in encoder_sets.values()]
    assert max(sizes) <= 1.03 * min(sizes)


@pytest.mark.parametrize("length", [16, 23, 100, 512])
def test_the_encoder_computes_what_its_graph_does(tiny_set: Path, tiny_checkpoint: Path, length: int) -> None:
    model = load_text_encoder(tiny_checkpoint)
    ids = np.random.default_rng(length).integers(0, model.config.vocab_size, (1, length), dtype=np.int32)
    inputs = {"input_ids": ids}
    expected = in_torch(model, inputs)
    assert difference(on_the_runtime(tiny_set / ENCODER, inputs), expected) <= BAR


@pytest.mark.parametrize("length", [16, 100, 512])
@pytest.mark.parametrize("compute", ENCODERS)
def test_an_encoder_in_bf16_stays_near_the_graph_in_fp32(
    encoder_sets: dict[str, Path], tiny_checkpoint: Path, compute: str, length: int
) -> None:
    model = load_text_encoder(tiny_checkpoint)
    ids = np.random.default_rng(length).integers(0, model.config.vocab_size, (1, length), dtype=np.int32)
    found = on_the_runtime(encoder_sets[compute] / ENCODERS[compute], {"input_ids": ids})
    expected = in_torch(model, {"input_ids": ids})
    assert BAR < difference(found, expected) <= 0.1
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] >= 0.999


@pytest.mark.parametrize(
    "size", [(8, 8, 8), (512, 8, 8), (18, 16, 16), (37, 9, 11), pytest.param((512, 64, 64), marks=pytest.mark.slow)]
)
def test_the_dit_computes_what_its_graph_does(
    tiny_set: Path, tiny_checkpoint: Path, size: tuple[int, int, int]
) -> None:
    inputs = dit_inputs(*size)
    expected = in_torch(load_dit(tiny_checkpoint), inputs)
    assert difference(on_the_runtime(tiny_set / DIT_FP32, inputs), expected) <= BAR


@pytest.mark.parametrize("size", [(8, 8, 8), (37, 9, 11), (512, 8, 12)])
def test_the_dit_in_bf16_stays_near_the_graph_in_fp32(
    bf16_set: Path, tiny_checkpoint: Path, size: tuple[int, int, int]
) -> None:
    inputs = dit_inputs(*size)
    found = on_the_runtime(bf16_set / DIT_BF16, inputs)
    expected = in_torch(load_dit(tiny_checkpoint), inputs)
    assert BAR < difference(found, expected) <= 0.1
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] >= 0.999


@pytest.mark.parametrize("name", VAES)
def test_a_vae_computes_what_its_graph_does(tiny_set: Path, tiny_checkpoint: Path, name: str) -> None:
    height, width = VAES[name]
    inputs = {"latents_packed": np.random.default_rng(0).standard_normal((1, height * width, 64), dtype=np.float32)}
    expected = in_torch(load_vae_decoder(tiny_checkpoint, height, width), inputs)
    assert difference(on_the_runtime(tiny_set / name, inputs), expected) <= BAR


def test_the_host_tables_are_the_computed_ones(tiny_set: Path) -> None:
    for axis, pair in enumerate(axis_tables()):
        for part, table in zip(("cos", "sin"), pair, strict=True):
            stored = (tiny_set / "host" / f"rope_axis{axis}_{part}.f32").read_bytes()
            assert stored == table.astype("<f4").tobytes()


def test_the_scheduler_settings_are_the_checkpoints(tiny_set: Path, tiny_checkpoint: Path) -> None:
    written = json.loads((tiny_set / "host" / "scheduler.json").read_text(encoding="utf-8"))
    assert written == asdict(SchedulerConfig())
    source = json.loads((tiny_checkpoint / "scheduler" / "scheduler_config.json").read_text(encoding="utf-8"))
    ours = {"steps", "sample_sigmas"}  # diffusers keeps these in the pipeline, not in the scheduler
    assert {name: source[name] for name in written if name not in ours} == {
        name: value for name, value in written.items() if name not in ours
    }


def test_the_fixed_sigmas_of_a_few_step_checkpoint_are_kept(tiny_checkpoint: Path, tmp_path: Path) -> None:
    turbo = tmp_path / "turbo"
    shutil.copytree(tiny_checkpoint, turbo)
    index = json.loads((turbo / "model_index.json").read_text(encoding="utf-8"))
    nodes = [1.0, 0.8, 0.4]
    (turbo / "model_index.json").write_text(json.dumps({**index, "sample_sigmas": nodes}), encoding="utf-8")
    export_host(turbo, tmp_path / "set")
    config = SchedulerConfig.from_file(tmp_path / "set" / "host" / "scheduler.json")
    assert (config.sample_sigmas, config.steps) == (tuple(nodes), 3)


def test_the_tokenizer_is_the_checkpoints(tiny_set: Path, tiny_checkpoint: Path) -> None:
    copied = (tiny_set / "tokenizer" / "tokenizer.json").read_bytes()
    assert copied == (tiny_checkpoint / "processor" / "tokenizer.json").read_bytes()


def test_licence_files_are_copied_where_there_are_any(tiny_checkpoint: Path, tiny_set: Path, tmp_path: Path) -> None:
    assert not (tiny_set / "LICENSE").exists()
    licensed = tmp_path / "checkpoint"
    licensed.mkdir()
    for entry in tiny_checkpoint.iterdir():
        (licensed / entry.name).symlink_to(entry)
    (licensed / "LICENSE").write_text("for research", encoding="utf-8")
    export_host(licensed, tmp_path / "set")
    assert (tmp_path / "set" / "LICENSE").read_text(encoding="utf-8") == "for research"


@pytest.mark.parametrize(
    ("size", "grid"),
    [("256", (16, 16)), ("192x128", (8, 12)), ("128X192", (12, 8)), ("16x1024", (64, 1)), ("1024", (64, 64))],
)
def test_sizes_are_width_x_height_in_pixels(size: str, grid: tuple[int, int]) -> None:
    assert parse_size(size) == grid


@pytest.mark.parametrize(
    "size", ["", "x", "big", "256x", "256x256x256", "-256", "2.5", "²56", "250", "112", "1040", "0"]
)
def test_other_sizes_are_refused(size: str) -> None:
    with pytest.raises(ContractError, match=r"pixels"):
        parse_size(size)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parts": ["dit", "decoder"]}, r"unknown parts \['decoder'\]: choose among dit, encoder, vae, host, all"),
        ({"sizes": ["250"]}, "multiple of 16"),
        ({"dit_compute": "int8"}, "choose one of bf16, fp32"),
        ({"encoder_compute": "int8"}, "encoder compute is 'int8': choose one of fp32, r32, bf16"),
        ({"checkpoint": "elsewhere"}, "has no model_index.json"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_is_written(
    tiny_checkpoint: Path, tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ContractError, match=message):
        export_model_set(**{"checkpoint": tiny_checkpoint, "out": tmp_path / "set", **arguments})
    assert not (tmp_path / "set").exists()
