"""``coreai-rgba bench``, ``oracle``, ``gates`` and ``host-constants``: what tells whether all is as it should be."""

import argparse
from pathlib import Path

from ..contract import PIXELS_PER_TOKEN, ContractError
from .sets import choose

ORACLE_OPTIONS = (
    "prompt", "steps", "seed", "negative_prompt", "cfg", "dtype", "embed_perturb", "perturb_seed",
)  # fmt: skip
"""Options of ``oracle`` that are part of a request as they are."""


def bench_command(options: argparse.Namespace) -> int:
    from ..bench.command import bench, default_sections, model_sections

    sections = default_sections() if options.model is None else model_sections(choose(options.model))
    return bench(sections, options.json, options.plot)


def oracle_command(options: argparse.Namespace) -> None:
    from ..export.model_set import parse_size
    from ..gates.oracle import Request, capture

    height, width = (tokens * PIXELS_PER_TOKEN for tokens in parse_size(options.size))
    settings = {name: value for name in ORACLE_OPTIONS if (value := getattr(options, name)) is not None}
    capture(Request(options.checkpoint, width=width, height=height, **settings), options.out)
    print(options.out.resolve())


def gates_command(options: argparse.Namespace) -> int:
    from ..gates.captured import Oracle
    from ..gates.command import Options, gates, gates_of_the_embedded_model

    chosen = Options(
        options.embed_perturb, range(options.perturb_seed, options.perturb_seed + options.perturb_runs), options.json,
        options.html,
    )  # fmt: skip
    if (options.oracle is None) != (options.set is None):
        raise ContractError("--oracle and --set belong together: give both, or neither for the model that ships")
    if options.oracle is None:
        return gates_of_the_embedded_model(chosen)
    in_bf16 = None if options.bf16_oracle is None else Oracle(options.bf16_oracle)
    return gates(Oracle(options.oracle), in_bf16, choose(options.set), chosen)


def host_constants_command(options: argparse.Namespace) -> int:
    from ..gates.constants import host_constants

    checks = host_constants(options.out, options.checkpoint)
    print(*checks, sep="\n")
    return int(any(check.same is False for check in checks))


def add_oracle(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    oracle = commands.add_parser(
        "oracle", help="run diffusers' own pipeline and record every number on the way; goes on where it stopped"
    )
    oracle.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="layout of Qwen/Qwen-Image-2.1")
    oracle.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    oracle.add_argument("--size", default="256", metavar="SIZE", help="256 or 384x256, multiples of 32 (default: 256)")
    oracle.add_argument("--steps", type=int, metavar="N", help="denoising steps (default: 40)")
    oracle.add_argument("--prompt", metavar="T", help="default: a red apple on a wooden table, studio lighting")
    oracle.add_argument("--seed", type=int, metavar="N", help="seed of the noise (default: 1234)")
    oracle.add_argument("--negative-prompt", metavar="T", help="what to move away from; needs --cfg above 1")
    oracle.add_argument("--cfg", type=float, metavar="F", help="guidance; 1 is off (default: 1)")
    oracle.add_argument("--dtype", choices=("fp32", "bf16"), help="precision of the networks (default: fp32)")
    oracle.add_argument(
        "--embed-perturb", type=float, metavar="REL", help="multiply the prompt's embeddings by 1 + REL * N(0, 1)"
    )
    oracle.add_argument("--perturb-seed", type=int, metavar="K", help="seed of that N(0, 1) (default: 0)")
    oracle.set_defaults(run=oracle_command)


def add_gates(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    gates = commands.add_parser(
        "gates", help="compare a model set with the reference implementation, number by number; 1 if a bar is missed"
    )
    gates.add_argument("--oracle", type=Path, metavar="FOLDER", help="what coreai-rgba oracle made of the checkpoint")
    gates.add_argument("--set", metavar="SET", help="the model set exported from it (default: the one that ships)")
    gates.add_argument("--bf16-oracle", type=Path, metavar="FOLDER", help="the same request in bf16, for comparison")
    gates.add_argument(
        "--embed-perturb", type=float, default=1e-5, metavar="REL",
        help="see how far pictures move when embeddings change by this share; 0 is off (default: 1e-5)",
    )  # fmt: skip
    gates.add_argument("--perturb-seed", type=int, default=0, metavar="K", help="first seed of that (default: 0)")
    gates.add_argument("--perturb-runs", type=int, default=5, metavar="N", help="how many seeds (default: 5)")
    gates.add_argument("--json", type=Path, metavar="FILE.json")
    gates.add_argument("--html", type=Path, metavar="FILE.html", help="a page with pictures and curves, in one file")
    gates.set_defaults(run=gates_command)


def add_host_constants(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    constants = commands.add_parser(
        "host-constants", help="RoPE tables and scheduler.json for hosts in other languages, checked bit for bit"
    )
    constants.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    constants.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="take its scheduler settings (default: those of Qwen-Image-2.1)"
    )
    constants.set_defaults(run=host_constants_command)


def add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    bench = commands.add_parser("bench", help="what reuse and the fast modes save, as ratios with their bars")
    bench.add_argument("--model", metavar="SET", help="measure a model set (default: a random DiT, and the demo set)")
    bench.add_argument("--json", type=Path, metavar="FILE.json")
    bench.add_argument("--plot", type=Path, metavar="FILE.png")
    bench.set_defaults(run=bench_command)
