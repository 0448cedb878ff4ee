"""A rank of `benchmarks.scale_grid`: replays a step with timed waits under real DDP and gloo, as
ordered by files (scale_ranks.py).

Orders are `FOLDER/NNNN.order`, results `FOLDER/NNNN.result`, both JSON; the rank ends with its
host. Waits take no CPU, so eight hosts fit on two cores.
"""

from __future__ import annotations

import functools
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from drumline.base.rank_environment import Topology
from drumline.rank.profiled.step_observation import CpuWait
from drumline.rank.profiled.trace_capture import TraceCapture
from drumline.runs.profile_files import PROFILE_FOLDER, JobFacts

LAYERS = 24
FORWARD = 0.30
BACKWARD = 0.62
OPTIMIZER = 0.08
"""What part of a step's compute each takes."""
HOST_PART = 0.7
"""Of a step that is bound by the host: Python before the forward pass."""
MATRIX = 192
TRACED_FROM = 6
"""Steps before those of a profile: some are timed without the profiler."""
WARM_UP = 2  # DDP makes its buckets again after the first step
POLL_S = 0.05


@functools.cache
def multiply_s() -> float:
    """How long this rank takes to multiply two matrices, at best: measured once, so that each step
    has the same work."""
    matrix = torch.ones(MATRIX, MATRIX)
    times = []
    for _ in range(200):
        begin = time.perf_counter()
        torch.mm(matrix, matrix)
        times.append(time.perf_counter() - begin)
    return min(times)


class Multiplications:
    """Work that takes some seconds on a core of its own. What is less than one multiplication is
    left to the next call, so that many small layers take as long together as one large one."""

    def __init__(self) -> None:
        self._matrix = torch.ones(MATRIX, MATRIX)
        self._left_s = 0.0

    def __call__(self, seconds: float) -> None:
        self._left_s += seconds
        while self._left_s >= multiply_s():
            torch.mm(self._matrix, self._matrix)
            self._left_s -= multiply_s()


class TimedWait(torch.autograd.Function):
    """A layer that waits instead of computing, forwards and backwards."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, layer: TimedLayer, *weights: Tensor) -> Tensor:
        ctx.layer = layer
        layer.work(FORWARD * layer.part * layer.step_s)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        ctx.layer.work(BACKWARD * ctx.layer.part * ctx.layer.step_s)
        return outputs[0], None, *ctx.layer.gradients


class TimedLayer(nn.Module):
    """`sizes`: the elements of its tensors; `part`: what part of a step's time it takes."""

    def __init__(self, sizes: Sequence[int], part: float, work: Callable[[float], None]) -> None:
        super().__init__()
        self.part = part
        self.work = work
        self.weights = nn.ParameterList(torch.zeros(size) for size in sizes)
        self.gradients = [torch.ones(size) for size in sizes]
        self.step_s = 0.0

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = TimedWait.apply(value, self, *self.weights)
        return result


class Replay:
    """A model of some tensors, whose steps take some seconds, with a spread. `work` of an order:
    `wait`, `compute` or `host`, as in scale_cells.py."""

    def __init__(self, order: dict[str, Any], group: dist.ProcessGroup) -> None:
        sizes = [num_bytes // 4 for num_bytes in order["tensor_bytes"]]
        kind = order.get("work", "wait")
        work: Callable[[float], None] = Multiplications() if kind == "compute" else time.sleep
        # Of many tensors a layer has several, as in real models: each layer costs Python.
        count = math.ceil(len(sizes) / LAYERS)
        groups = [sizes[first : first + count] for first in range(0, len(sizes), count)]
        self.layers = [TimedLayer(group, 1 / len(groups), work) for group in groups]
        self.work = work
        self.host_part = HOST_PART if kind == "host" else 0.0
        self.compute_s = order["compute_s"]
        self.draw = random.Random(1000 * order["number"] + dist.get_rank())
        self.model = DistributedDataParallel(
            nn.Sequential(*self.layers),
            process_group=group,
            bucket_cap_mb=order["cap_mb"],
            gradient_as_bucket_view=True,
        )
        self.begin = 0.0

    def step(self) -> float:
        """One step; its length."""
        whole = self.compute_s * (1 + 0.1 * self.draw.random() ** 2)
        length = whole * (1 - self.host_part)
        for layer in self.layers:
            layer.step_s = length
        self.begin = time.perf_counter()
        time.sleep(whole * self.host_part)
        self.model.zero_grad(set_to_none=True)
        torch.autograd.backward(self.model(torch.ones(1)))
        self.work(OPTIMIZER * length)
        return time.perf_counter() - self.begin


def replayed(order: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    """The lengths of the steps, as on a real job: from the start of one to that of the next; and
    how long this rank used a CPU and waited for one in a step."""
    replay = Replay(order, group)
    for _ in range(WARM_UP):
        replay.step()
    dist.barrier(group)
    cpu_wait = CpuWait()
    begin_cpu_s = time.process_time()
    begin = time.perf_counter()
    steps = [replay.step() for _ in range(order["steps"])]
    mean_s = (time.perf_counter() - begin) / len(steps)
    cpu_s = (time.process_time() - begin_cpu_s) / len(steps)
    cpu_use = cpu_wait.stop()
    wait_s = cpu_use.waited_s / len(steps) if cpu_use else 0.0
    return {"mean_s": mean_s, "step_s": steps, "cpu_s": cpu_s, "cpu_wait_s": wait_s}


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


class ReplayedHost(Topology):
    """One rank on a host of its own."""

    @property
    def host(self) -> str:
        return f"host-{self.rank}"


def traced(order: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    """Profiles steps as `drumline profile` does: each rank writes its trace into the order's
    folder."""
    replay = Replay(order, group)
    last = TRACED_FROM + order["steps"]
    capture = TraceCapture(
        range(TRACED_FROM, last),
        Path(order["folder"]) / PROFILE_FOLDER,
        ReplayedHost(rank=dist.get_rank(), world_size=order["hosts"]),
        JobFacts(task="replay"),
    )
    capture.modules = [replay.model]
    for number in range(last):
        capture.begin_step(number)
        replay.step()
    capture.finish()
    dist.barrier(group)
    return {}


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


def set_priority(nice: int) -> None:
    """Linux divides the cores between sessions first (autogroup), so that a nice value has an
    effect only within one: this rank gets a session of its own, with this value."""
    os.setsid()
    path = Path("/proc/self/autogroup")
    if path.exists():
        path.write_text(str(nice))
    os.nice(nice)


def main(folder: Path, nice: int) -> None:
    set_priority(nice)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    groups = {
        size: dist.new_group(list(range(size)), backend="gloo") for size in range(1, world_size + 1)
    }
    kinds = {"cell": replayed, "profile": profiled, "trace": traced, "calibrate": calibrated}
    number = 0
    while True:
        path = folder / f"{number:04d}.order"
        while not path.exists():
            time.sleep(POLL_S)
        order = json.loads(path.read_text())
        if rank < order["hosts"]:
            result = kinds[order["kind"]](order, groups[order["hosts"]])
            if rank == 0:
                part = folder / f"{number:04d}.part"
                part.write_text(json.dumps(result))
                part.replace(folder / f"{number:04d}.result")
        number += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
