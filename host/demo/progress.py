"""What both training stages share: a resumable state file, averaged weights, a learning-rate curve."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

AVERAGE_DECAY = 0.998


def learning_rate_scale(step: int, steps: int, warmup: int = 100) -> float:
    """Linear warm-up, constant for two fifths of the way, then half a cosine down to a hundredth."""
    if step < warmup:
        return (step + 1) / warmup
    progress = max(0.0, (step / steps - 0.4) / 0.6)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


@dataclass
class AveragedWeights:
    """Exponential moving average of a module's parameters: what is shipped, as it is smoother than the last step."""

    values: dict[str, Tensor]

    @classmethod
    def of(cls, module: nn.Module) -> "AveragedWeights":
        return cls({name: value.detach().clone() for name, value in module.state_dict().items()})

    @torch.no_grad()
    def update(self, module: nn.Module, step: int) -> None:
        decay = min(AVERAGE_DECAY, (step + 1) / (step + 10))  # forgets the random start quickly
        for name, value in module.state_dict().items():
            self.values[name].lerp_(value, 1 - decay)


@dataclass
class TrainingState:
    """Everything a stage needs to go on after an interruption, in one file replaced atomically."""

    path: Path
    module: nn.Module
    optimizers: list[torch.optim.Optimizer]
    average: AveragedWeights
    step: int = 0
    losses: list[float] = field(default_factory=list)

    def save(self) -> None:
        content: dict[str, Any] = {
            "module": self.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "average": self.average.values,
            "step": self.step,
            "losses": self.losses,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".unfinished")
        torch.save(content, unfinished)
        unfinished.replace(self.path)

    def load_if_there(self) -> None:
        if not self.path.exists():
            return
        content = torch.load(self.path, weights_only=True)
        self.module.load_state_dict(content["module"])
        for optimizer, saved in zip(self.optimizers, content["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.average.values = content["average"]
        self.step, self.losses = content["step"], content["losses"]

    def advance(self, loss: float, scale: float, base_rates: list[float]) -> None:
        """One optimiser step with the gradients at hand, at ``scale`` times the base learning rates."""
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        for optimizer, rate in zip(self.optimizers, base_rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.average.update(self.module, self.step)
        self.losses.append(loss)
        self.step += 1
