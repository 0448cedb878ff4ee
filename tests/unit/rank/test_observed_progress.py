"""What the thread of the progress monitor reads of a model that another thread trains."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from drumline.training.manager import DDPManager
from tests.jobs import NO_SIDECAR

THIS_THREAD = threading.current_thread()


class GuardedParameter(nn.Parameter):
    """Only the thread that trains may read its gradient, which autograd replaces without the
    GIL."""

    @property
    def grad(self) -> Any:
        assert threading.current_thread() is THIS_THREAD, (
            "another thread reads a gradient (tests/gradient_race.py)"
        )
        return nn.Parameter.grad.__get__(self)

    @grad.setter
    def grad(self, value: Any) -> None:
        nn.Parameter.grad.__set__(self, value)


def test_passes_and_updates_are_seen_and_no_gradient_is_read() -> None:
    layer = nn.Linear(3, 2)
    layer.weight = GuardedParameter(layer.weight.detach())
    with DDPManager(device="cpu", watch=NO_SIDECAR) as ddp, ThreadPoolExecutor(1) as other_thread:
        model = ddp.wrap(layer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def look() -> Hashable:
            return other_thread.submit(ddp._versions).result()

        looks = [look()]
        for _ in range(2):  # gradients are accumulated
            model(torch.randn(4, 3)).sum().backward()
            looks.append(look())
        optimizer.step()
        looks.append(look())
        assert len(set(looks)) == len(looks)
        assert look() == looks[-1]
