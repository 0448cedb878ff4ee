"""What a step changes before it updates the weights, kept at its beginning: a step that fails
because a node is lost is repeated by the others, and must have changed nothing
(`--dist.on_lost_node continue`).

The weights, the optimizer and the loss scaler change in the update alone, and no rank begins that
before all have their gradients. What belongs to the loop (its progress, the ledger, hooks) changes
after the step.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from drumline.metrics.meters import Meter
from drumline.parallel.wrap import LiveBuffers


class StepState:
    """Buffers, modules' extra state, the sums of the next log line, and the state of random
    numbers."""

    def __init__(self, model: nn.Module, meter: Meter, device: torch.device) -> None:
        self._device = device
        self._buffers = LiveBuffers(model)
        self._modules = [module for module in model.modules() if _has_extra_state(module)]
        self._meter = meter
        self._buffer_copies: list[Tensor] | None = None
        self._extra_states: list[Any] = []
        self._sums = self._meter.keep()
        self._host_weight = 0.0
        self._torch_rng = torch.get_rng_state()
        self._gpu_rng: Tensor | None = None
        self._numpy_rng: Any = None
        self._python_rng: Any = None

    def keep(self) -> None:
        """A step begins. Without waiting for the device; the copies are in the memory of the last
        ones."""
        self._buffer_copies = self._buffers.keep(self._buffer_copies)
        self._extra_states = [_copy_of(module.get_extra_state()) for module in self._modules]
        self._sums = self._meter.keep()
        self._host_weight = self._meter.host_weight
        self._torch_rng = torch.get_rng_state()
        if self._device.type == "cuda":
            self._gpu_rng = torch.cuda.get_rng_state(self._device)
        self._numpy_rng = np.random.get_state()
        self._python_rng = random.getstate()

    def restore(self) -> None:
        """The step has failed: all is as it was at `keep`."""
        assert self._buffer_copies is not None, "keep comes first"
        self._buffers.put_back(self._buffer_copies)
        for module, extra_state in zip(self._modules, self._extra_states, strict=True):
            module.set_extra_state(extra_state)
        self._meter.put_back(self._sums, self._host_weight)
        torch.set_rng_state(self._torch_rng)
        if self._gpu_rng is not None:
            torch.cuda.set_rng_state(self._gpu_rng, self._device)
        np.random.set_state(self._numpy_rng)
        random.setstate(self._python_rng)


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _copy_of(extra_state: Any) -> Any:
    return extra_state.clone() if isinstance(extra_state, Tensor) else extra_state
