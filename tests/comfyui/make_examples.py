"""Makes ``example_workflows/NAME.json`` and ``NAME.jpg`` of ``example_workflows/api/NAME.json``: ``make examples``.

The values are those of the API format. The page of ComfyUI loads them, they are laid out and get a note,
and the page saves them; the thumbnail is what a server draws. ComfyUI's own, oldest frontend does this,
so that newer ones load it too.
"""

import io
import json
import math
import re
import shutil
import sys
import tempfile
import uuid
from pathlib import Path

import numpy as np
from PIL import Image

from coreai_rgba_image.host.demo.sheet import contact_sheet

from .browser import Tab, running_browser
from .get_comfyui import get_comfyui
from .server import REPOSITORY, Client, Workflow, make_base, running_server

EXAMPLES = REPOSITORY / "example_workflows"
PHOTO = "example.png"
"""The picture that every ComfyUI has in its input folder."""

NOTES = {
    "sticker": """A sticker with real transparency.

*RGBA* of **Core AI RGBA Decode** goes to *Save Image*, which writes a transparent PNG. Look at it on other
backgrounds in the decode node.

`demo` is the small model that comes with the pack: it draws shapes like *a small blue ring sticker, transparent
background*. The help of each node (the *i* above a selected one) says more.""",
    "sticker_on_photo": """A sticker on a picture of yours.

Choose the picture in *Load Image*, and the place with `x` and `y` of *ImageCompositeMasked*.

*MASK* is 1 where the sticker is transparent. *ImageCompositeMasked* wants 1 where the sticker is to be seen, so
*InvertMask* stands between.""",
    "four_seeds": """Four pictures of one prompt, each with noise of its own.

`batch_size` of *Empty Latent Image* is how many. They share one load of the model and one encoding of the
prompt. To draw one of them again, put *LatentFromBatch* between *Empty Latent Image* and the sampler.""",
    "negative_prompt": """What not to draw.

With this seed and no negative prompt the heart is orange red. Away from *a large red heart* it is pink.

The negative prompt counts only where `cfg` is not 1, and then each step takes twice as long.""",
    "image_to_image": """A picture drawn again.

The second sampler starts from the latents of the first, with another prompt. `denoise` says how much it may
change: at 0.85 the circle becomes blue and stays where it is.

The model has no VAE encoder, so this starts from latents of this model, not from a file. *Save Latent* and
*Load Latent* keep them.""",
    "native_sampler": """ComfyUI's own sampler on the Core AI graphs.

*Core AI Model* gives MODEL, CLIP and VAE, *Core AI Sigmas* the model's own noise levels. Any sampler of
*KSamplerSelect* runs; so does *KSampler* with *Core AI Empty Latent*.""",
}
"""What each example says beside its nodes."""

LAY_OUT = """
async ([workflow, id, text]) => {
    await app.loadApiJson(workflow, id);
    const depth = node => 1 + Math.max(-1, ...(node.inputs ?? []).map((_, slot) => {
        const before = node.getInputNode(slot);
        return before ? depth(before) : -1;
    }));
    const columns = [];
    for (const node of [...app.graph.nodes].sort((a, b) => a.id - b.id)) (columns[depth(node)] ??= []).push(node);
    const note = LiteGraph.createNode("MarkdownNote");
    app.graph.add(note);
    note.widgets[0].value = text;
    note.size = [360, 300];
    note.pos = [-400, 60];
    let left = 40;
    for (const column of columns) {
        let top = 60;
        for (const node of column) {
            const [width, height] = node.computeSize();
            const isText = /TextEncode/.test(node.type);
            node.setSize([Math.max(width, 320), isText ? 200 : /SaveImage|LoadImage/.test(node.type) ? 380 : height]);
            node.pos = [left, top];
            top += node.size[1] + 60;
            const control = node.widgets?.find(widget => widget.name === "control_after_generate");
            if (control) control.value = "fixed";
        }
        left += Math.max(...column.map(node => node.size[0])) + 50;
    }
    const saved = app.graph.serialize();
    delete saved.extra.ds; // so that a page fits it into its window
    return JSON.parse(JSON.stringify({...saved, id}));
}
"""


def examples() -> dict[str, Workflow]:
    """Each example in API format."""
    return {path.stem: json.loads(path.read_text("utf-8")) for path in sorted((EXAMPLES / "api").glob("*.json"))}


def put_photo(comfyui: Path, base: Path) -> None:
    """What a ComfyUI with a base folder of its own lacks."""
    shutil.copy(comfyui / "input" / PHOTO, base / "input" / PHOTO)


def draw(client: Client, workflow: Workflow) -> list[Image.Image]:
    """The pictures that an example saves, in the order of its nodes. Raises ``RuntimeError`` if it fails."""
    run = client.run(workflow)
    if run.outcome != "execution_success":
        raise RuntimeError(str(run.messages[-1]))
    saves = [name for name, part in workflow.items() if part["class_type"] == "SaveImage"]
    return [Image.open(io.BytesIO(client.view(output))) for name in saves for output in run.outputs(name)]


def thumbnail(pictures: list[Image.Image]) -> Image.Image:
    """The pictures on a checkerboard, in a square of them as far as there are enough."""
    columns = math.ceil(math.sqrt(len(pictures)))
    pixels = [np.asarray(picture.convert("RGBA")) for picture in pictures]
    rows = [pixels[start : start + columns] for start in range(0, len(pixels), columns)]
    return contact_sheet(rows, side=256)


def save_thumbnail(picture: Image.Image, path: Path | io.BytesIO) -> None:
    picture.save(path, "JPEG", quality=95, subsampling=0)


def main(names: list[str]) -> None:
    comfyui = get_comfyui()
    with tempfile.TemporaryDirectory(prefix="coreai-rgba-examples-") as folder:
        base = make_base(Path(folder) / "base")
        put_photo(comfyui, base)
        with running_server(comfyui, base) as server, running_browser() as browser:
            tab, client = Tab(browser, server.address), Client(server.address)
            for name, workflow in examples().items():
                if names and name not in names:
                    continue
                identity = str(uuid.uuid5(uuid.NAMESPACE_URL, f"coreai-rgba-image/{name}"))
                note = re.sub("(?<!\n)\n(?!\n)", " ", NOTES[name])  # a line for a paragraph
                saved = tab.evaluate(LAY_OUT, [workflow, identity, note])
                (EXAMPLES / f"{name}.json").write_text(json.dumps(saved, indent=2) + "\n", encoding="utf-8")
                save_thumbnail(thumbnail(draw(client, workflow)), EXAMPLES / f"{name}.jpg")
                print(name)
            client.close()


if __name__ == "__main__":
    main(sys.argv[1:])
