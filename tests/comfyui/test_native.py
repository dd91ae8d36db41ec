"""ComfyUI's own text encoder, samplers and decoders in a real server, on the Core AI graphs."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from coreai_rgba_image.host.latents import from_vae_space, initial_noise, pack, to_vae_space
from coreai_rgba_image.host.model_set import ModelSet
from coreai_rgba_image.host.pipeline import decode, encode_prompt
from coreai_rgba_image.host.pixels import to_rgba8

from .native import custom_sampler, k_sampler, native, saved
from .server import Client, Server, Workflow
from .test_execution import assert_works, loaded_latent
from .test_pictures import put_latent, sampled, saved_latents, saved_pictures
from .workflows import latents, node

pytestmark = pytest.mark.slow


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    """Latents in VAE space, compared in model space: what the order of additions may change."""
    np.testing.assert_allclose(from_vae_space(actual), from_vae_space(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("denoise", [1.0, 0.6])
def test_native_euler_on_the_exact_sigmas_gives_our_samplers_latents(
    client: Client, server: Server, tiny_model: ModelSet, denoise: float
) -> None:
    start = to_vae_space(np.random.default_rng(1).standard_normal((1, 64, 8, 12), np.float32))
    workflow = native() | custom_sampler(steps=4, denoise=denoise) | put_latent(server, "start", start)
    workflow["sampler"]["inputs"]["latent_image"] = ["loaded", 0]
    settings = {"latents": from_vae_space(start, tiny_model.latent_statistics), "denoise": denoise}
    expected = sampled(tiny_model, initial_noise(7, 8, 12), steps=4, **settings)
    assert_close(saved_latents(client, client.run(workflow)), expected)


def test_a_batch_from_an_empty_latent_gives_our_samplers_latents(client: Client, tiny_model: ModelSet) -> None:
    workflow = native(batch=2) | custom_sampler(latent=["start", 0], width=1024, height=1024)
    result = saved_latents(client, client.run(workflow))
    assert_close(result, sampled(tiny_model, initial_noise(7, 8, 12, 2)))
    workflow = native(batch=2) | latents(latent_image=["start", 0])
    np.testing.assert_array_equal(
        saved_latents(client, client.run(workflow)), sampled(tiny_model, initial_noise(7, 8, 12, 2))
    )


def test_guidance_with_texts_of_other_lengths_gives_our_samplers_latents(client: Client, tiny_model: ModelSet) -> None:
    guider = {
        "other": node("CLIPTextEncode", clip=["model", 1], text="blurry, (dull:1.3) and much longer than the other"),
        "guider": node("CFGGuider", model=["model", 0], positive=["text", 0], negative=["other", 0], cfg=3.0),
    }
    result = saved_latents(client, client.run(native() | custom_sampler(guider)))
    negative = encode_prompt(tiny_model, guider["other"]["inputs"]["text"])
    assert_close(result, sampled(tiny_model, initial_noise(7, 8, 12), cfg=3.0, negative=negative))


def test_every_sampler_and_every_scheduler_of_the_menu_runs(client: Client, server: Server) -> None:
    menus = client.object_info("KSampler")["input"]["required"]
    samplers, schedulers = menus["sampler_name"][0], menus["scheduler"][0]
    assert len(samplers) > 30
    assert len(schedulers) > 5
    pairs = [(sampler, "simple") for sampler in samplers] + [("euler", scheduler) for scheduler in schedulers]
    workflow = native(width=128, height=128)
    for sampler, scheduler in pairs:
        name = f"{sampler} {scheduler}"
        workflow |= k_sampler(name, sampler_name=sampler, scheduler=scheduler, steps=3)
        workflow[f"{name} latents"] = node("SaveLatent", samples=[name, 0], filename_prefix="menu")
    run = client.run(workflow)
    for sampler, scheduler in pairs:
        result = saved_latents(client, run, f"{sampler} {scheduler} latents")
        assert result.shape == (1, 64, 8, 8)
        assert np.isfinite(result).all()
    assert "memory leak" not in server.log  # which ComfyUI suspects if it lists a model under another handle


def test_native_decoders_draw_what_ours_draws(client: Client, tiny_model: ModelSet) -> None:
    workflow = native() | k_sampler() | saved("sampler")
    workflow |= {
        "whole": node("VAEDecode", samples=["sampler", 0], vae=["model", 2]),
        "tiled": node(
            "VAEDecodeTiled", samples=["sampler", 0], vae=["model", 2],
            tile_size=512, overlap=64, temporal_size=64, temporal_overlap=8,
        ),
        "ours": node("CoreAIRGBADecode", model="tiny", samples=["sampler", 0]),
        "save whole": node("SaveImage", images=["whole", 0], filename_prefix="whole"),
        "save tiled": node("SaveImage", images=["tiled", 0], filename_prefix="tiled"),
        "save ours": node("SaveImage", images=["ours", 2], filename_prefix="ours"),
    }  # fmt: skip
    run = client.run(workflow)
    [whole], [tiled], [ours] = (saved_pictures(client, run, f"save {name}") for name in ("whole", "tiled", "ours"))
    tokens = pack(from_vae_space(saved_latents(client, run), tiny_model.latent_statistics))
    [image] = decode(tiny_model, tokens, 8, 12)
    assert whole.mode == "RGBA"
    np.testing.assert_array_equal(np.asarray(whole), to_rgba8(image)[0])
    assert whole.tobytes() == tiled.tobytes() == ours.tobytes()


def test_a_size_without_a_decoder_is_drawn_from_tiles(client: Client, tiny_model: ModelSet) -> None:
    workflow = native(width=288, height=128) | k_sampler(steps=1) | saved("sampler")
    workflow |= {
        "tiled": node(
            "VAEDecodeTiled", samples=["sampler", 0], vae=["model", 2],
            tile_size=192, overlap=64, temporal_size=64, temporal_overlap=8,
        ),
        "ours": node("CoreAIRGBADecode", model="tiny", samples=["sampler", 0], tiled=True),
        "save tiled": node("SaveImage", images=["tiled", 0], filename_prefix="tiled"),
        "save ours": node("SaveImage", images=["ours", 2], filename_prefix="ours"),
    }  # fmt: skip
    run = client.run(workflow)
    [tiled], [ours] = (saved_pictures(client, run, f"save {name}") for name in ("tiled", "ours"))
    tokens = pack(from_vae_space(saved_latents(client, run), tiny_model.latent_statistics))
    [image] = decode(tiny_model, tokens, 8, 18, largest_tile=(12, 12))
    assert ours.size == (288, 128)
    np.testing.assert_array_equal(np.asarray(ours), to_rgba8(image)[0])
    assert ours.tobytes() == tiled.tobytes()


def write_adapter(path: Path) -> None:
    """The smallest T2I-Adapter, which ComfyUI loads as a ControlNet."""
    widths = [1, 1, 2, 2, 4, 4, 4, 4]
    tensors = {"conv_in.weight": torch.zeros(1, 64, 3, 3), "conv_in.bias": torch.zeros(1)}
    for index, (before, width) in enumerate(zip([1, *widths], widths, strict=False)):
        shapes = {"block1": (width, width, 3, 3), "block2": (width, width, 1, 1)}
        if before != width:
            shapes["in_conv"] = (width, before, 1, 1)
        for name, shape in shapes.items():
            tensors[f"body.{index}.{name}.weight"] = torch.zeros(shape)
            tensors[f"body.{index}.{name}.bias"] = torch.zeros(width)
    save_file(tensors, path)


def patched(class_type: str, **inputs: float | str | list[str | int]) -> Workflow:
    """A node between ``CoreAIModel`` and KSampler."""
    return k_sampler(model=["patch", 0]) | {"patch": node(class_type, model=["model", 0], **inputs)}


def refused_workflow(kind: str, server: Server) -> Workflow:
    match kind:
        case "a LoRA":
            folder = server.base / "models" / "loras"
            folder.mkdir(exist_ok=True)
            save_file({"diffusion_model.layer.lora_up.weight": torch.zeros(1)}, folder / "any.safetensors")
            return patched("LoraLoaderModelOnly", lora_name="any.safetensors", strength_model=1.0)
        case "a ControlNet":
            folder = server.base / "models" / "controlnet"
            folder.mkdir(exist_ok=True)
            write_adapter(folder / "any.safetensors")
            return k_sampler(positive=["applied", 0]) | {
                "controlnet": node("ControlNetLoader", control_net_name="any.safetensors"),
                "hint": node("EmptyImage", width=192, height=128, batch_size=1, color=0),
                "applied": node(
                    "ControlNetApplyAdvanced", positive=["text", 0], negative=["text", 0],
                    control_net=["controlnet", 0], image=["hint", 0],
                    strength=1.0, start_percent=0.0, end_percent=1.0,
                ),
            }  # fmt: skip
        case "an attention patch":
            return patched("PatchModelAddDownscale", block_number=3, downscale_factor=2.0, start_percent=0.0,
                end_percent=0.35, downscale_after_skip=True, downscale_method="bicubic", upscale_method="bicubic",
            )  # fmt: skip
        case "an attention patch made while sampling":
            return patched("PerturbedAttentionGuidance", scale=3.0)
        case "scaled attention":
            return patched("UNetSelfAttentionMultiply", q=1.1, k=1.0, v=1.0, out=1.0)
        case "a step cache of the network":
            return patched("EasyCache", reuse_threshold=0.2, start_percent=0.15, end_percent=0.95, verbose=False)
        case "a look into the network":
            return patched("FreeU_V2", b1=1.3, b2=1.4, s1=0.9, s2=0.2)
        case "a network to compile":
            return patched("TorchCompileModel", backend="inductor")
        case "a picture beside the prompt":
            return k_sampler() | {
                "picture": node("EmptyImage", width=192, height=128, batch_size=1, color=0),
                "text": node("TextEncodeQwenImageEdit", clip=["model", 1], prompt="a cat", image=["picture", 0]),
            }
        case "a prompt in two parts":
            size = {"width": 192, "height": 128, "crop_w": 0, "crop_h": 0, "target_width": 192, "target_height": 128}
            text = node("CLIPTextEncodeSDXL", clip=["model", 1], text_g="a cat", text_l="a cat", **size)
            return k_sampler() | {"text": text}
        case "another model's prompt":
            return k_sampler() | {"text": node("CoreAITextEncode", model="demo", text="a cat")}
        case "sigmas of another kind of model":
            return patched("ModelSamplingDiscrete", sampling="eps", zsnr=False)
        case "another layer of the text encoder":
            last = node("CLIPSetLastLayer", clip=["model", 1], stop_at_clip_layer=-2)
            return k_sampler() | {"last": last, "text": node("CLIPTextEncode", clip=["last", 0], text="a cat")}
        case "a picture to encode":
            return k_sampler(latent_image=["encoded", 0]) | {
                "picture": node("EmptyImage", width=192, height=128, batch_size=1, color=0),
                "encoded": node("VAEEncode", pixels=["picture", 0], vae=["model", 2]),
            }
        case "a reference latent":
            reference = node("ReferenceLatent", conditioning=["text", 0], latent=["start", 0])
            return k_sampler(positive=["reference", 0]) | {"reference": reference}
        case "another model's latent":
            return k_sampler(latent_image=["loaded", 0]) | loaded_latent(server, 16)
        case "another model's noise levels":
            sigmas = node("KarrasScheduler", steps=2, sigma_max=14.6, sigma_min=0.03, rho=7.0)
            return custom_sampler() | {"sigmas": sigmas}
        case "too small a picture":
            return k_sampler() | {"start": node("CoreAIEmptyLatent", model="tiny", width=64, height=64, batch_size=1)}
        case "too small a tile":
            tile = {"tile_size": 64, "overlap": 0, "temporal_size": 64, "temporal_overlap": 8}
            tiled = node("VAEDecodeTiled", samples=["start", 0], vae=["model", 2], **tile)
            return {"sampler": tiled}
    raise ValueError(kind)


@pytest.mark.parametrize(
    ("kind", "node_name", "message"),
    [
        ("a LoRA", "patch", "cannot take a LoRA.*coreai-rgba export --lora"),
        ("a ControlNet", "sampler", "positive conditioning asks for a ControlNet"),
        ("an attention patch", "patch", "cannot take patches of its attention or blocks"),
        ("an attention patch made while sampling", "sampler", "cannot take patches of its attention or blocks"),
        ("scaled attention", "patch", "reads or changes its weights"),
        ("a step cache of the network", "patch", "a wrapper of its network"),
        ("a look into the network", "patch", "looks into its network: remove that node"),
        ("a network to compile", "patch", "looks into its network: remove that node"),
        ("a picture beside the prompt", "text", "a prompt with images.*use CLIP Text Encode"),
        ("a prompt in two parts", "text", "several parts: use CLIP Text Encode"),
        (
            "another model's prompt",
            "sampler",
            r"shape \[1, \d+, 128\].*\[1, L, 64\].*Core AI Text Encode, or CLIP Text",
        ),
        ("sigmas of another kind of model", "patch", "flow-matching model.*ModelSamplingSD3"),
        ("another layer of the text encoder", "text", "another layer of its text encoder"),
        ("a picture to encode", "encoded", "it has a decoder only"),
        ("a reference latent", "sampler", "asks for reference latents"),
        ("another model's latent", "sampler", "16 channels.*64.*VAE Decode"),
        ("another model's noise levels", "sampler", "start at 14.6.*Core AI Sigmas"),
        ("too small a picture", "sampler", "64x64 pixels has 16 image tokens"),
        ("too small a tile", "sampler", "no tile is as small as 64x64.*192x128"),
    ],
)
def test_what_cannot_work_is_refused_where_it_is_connected(
    client: Client, server: Server, kind: str, node_name: str, message: str
) -> None:
    workflow = native() | refused_workflow(kind, server)
    output = node("SaveLatent", samples=["sampler", 0], filename_prefix="refused")
    if workflow["sampler"]["class_type"] == "VAEDecodeTiled":
        output = node("PreviewImage", images=["sampler", 0])
    run = client.run(workflow | {"output": output})
    assert run.outcome == "execution_error", run.messages[-1]
    [error] = run.told("execution_error")
    assert error["node_id"] == node_name
    assert re.search(message, error["exception_message"].replace("\n", " "))


def test_an_empty_latent_of_another_model_gives_the_size_or_is_refused(client: Client, comfyui: Path) -> None:
    """Newer versions of ComfyUI know the size it stands for; older ones would take it for one of twice that."""
    sizes_are_known = "downscale_ratio_spacial" in (comfyui / "comfy" / "sample.py").read_text(encoding="utf-8")
    workflow = native() | k_sampler() | saved("sampler")
    expected = saved_latents(client, client.run(workflow))
    run = client.run(workflow | {"start": node("EmptyLatentImage", width=192, height=128, batch_size=1)})
    if sizes_are_known:
        np.testing.assert_array_equal(saved_latents(client, run), expected)
    else:
        assert run.outcome == "execution_error"
        assert "twice the size: use Core AI Empty Latent" in run.error.replace("\n", " ")


def test_after_a_refusal_the_next_prompt_runs(client: Client) -> None:
    assert_works(client)


def test_a_native_run_is_interrupted_within_a_step(client: Client) -> None:
    workflow = native() | k_sampler(steps=200) | saved("sampler")
    prompt_id = client.submit(workflow)
    run = client.wait(
        prompt_id, lambda kind, data: client.interrupt(prompt_id) if kind == "progress" and data["value"] == 2 else None
    )
    assert run.outcome == "execution_interrupted"
    assert run.progress[-1] <= 4
    assert_works(client)
