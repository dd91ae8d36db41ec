"""Trains the model that ships: ``python -m coreai_rgba_image.host.demo.train FOLDER``.

Two stages, each resumable: run the same command again after an interruption. ``FOLDER`` gets
``checkpoint/`` (bf16, in the layout of Qwen/Qwen-Image-2.1), ``samples.png``, ``losses.png`` and
``scores.json``; what is needed to resume stays in ``FOLDER/state``.
"""

import argparse
import json
import logging
import random
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from ..prompt import PromptTokenizer
from .breakages import (
    Graphs,
    Question,
    answers,
    breakages,
    checkpoint_statistics,
    checkpoint_tokenizer,
    picture,
    torch_graphs,
)
from .captions import random_scene
from .checkpoint import demo_tokenizer, finished_vae, write_demo_checkpoint
from .measure import BARS, Scores, score
from .networks import DemoModel
from .sheet import contact_sheet, plot_losses, sheet_scenes
from .train_dit import cached_latents, train_dit
from .train_vae import train_vae

logger = logging.getLogger(__name__)

VAE_STEPS = 1200
DIT_STEPS = 9400
SEED = 0
QUESTIONS = 200
BROKEN_QUESTIONS = 48
FIRST_QUESTION_SEED = 1_000_000


def held_out_questions(count: int, height: int = 16, width: int = 16, seed: int = 1) -> list[Question]:
    """Captions that training never saw, each with a seed of its own."""
    rng = random.Random(seed)
    return [
        Question(random_scene(rng, held_out=True), FIRST_QUESTION_SEED + index, height, width) for index in range(count)
    ]


def train(folder: Path, vae_steps: int = VAE_STEPS, dit_steps: int = DIT_STEPS, seed: int = SEED) -> Path:
    """Train both stages and write the checkpoint; returns its folder."""
    state_folder = folder / "state"
    state_folder.mkdir(parents=True, exist_ok=True)
    vae_state = train_vae(state_folder, vae_steps, seed)
    vae = finished_vae(vae_state.average.values, seed)
    sets = cached_latents(state_folder, vae, seed)
    tokenizer = demo_tokenizer(seed)
    vocabulary = tokenizer.get_vocab_size()
    dit_state = train_dit(state_folder, dit_steps, seed, sets, PromptTokenizer(tokenizer), vocabulary)
    model = DemoModel(vocabulary, seed)
    model.load_state_dict(dit_state.average.values)
    checkpoint = folder / "checkpoint"
    write_demo_checkpoint(checkpoint, vae, model, tokenizer)
    plot_losses({"autoencoder": vae_state.losses, "text encoder and DiT": dit_state.losses}, folder / "losses.png")
    return checkpoint


def write_samples(graphs: Graphs, tokenizer: PromptTokenizer, path: Path) -> None:
    rows = [
        [picture(graphs, tokenizer, scene.caption, seed=index, height=16, width=16) for scene in row]
        for index, row in enumerate(tqdm(sheet_scenes(), desc="sample sheet"))
    ]
    contact_sheet(rows).save(path)


def measure(checkpoint: Path, count: int, broken_count: int) -> dict[str, Scores]:
    """Scores of the checkpoint in torch at 256x256, and of each breakage."""
    graphs, tokenizer = torch_graphs(checkpoint), checkpoint_tokenizer(checkpoint)
    questions = held_out_questions(count)
    variants = {"as it is": (graphs, questions)}
    few = questions[:broken_count]
    for name, broken in breakages(graphs, tokenizer, checkpoint_statistics(checkpoint), few).items():
        variants[name] = (broken, few)
    scores = {}
    for name, (variant, asked) in variants.items():
        results = answers(variant, tokenizer, tqdm(asked, desc=name))
        scores[name] = score([(question.scene, verdict) for question, verdict in results])
    return scores


def report(scores: dict[str, Scores]) -> list[str]:
    """The scores as lines of a table, with the bars that are missed."""
    lines = []
    for name, values in scores.items():
        numbers = ", ".join(f"{key} {value:.3f}" for key, value in asdict(values).items() if key != "pictures")
        lines.append(f"{name} ({values.pictures} pictures): {numbers}")
    whole = asdict(scores["as it is"])
    lines += [f"MISSED: {key} is {whole[key]:.3f}, the bar {bar}" for key, bar in BARS.items() if not whole[key] >= bar]
    for name, values in scores.items():
        if name != "as it is" and values.all_right >= 0.5:
            lines.append(f"MISSED: with {name}, {values.all_right:.3f} of the pictures are still right")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vae-steps", type=int, default=VAE_STEPS)
    parser.add_argument("--dit-steps", type=int, default=DIT_STEPS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--threads", type=int, default=None, help="torch's threads; as many as it likes if not given")
    parser.add_argument("--questions", type=int, default=QUESTIONS, help="pictures to judge in the end; 0 for none")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    checkpoint = train(arguments.folder, arguments.vae_steps, arguments.dit_steps, arguments.seed)
    write_samples(torch_graphs(checkpoint), checkpoint_tokenizer(checkpoint), arguments.folder / "samples.png")
    if arguments.questions:
        scores = measure(checkpoint, arguments.questions, min(arguments.questions, BROKEN_QUESTIONS))
        content = {name: asdict(values) for name, values in scores.items()}
        (arguments.folder / "scores.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
        logger.info("\n".join(report(scores)))


if __name__ == "__main__":
    main()
