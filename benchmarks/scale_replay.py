"""A rank of `benchmarks.scale_grid`: replays a step with timed waits under real DDP and gloo, as
ordered by files.

Orders are `FOLDER/NNNN.order`, results `FOLDER/NNNN.result`, both JSON; an order without hosts ends
the rank. Waits take no CPU, so eight hosts fit on two cores.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

LAYERS = 24
FORWARD = 0.30
BACKWARD = 0.62
OPTIMIZER = 0.08
"""What part of a step's compute each takes."""
WARM_UP = 2  # DDP makes its buckets again after the first step
POLL_S = 0.05


class TimedWait(torch.autograd.Function):
    """A layer that waits instead of computing, forwards and backwards."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, layer: TimedLayer) -> Tensor:
        ctx.layer = layer
        time.sleep(FORWARD / LAYERS * layer.step_s)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(BACKWARD / LAYERS * ctx.layer.step_s)
        return outputs[0], ctx.layer.gradient, None


class TimedLayer(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.gradient = torch.ones(size)
        self.step_s = 0.0

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = TimedWait.apply(value, self.weight, self)
        return result


class Replay:
    """A model of some bytes, whose steps compute for some seconds, with a spread."""

    def __init__(self, order: dict[str, Any], group: dist.ProcessGroup) -> None:
        total = order["model_bytes"] // 4
        layers = [TimedLayer(total * (1 + number % 3) // (2 * LAYERS)) for number in range(LAYERS)]
        self.layers = layers
        self.compute_s = order["compute_s"]
        self.draw = random.Random(1000 * order["number"] + dist.get_rank())
        self.model = DistributedDataParallel(
            nn.Sequential(*layers),
            process_group=group,
            bucket_cap_mb=order["cap_mb"],
            gradient_as_bucket_view=True,
        )
        self.begin = 0.0

    def step(self) -> float:
        """One step; its length."""
        length = self.compute_s * (1 + 0.1 * self.draw.random() ** 2)
        for layer in self.layers:
            layer.step_s = length
        self.begin = time.perf_counter()
        self.model.zero_grad(set_to_none=True)
        torch.autograd.backward(self.model(torch.ones(1, requires_grad=True)))
        time.sleep(OPTIMIZER * length)
        return time.perf_counter() - self.begin


def replayed(order: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    """The lengths of the steps, as on a real job: from the start of one to that of the next."""
    replay = Replay(order, group)
    for _ in range(WARM_UP):
        replay.step()
    dist.barrier(group)
    begin = time.perf_counter()
    steps = [replay.step() for _ in range(order["steps"])]
    return {"mean_s": (time.perf_counter() - begin) / len(steps), "step_s": steps}


def profiled(order: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    """A single rank: the length of each step, and when each bucket was ready, in seconds from the
    start of a step."""
    replay = Replay(order, group)
    ready: list[tuple[float, int]] = []

    def record(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        ready.append((time.perf_counter() - replay.begin, bucket.buffer().nbytes))
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    record.__annotations__.clear()  # DDP compares them with types, and they are text
    replay.model.register_comm_hook(None, record)
    for _ in range(WARM_UP):
        replay.step()
    ready.clear()
    steps = [replay.step() for _ in range(order["steps"])]
    count = len(ready) // len(steps)
    buckets = [ready[number::count] for number in range(count)]
    return {
        "compute_s": steps,
        "buckets": [
            (times[0][1], sum(ready_s for ready_s, _ in times) / len(times)) for times in buckets
        ],
    }


def calibrated(order: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    """(bytes, seconds) of plain all-reduces, as `drumline doctor --collectives` measures them."""
    return {"points": list(_points(order, group))}


def _points(order: dict[str, Any], group: dist.ProcessGroup) -> Iterator[tuple[int, float]]:
    for num_bytes in order["sizes"]:
        tensor = torch.zeros(num_bytes // 4)
        seconds = []
        for _ in range(order["rounds"] + 1):
            dist.barrier(group)
            begin = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            seconds.append(time.perf_counter() - begin)
        yield num_bytes, median(seconds[1:])


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # noqa: DL021 - it ends by os._exit
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    sizes = [size for size in (1, 2, 3, 4, 6, 8) if size <= world_size]
    groups = {size: dist.new_group(list(range(size)), backend="gloo") for size in sizes}
    kinds = {"cell": replayed, "profile": profiled, "calibrate": calibrated}
    number = 0
    while True:
        path = folder / f"{number:04d}.order"
        while not path.exists():
            time.sleep(POLL_S)
        order = json.loads(path.read_text())
        if not order["hosts"]:
            break
        if rank < order["hosts"]:
            result = kinds[order["kind"]](order, groups[order["hosts"]])
            if rank == 0:
                part = folder / f"{number:04d}.part"
                part.write_text(json.dumps(result))
                part.replace(folder / f"{number:04d}.result")
        number += 1
    os._exit(0)  # groups of different ranks end in any order


if __name__ == "__main__":
    main(Path(sys.argv[1]))
