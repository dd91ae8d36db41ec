"""What a user meets in a real server besides pictures: errors, progress, interruption, caching, new models."""

import os
import re
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from .server import Client, RefusedError, Server, Workflow
from .workflows import Link, latents, node, picture

pytestmark = pytest.mark.slow

OUR_NODES = {"prompt", "sampler", "decode"}


def assert_works(client: Client) -> None:
    """Whatever went before, the next prompt runs; a new text each time, so that none of it is cached."""
    run = client.run(latents(f"after {time.monotonic()}", steps=1))
    assert run.outcome == "execution_success", run.messages[-1]


def test_a_value_outside_its_range_is_refused_at_once(client: Client) -> None:
    with pytest.raises(RefusedError) as refused:
        client.submit(picture(steps=0))
    [error] = refused.value.node_errors["sampler"]["errors"]
    assert error["type"] == "value_smaller_than_min"
    assert error["extra_info"]["input_name"] == "steps"
    assert_works(client)


def test_an_input_left_open_is_refused_at_once(client: Client) -> None:
    workflow = picture()
    del workflow["sampler"]["inputs"]["positive"]
    with pytest.raises(RefusedError) as refused:
        client.submit(workflow)
    assert refused.value.node_errors["sampler"]["errors"][0]["type"] == "required_input_missing"


def loaded_latent(server: Server, channels: int) -> Workflow:
    """A LoadLatent node ``loaded`` with ones of so many channels."""
    file = f"ones{channels}.latent"
    content = {"latent_tensor": np.ones((1, channels, 8, 12), np.float32), "latent_format_version_0": np.zeros(0, "f4")}
    save_file(content, server.base / "input" / file)
    return {"loaded": node("LoadLatent", latent=file)}


def changed_prompt(class_type: str, **inputs: Any) -> Workflow:
    """A node between the prompt and the sampler."""
    workflow = picture()
    workflow["sampler"]["inputs"]["positive"] = ["changed", 0]
    return workflow | {"changed": node(class_type, **inputs)}


def wrong_workflow(kind: str, server: Server) -> Workflow:
    text: Link = ["prompt", 0]
    match kind:
        case "another model's latent to sample":
            return latents(latent_image=["loaded", 0]) | loaded_latent(server, 16)
        case "another model's latent to decode":
            workflow = picture() | loaded_latent(server, 16)
            workflow["decode"]["inputs"]["samples"] = ["loaded", 0]
            return workflow
        case "two frames":
            video = node("EmptyHunyuanLatentVideo", width=192, height=128, length=5, batch_size=1)
            return latents() | {"empty": video}
        case "a long prompt":
            return picture("word " * 600)
        case "a size without a VAE":
            return picture(width=320, height=320, steps=1)
        case "an odd size":
            return picture(width=200, height=128)
        case "too large":
            return picture(width=2048, height=2048)
        case "guidance without a negative":
            return picture(cfg=4.0)
        case "another model's prompt":
            return picture() | {"prompt": node("CoreAITextEncode", model="demo", text="a cat")}
        case "a reference latent":
            return changed_prompt("ReferenceLatent", conditioning=text, latent=["empty", 0])
        case "an area":
            return changed_prompt("ConditioningSetArea", conditioning=text, width=64, height=64, x=0, y=0, strength=1.0)
        case "two prompts combined":
            return changed_prompt("ConditioningCombine", conditioning_1=text, conditioning_2=text)
    raise ValueError(kind)


@pytest.mark.parametrize(
    ("kind", "messages"),
    [
        ("another model's latent to sample", ["16 channels", "64", "sample them with KSampler"]),
        ("another model's latent to decode", ["16 channels", "64", "decode them with VAE Decode"]),
        ("two frames", ["single pictures"]),
        ("a long prompt", ["512", "cut|shorten|remove"]),
        (
            "a size without a VAE",
            ["320x320", "192x128", "'tiled' in Core AI RGBA Decode", "coreai-rgba export .*vae --size 320x320"],
        ),
        ("an odd size", ["200", "multiple"]),
        ("too large", ["2048x2048", "4096"]),
        ("guidance without a negative", ["cfg is 4", "set cfg to 1"]),
        ("another model's prompt", [r"\[1, \d+, 128\]", r"\[1, L, 64\]", "Core AI Text Encode"]),
        ("a reference latent", ["positive conditioning asks for reference latents"]),
        ("an area", ["an area", "KSampler on Core AI Model"]),
        ("two prompts combined", ["do not combine"]),
    ],
)
def test_a_wrong_input_is_explained_and_the_next_prompt_runs(
    client: Client, server: Server, kind: str, messages: list[str]
) -> None:
    run = client.run(wrong_workflow(kind, server))
    assert run.outcome == "execution_error"
    for message in messages:
        assert re.search(message, run.error)
    assert_works(client)


