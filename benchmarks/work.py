"""The work that all ways of a table do: one model with its loss, one optimizer, one source of
batches.

All have the same: the model from drumline.training.tasks.built_in with the same seed, a fused optimizer
without weight decay for biases and norms, bf16 autocast on CUDA, channels_last for images, TF32 and
cuDNN's benchmark on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.config.schema import Config
from drumline.rank.determinism import seed_shared
from drumline.training.job.evaluation_job import make_autocast
from drumline.training.tasks.built_in import build_model

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Work:
    """What is to be done, and where."""

    config: Config
    facts: Mapping[str, int]
    """What the model needs to know about the data: channels and classes, or the vocabulary."""
    device: torch.device
    batches: Callable[[], Iterable[Batch]]
    """An epoch of them; or without end."""
    is_compiled: bool = False
    network: Callable[[], nn.Module] | None = None
    """Makes a network for images; None: that of the settings."""

    @property
    def clip_norm(self) -> float | None:
        return self.config.optim.clip_norm

    def module(self) -> nn.Module:
        """The model with its loss, on the device."""
        seed_shared(self.config.train.seed)
        has_images = self.network is not None or self.config.model.name == "mini_resnet"
        network = (self.network or self._from_settings)().to(self.device)
        return WithLoss(network, channels_last=has_images and self.device.type == "cuda")

    def _from_settings(self) -> nn.Module:
        settings = dict(vars(self.config.model))
        name = settings.pop("name")
        options = settings.pop("options")
        return build_model(name, facts=self.facts, settings=settings, options=options)

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return plain_optimizer(module, self.config)

    def autocast(self) -> Any:
        return make_autocast(self.config.train.precision, self.device)

    def on_device(self, batch: Batch) -> Batch:
        inputs, targets = batch
        return inputs.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)


class WithLoss(nn.Module):
    """A model and its cross entropy in one module, so that a compiler sees both."""

    def __init__(self, network: nn.Module, *, channels_last: bool) -> None:
        super().__init__()
        self.network = network
        if channels_last:
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._channels_last = channels_last

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self._channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        scores = self.network(inputs)
        return functional.cross_entropy(scores.flatten(0, -2), targets.flatten())


def plain_optimizer(module: nn.Module, config: Config) -> torch.optim.Optimizer:
    """As in a careful hand-written script."""
    optim = config.optim
    groups = [
        {
            "params": [p for p in module.parameters() if p.ndim > 1],
            "weight_decay": optim.weight_decay,
        },
        {"params": [p for p in module.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if optim.name == "adamw":
        return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
    return torch.optim.SGD(
        groups, lr=optim.lr, momentum=optim.momentum, nesterov=optim.nesterov, fused=True
    )


class Endless:
    """The same few batches over and over."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        while True:
            yield from self._batches


def fast_arithmetic() -> None:
    """For everyone in the process."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
