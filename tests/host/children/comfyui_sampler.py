"""``python comfyui_sampler.py COMFYUI NAME IN.npz OUT.npz``: one of ComfyUI's samplers on each schedule of IN.

IN holds the tokens ``x`` and one array of sigmas under each other name; OUT holds the result under
the same names. The velocity is that of ``rotating`` in ``test_sampler.py``.
"""

import sys

import numpy as np

comfyui, name, source, target = sys.argv[1:]
sys.argv[1:] = ["--cpu"]
sys.path.insert(0, comfyui)

import comfy.options  # noqa: E402
import torch  # noqa: E402

comfy.options.enable_args_parsing()

from comfy.k_diffusion import sampling  # noqa: E402


def denoised(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    velocity = np.tanh(np.roll(x.numpy(), 1, axis=2)) * (1 + sigma.numpy())
    return x - sigma * torch.from_numpy(velocity)


given = dict(np.load(source))
start = torch.from_numpy(given.pop("x"))
made = {
    key: getattr(sampling, name)(denoised, start, torch.from_numpy(sigmas), disable=True).numpy()
    for key, sigmas in given.items()
}
np.savez(target, **made)