def test_an_unknown_model_set_is_refused_with_the_known_ones(client: Client) -> None:
    """When the node runs, in versions that do not check menus of this kind before."""
    try:
        message = client.run(picture(model="../tiny")).error
    except RefusedError as refused:
        message = str(refused)
    assert "../tiny" in message
    assert "'tiny'" in message
    assert_works(client)


def test_an_interrupted_run_stops_within_one_step(client: Client) -> None:
    """By prompt id, while it samples; the prompt that waits behind it runs."""
    prompt_id = client.submit(latents("interrupted", width=512, height=512, steps=500))
    waiting = client.submit(latents("waits behind", steps=1))
    ticks: list[float] = []
    asked: list[float] = []

    def interrupt_after_four(kind: str, data: dict[str, Any]) -> None:
        if kind == "progress":
            ticks.append(time.monotonic())
        if len(ticks) == 4 and not asked:
            client.interrupt(prompt_id)
            asked.append(time.monotonic())

    run = client.wait(prompt_id, interrupt_after_four)
    seconds_after = time.monotonic() - asked[0]
    step = statistics.median(np.diff(ticks[:4]))
    assert run.outcome == "execution_interrupted"
    assert seconds_after < 2 * step + 1
    assert run.progress[-1] <= 6  # the step under way, and one that ended while the request was on its way
    assert client.wait(waiting).outcome == "execution_success"
    assert_works(client)


def test_the_same_prompt_again_is_cached(client: Client) -> None:
    workflow = picture("the same again")
    assert client.run(workflow).cached.isdisjoint(OUR_NODES)
    again = client.run(workflow)
    assert again.cached >= OUR_NODES
    assert again.outcome == "execution_success"


def test_another_seed_encodes_nothing_again(client: Client) -> None:
    client.run(picture("another seed", seed=1))
    again = client.run(picture("another seed", seed=2))
    assert again.cached & OUR_NODES == {"prompt"}


@pytest.fixture
def own_set(server: Server, tiny_set: Path) -> Iterator[Path]:
    """A copy of the tiny set, put into a running server as ``mine/changing``."""
    path = Path(shutil.copytree(tiny_set, server.model_sets / "mine" / "changing"))
    yield path
    shutil.rmtree(path)


def test_a_new_model_set_is_in_the_menu_without_a_restart(client: Client, own_set: Path) -> None:
    for name in ("CoreAITextEncode", "CoreAIDiTSampler", "CoreAIRGBADecode"):
        assert menu(client, name) == ["mine/changing", "on-a-disk", "tiny", "demo"]
    assert client.run(picture(model="mine/changing")).outcome == "execution_success"


def menu(client: Client, name: str) -> list[str]:
    kind, options = client.object_info(name)["input"]["required"]["model"]
    return options["options"] if kind == "COMBO" else kind


def test_a_model_set_on_an_extra_path_is_used(client: Client) -> None:
    """``extra_model_paths.yaml`` names its folder; the pack's own entry must not push it out."""
    assert client.run(latents("from a disk", model="on-a-disk", steps=1)).outcome == "execution_success"


def test_a_changed_model_set_runs_again(client: Client, own_set: Path) -> None:
    workflow = picture("changes", model="mine/changing", steps=1)
    client.run(workflow)
    assert client.run(workflow).cached >= OUR_NODES
    [bundle] = own_set.glob("*dit*.aimodel")
    os.utime(bundle / "main.mlirb")
    assert client.run(workflow).cached.isdisjoint(OUR_NODES)


def test_a_bundle_damaged_while_the_server_runs_is_an_error_and_no_crash(client: Client, own_set: Path) -> None:
    workflow = picture("damaged", model="mine/changing", steps=1)
    assert client.run(workflow).outcome == "execution_success"
    [bundle] = own_set.glob("*dit*.aimodel")
    program = bundle / "main.mlirb"
    os.truncate(program, program.stat().st_size // 2)
    run = client.run(workflow)
    assert run.outcome == "execution_error"
    assert "damaged" in run.error
    assert_works(client)
