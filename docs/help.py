"""Draws the pictures of the help pages with the model that ships: ``python docs/help.py [NAME ...]``, or all of them.

One of them needs a ComfyUI server, which is started for it as for the tests.
"""

import io
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import starmap
from pathlib import Path

import numpy as np
from draw import MODEL
from PIL import Image, ImageDraw, ImageFont

from coreai_rgba_image.host.bench.plot import COLOURS
from coreai_rgba_image.host.demo.sheet import Pixels, contact_sheet
from coreai_rgba_image.host.latents import initial_noise
from coreai_rgba_image.host.pipeline import decode, encode_prompt, generate, grid_of
from coreai_rgba_image.host.pixels import alpha_to_mask, to_rgba8
from coreai_rgba_image.host.preview import preview_picture
from coreai_rgba_image.host.sampler import Step
from coreai_rgba_image.host.sampling import Sampling, Settings

PAGES = Path(__file__).parents[1] / "web" / "docs"
STEPS = Settings(20)
RING = "a large orange ring sticker, transparent background"
DIAMOND = "a small purple diamond sticker, transparent background"
SHOWN_STEPS = (1, 3, 6, 10, 20)
WIDTH = 510
"""Of a picture, in pixels: twice that of the help panel as it opens, so labels are half as large there."""
LABEL, FONT, GREY = 32, ImageFont.load_default(22), (204, 204, 204)
ENLARGED = 64
"""How many times a difference of two pictures is enlarged."""
BANDS = (range(160, 224), range(288, 352))
"""Of 512 rows or columns those over which one tile of 256 gives way to the next."""


def sheet(rows: Sequence[Sequence[tuple[str, Pixels]]]) -> Image.Image:
    """RGBA pictures on a checkerboard, ``WIDTH`` pixels a row, the name of each above it."""
    parts = []
    for row in rows:
        side = WIDTH // len(row)
        part = Image.new("RGB", (side * len(row), side + LABEL), "white")
        part.paste(contact_sheet([[picture for _, picture in row]], side), (0, LABEL))
        pen = ImageDraw.Draw(part)
        for column, (label, _) in enumerate(row):
            pen.text(((column + 0.5) * side, LABEL / 2), label, fill="black", font=FONT, anchor="mm")
        parts.append(np.asarray(part))
    return Image.fromarray(np.vstack(parts))


def opaque(grey_or_rgb: np.ndarray) -> Pixels:
    """uint8 ``[H, W]`` or ``[H, W, 3]`` to ``[H, W, 4]``."""
    return np.asarray(Image.fromarray(grey_or_rgb).convert("RGBA"))


def sampled(text: str, width: int, height: int, seed: int) -> list[Step]:
    noise = initial_noise(seed, *grid_of(width, height))
    return list(Sampling(MODEL, encode_prompt(MODEL, text), noise, STEPS).run())


def decoded(tokens: np.ndarray, width: int, height: int, largest_tile: tuple[int, int] | None = None) -> Pixels:
    [image] = decode(MODEL, tokens, *grid_of(width, height), "all", largest_tile)
    return to_rgba8(image)[0]


def text_encode_prompts() -> Image.Image:
    thing = "a large {}green heart{}"
    prompts = {
        "on nothing": thing.format("", " sticker, transparent background"),
        "on a colour": thing.format("", " on a pink background"),
        "of glass": thing.format("glass ", " sticker, transparent background"),
        "no text": "",
    }
    pictures = [
        (name, generate(MODEL, text, 256, 256, STEPS, seed=0, keep_loaded="all")) for name, text in prompts.items()
    ]
    return sheet([pictures[:2], pictures[2:]])


def sampler_steps() -> Image.Image:
    steps = sampled("a large red star sticker, transparent background", 256, 256, 42)
    latents, previews = [], []
    for number in SHOWN_STEPS:
        step = steps[number - 1]
        latents.append((f"step {number}", decoded(step.x, 256, 256)))
        preview = preview_picture(step.denoised, *grid_of(256, 256), MODEL.preview_map, 256)
        previews.append(("preview", opaque(np.asarray(preview))))
    return sheet([latents, previews])


def decode_outputs() -> Image.Image:
    text = "a large glass blue ring sticker, transparent background"
    rgba = generate(MODEL, text, 256, 256, STEPS, seed=2, keep_loaded="all")
    [mask] = alpha_to_mask(rgba[None])
    grey = np.round(mask * 255).astype(np.uint8)
    return sheet([[("IMAGE", opaque(rgba[..., :3])), ("MASK", opaque(grey)), ("RGBA", rgba)]])


def whole_and_tiled(text: str, seed: int) -> tuple[Pixels, Pixels, np.ndarray]:
    """Of 512x512 pixels, and the difference; prints how large that is."""
    tokens = sampled(text, 512, 512, seed)[-1].x
    whole, tiled = (decoded(tokens, 512, 512, largest) for largest in (None, grid_of(256, 256)))
    difference = np.abs(tiled.astype(float) - whole)
    bands = [difference.take(pixels, axis).mean() for axis in (0, 1) for pixels in BANDS]
    psnr = 10 * np.log10(255**2 / (difference**2).mean())
    print(f"{text}: mean {difference.mean():.3f}, {max(bands):.3f} where tiles meet, PSNR {psnr:.1f} dB")
    return whole, tiled, difference


