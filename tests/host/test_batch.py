"""Batch files: what each job becomes, which jobs share a run, and what is refused before anything runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from coreai_rgba_image.host.batch import Job, grouped, read_jobs
from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.denoiser import Shortcuts
from coreai_rgba_image.host.sampling import Settings

DEFAULT = Job("a star", Path("any.png"), settings=Settings(20, shortcuts=Shortcuts(step_cache=0.2)))


def jobs_of(folder: Path, content: object) -> list[Job]:
    path = folder / "jobs.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return read_jobs(path, DEFAULT)


def test_a_job_is_the_default_with_what_differs(tmp_path: Path) -> None:
    output = str(tmp_path / "ring.webp")
    sigmas = [1.0, 0.5]
    [plain, other] = jobs_of(
        tmp_path,
        [
            {"output": str(tmp_path / "1.png")},
            {"output": output, "prompt": "a ring", "seed": 7, "width": 384, "height": 256, "negative_prompt": "blurry",
             "cfg": 2, "steps": 9, "sampler": "dpmpp_2m", "sigmas": sigmas, "text_reuse": "off"},
        ],
    )  # fmt: skip
    assert plain == Job("a star", tmp_path / "1.png", settings=DEFAULT.settings)
    assert other.size == (384, 256)
    assert (other.prompt, other.output, other.seed) == ("a ring", Path(output), 7)
    shortcuts = Shortcuts("off", step_cache=0.2)
    assert other.settings == Settings(9, 2, "dpmpp_2m", sigmas=(1.0, 0.5), shortcuts=shortcuts)


def test_jobs_that_differ_in_seed_and_output_alone_share_a_run(tmp_path: Path) -> None:
    wanted = [("a star", 1, 20), ("a ring", 1, 20), ("a star", 2, 20), ("a star", 3, 10)]
    jobs = jobs_of(
        tmp_path,
        [
            {"prompt": prompt, "seed": seed, "steps": steps, "output": f"{tmp_path}/{index}.png"}
            for index, (prompt, seed, steps) in enumerate(wanted)
        ],
    )
    assert grouped(jobs) == [[jobs[0], jobs[2]], [jobs[1]], [jobs[3]]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "cannot read jobs from"),
        ({}, "must hold a list of objects"),
        ([], "must hold a list of objects"),
        ([1], "must hold a list of objects"),
        ([{"seed": 1}], "job 1 of .* has no output"),
        ([{"output": "a.png"}, {"output": "b.png", "seeds": 1}], "job 2 of .*'seeds' is no setting of a picture"),
        ([{"output": "a.png", "seed": "1"}], "seed is '1', which is of the wrong type"),
        ([{"output": "a.png", "steps": True}], "steps is True, which is of the wrong type"),
        ([{"output": "a.png", "steps": 0}], "job 1 of .*steps is 0"),
        ([{"output": "a.png", "sigmas": ["x"]}], "sigmas are"),
        ([{"output": "a.png", "step_cache": 0.9}], "share of re-used steps is 0.9"),
        ([{"output": "a.jpg"}], "would lose the transparency"),
        ([{"output": "nowhere/a.png"}], "nowhere is not a folder"),
        ([{"output": "a.png", "width": 256}], "give both width and height"),
        ([{"output": "a.png"}, {"output": "./a.png"}], "job 2 of .* writes a.png, as another job does"),
    ],
)
def test_a_wrong_file_is_refused_with_the_jobs_number(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        jobs_of(tmp_path, content)