def decode_tiled() -> Image.Image:
    """Prints the figures on the page: of the picture, and of a shape with more edge."""
    whole_and_tiled(RING, 1)
    whole, tiled, difference = whole_and_tiled(DIAMOND, 0)
    enlarged = np.clip(difference.max(axis=2) * ENLARGED, 0, 255).astype(np.uint8)
    return sheet([[("whole", whole), ("tiles", tiled)], [(f"difference x {ENLARGED}", opaque(enlarged))]])


def model_samplers() -> Image.Image:
    """By ComfyUI's own nodes in a real server."""
    from coreai_rgba_image.tests.comfyui.get_comfyui import get_comfyui
    from coreai_rgba_image.tests.comfyui.native import k_sampler, native
    from coreai_rgba_image.tests.comfyui.server import Client, make_base, running_server
    from coreai_rgba_image.tests.comfyui.workflows import node, picture

    text, side, settings = "a large purple diamond sticker, transparent background", 256, {"steps": 20, "seed": 5}
    workflow = native(text, model="demo", width=side, height=side)
    workflow |= picture(text, model="demo", width=side, height=side, **settings)
    del workflow["save_latents"]
    names = {"save": "Core AI"}
    for name in ("euler", "dpmpp_2m", "res_multistep"):
        workflow |= k_sampler(name, sampler_name=name, **settings)
        workflow[f"{name} picture"] = node("VAEDecode", samples=[name, 0], vae=["model", 2])
        workflow[f"save {name}"] = node("SaveImage", images=[f"{name} picture", 0], filename_prefix="help")
        names[f"save {name}"] = name
    with tempfile.TemporaryDirectory() as folder, running_server(get_comfyui(), make_base(Path(folder) / "base")) as up:
        client = Client(up.address)
        run = client.run(workflow)
        files = {name: io.BytesIO(client.view(run.outputs(saved)[0])) for saved, name in names.items()}
        client.close()
    pictures = [(name, np.asarray(Image.open(file))) for name, file in files.items()]
    return sheet([pictures[:2], pictures[2:]])


def sigmas_schedules() -> Image.Image:
    picture = Image.new("RGB", (WIDTH, 420), "white")
    pen = ImageDraw.Draw(picture)
    left, right, top, bottom, steps = 50, WIDTH - 20, 15, 350, 20

    def place(step: float, sigma: float) -> tuple[float, float]:
        return left + (right - left) * step / steps, bottom - (bottom - top) * sigma

    for tick in range(6):
        step, sigma = tick * steps / 5, tick / 5
        pen.line((place(0, sigma), place(steps, sigma)), fill=GREY)
        pen.text((left - 10, place(0, sigma)[1]), f"{sigma:g}", fill="black", font=FONT, anchor="rm")
        pen.text((place(step, 0)[0], bottom + 10), f"{step:g}", fill="black", font=FONT, anchor="mt")
    pen.text(((left + right) / 2, bottom + 34), "step", fill="black", font=FONT, anchor="mt")
    lines = [(side, name) for side in (256, 1024) for name in ("model", "unstretched")]
    for number, (side, name) in enumerate(lines):
        levels = Settings(steps, schedule=name).schedule_for(MODEL, (side // 16) ** 2).sigmas
        pen.line(list(starmap(place, enumerate(levels.tolist()))), fill=COLOURS[number], width=3)
        pen.text(place(1, 0.32 - 0.08 * number), f"{side}x{side}, {name}", fill=COLOURS[number], font=FONT, anchor="lm")
    return picture


def empty_latent_sizes() -> Image.Image:
    canvas = Image.new("RGB", (WIDTH, LABEL + 512 // 3), "white")
    pen, left = ImageDraw.Draw(canvas), 0
    for width, height in ((256, 256), (384, 256), (512, 512)):
        rgba = generate(MODEL, DIAMOND, width, height, STEPS, seed=0, keep_loaded="all")
        canvas.paste(contact_sheet([[rgba]], max(width, height) // 3), (left, LABEL))
        pen.text((left, LABEL / 2), f"{width}x{height}", fill="black", font=FONT, anchor="lm")
        left += width // 3 + (WIDTH - 1152 // 3) // 2
    return canvas


PICTURES: Mapping[str, Callable[[], Image.Image]] = {
    "text-encode-prompts": text_encode_prompts,
    "sampler-steps": sampler_steps,
    "decode-outputs": decode_outputs,
    "decode-tiled": decode_tiled,
    "model-samplers": model_samplers,
    "sigmas-schedules": sigmas_schedules,
    "empty-latent-sizes": empty_latent_sizes,
}


def main(names: Sequence[str]) -> None:
    for name in names or PICTURES:
        picture = PICTURES[name]().quantize(256, dither=Image.Dither.NONE)
        picture.save(PAGES / f"{name}.png", optimize=True)
        print(f"{name}.png {(PAGES / f'{name}.png').stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
