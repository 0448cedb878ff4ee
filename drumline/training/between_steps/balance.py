"""`--data.balance auto`: shards of the global batch by the measured speed of each rank, so that
ranks on different GPUs finish a step together.

The sizes are the same on every rank and in the checkpoint. Ranks are measured over some steps, and
the sizes change only if steps become noticeably faster by it:

    step 5      the first steps, which load libraries and choose kernels, are over: every step is timed
    step 16     ranks exchange their times and choose the sizes from step 17 on; after a large change again at once
    step 500    the same again, and so on

A rank's own time is DDP's: all ranks finish a step together, so the heartbeat cannot tell work from
waiting in a backward pass. DDP times forward and backward up to the last gradient. What workers
made ahead with the old sizes is dropped: a batch follows from the cursor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from statistics import median
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from drumline.base.errors import UsageError
from drumline.base.text import by_rank
from drumline.data.loader import IndexedLoader
from drumline.data.sharding import Sharding, spans_of_full_batch
from drumline.rank.collectives import gather_json
from drumline.rank.torch_internals import ddp_measurements, measure_ddp_every
from drumline.training.between_steps.non_finite import NonFinite
from drumline.training.between_steps.throughput import ExposedCommunication
from drumline.training.run_context import Action, RunContext, RunFacts
from drumline.training.steps.compilation import FIRST_STEPS

WARM_UP_STEPS = 5
TIMED_STEPS = 10
EVERY_STEPS = 500
MIN_GAIN = 0.05
"""How much faster steps must become for the sizes to change."""

LARGE_GAIN = 0.2
"""A part of a step's time does not depend on its samples, so sizes that change this much are
measured again at once."""

MOST_OF_FREE_MEMORY = 0.8
NAMED_SIZES = 8
_USUAL_RATE = {"cpu": ExposedCommunication.EVERY, "cuda": 100}
"""DDP measures one of so many steps."""


class Balance(Action):
    """Measures the ranks, and changes the sizes of their shards."""

    name = "balance"
    interval = 0

    def __init__(
        self,
        context: RunContext,
        non_finite: NonFinite,
        ranks: Sequence[Mapping[str, Any]],
        facts: RunFacts,
        saved: RunFacts | None,
    ) -> None:
        """`ranks`: the host and the device of each; `facts`: what checkpoints record; `saved`: what
        the one that the run resumes from has recorded."""
        loader = context.job.loader
        if not isinstance(loader, IndexedLoader):
            raise UsageError(
                f"--data.balance auto needs samples by index, and {loader.name} is a stream",
                next_step="leave it out, or give a dataset with __len__ and __getitem__",
            )

        assert isinstance(context.job.applied, DistributedDataParallel)
        self._job = context.job
        self._applied = context.job.applied
        self._loader = loader
        self._non_finite = non_finite
        self._ranks = [[rank["host"], rank["device"]] for rank in ranks]
        self._facts = facts

        self._began_at: int | None = None
        self._times: list[float] = []
        self._spent_s: dict[str, float] = {}

        sizes = even_sizes(loader.sharding)
        measure_at = context.progress.step + WARM_UP_STEPS

        record = (saved or {}).get("balance")
        if (
            record is not None
            and len(record["ranks"]) == len(ranks)
            and sum(record["sizes"]) == sum(sizes)
        ):
            sizes = tuple(record["sizes"])
            # On different machines the old sizes are wrong.
            if record["ranks"] == self._ranks:
                measure_at = max(measure_at, record["measure_at"])

        self._use(sizes, measure_at)

    def due(self, step: int) -> bool:
        """Whether this step is timed."""
        return step >= self._measure_at

    def run(self, context: RunContext) -> None:
        """Collective in the last of the timed steps."""
        step = context.progress.step
        if self._began_at is None:
            self._began_at = step
            self._spent_s = self._job.heartbeat.spent_s()
            measure_ddp_every(self._applied, 1)
        elif step > self._began_at + 1:
            # When a step begins, DDP publishes the times of the one before.
            measured = ddp_measurements(self._applied)
            forward_ns = measured.get("forward_compute_time", 0)
            backward_ns = measured.get("backward_compute_time", 0)

            self._times.append((forward_ns + backward_ns) / 1e9)

        if len(self._times) == TIMED_STEPS:
            self._decide(context)

            self._began_at = None
            self._times = []
            measure_ddp_every(self._applied, _USUAL_RATE[self._job.ddp.device.type])

    def _decide(self, context: RunContext) -> None:
        """Collective: exchange the times, and choose the sizes of the following steps."""
        step = context.progress.step
        before = self._sizes

        measurements = gather_json([self._own_s(step), self._most()])
        seconds = [rank_s for rank_s, _ in measurements]
        most = [limit for _, limit in measurements]

        sharding = self._loader.sharding
        smallest = min(
            sharding.min_shard_size * sharding.accumulate,
            sharding.batch_size // sharding.world_size,
        )

        sizes = choose_sizes(before, seconds, smallest=smallest, most=most)
        gain = speed_up(before, sizes, seconds)
        later = step - step % EVERY_STEPS + EVERY_STEPS

        if gain < MIN_GAIN:
            self._use(before, later)
            return

        # It makes the batches of steps before this one again, if they were not finite.
        self._non_finite.read()
        self._use(sizes, step + 1 if gain >= LARGE_GAIN else later)
        if (marks := self._job.ddp.connection.compilations) is not None:
            # torch compiles for the new sizes
            marks.is_usual_until = step + FIRST_STEPS

        context.reporter.report(
            "note",
            step=step,
            message=self._describe(step, gain),
            shard_sizes=sizes,
        )

    def _use(self, sizes: tuple[int, ...], measure_at: int) -> None:
        """Use these sizes from the next step on, and record them for the checkpoint:

        {"sizes": [40, 24], "measure_at": 500, "ranks": [["gpu-01", "H100"], ["gpu-02", "A100"]]}
        """
        even = even_sizes(self._loader.sharding)
        if sizes != (self._loader.sharding.sizes or even):
            self._loader.resize_shards(None if sizes == even else sizes)

        self._sizes = sizes
        self._measure_at = measure_at
        self._facts["balance"] = {
            "sizes": list(sizes),
            "measure_at": measure_at,
            "ranks": self._ranks,
        }

    def _own_s(self, step: int) -> float:
        """This rank's own time in a step, without waiting for others; 0: unknown. Its parts are the
        forward and backward passes, the batches and the optimizer."""
        assert self._began_at is not None
        sharding = self._loader.sharding

        # DDP measures the last micro-batch.
        compute_s = median(self._times) * len(spans_of_full_batch(sharding))
        if not compute_s:
            return 0.0

        now = self._job.heartbeat.spent_s()
        steps = step - self._began_at
        data_s = (now["data"] - self._spent_s["data"]) / steps
        optimizer_s = (now["optimizer"] - self._spent_s["optimizer"]) / steps

        # there batches are made while the device computes
        if self._job.ddp.device.type == "cuda":
            return max(compute_s, data_s)

        return compute_s + data_s + optimizer_s

    def _most(self) -> int:
        """The most samples that this rank may get."""
        sharding = self._loader.sharding
        device = self._job.ddp.device
        if device.type != "cuda" or sharding.micro_batch_size is not None:
            return sharding.batch_size

        used = torch.cuda.max_memory_reserved(device)
        free = torch.cuda.mem_get_info(device)[0]
        size = self._sizes[sharding.rank]

        return size + int(size * MOST_OF_FREE_MEMORY * free / max(used, 1))

    def _describe(self, step: int, gain: float) -> str:
        """The note about new sizes."""
        sizes = self._sizes
        sharding = self._loader.sharding
        listed = f"{min(sizes)} to {max(sizes)}"

        if len(set(sizes)) <= NAMED_SIZES:
            listed = by_rank(sizes, [host for host, _ in self._ranks])

        text = f"ranks get samples by their speed from step {step + 1} on ({listed}): steps should be {gain:.0%} faster"
        if sharding.micro_batch_size is not None:
            return text

        return f"{text}; --train.micro_batch_size limits how many a rank holds at once"


def even_sizes(sharding: Sharding) -> tuple[int, ...]:
    """How many samples of a full batch each rank gets if all have the same speed: 22, 21, 21 of
    64."""
    size, extra = divmod(sharding.batch_size, sharding.world_size)
    return tuple(size + (rank < extra) for rank in range(sharding.world_size))


def speed_up(before: Sequence[int], sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """How much faster steps become with `sizes`, as a fraction, if each rank took so many seconds
    with those before; 0 if DDP has not measured, as on some kinds of devices. With 32 and 32
    samples in 1 s and 3 s, and now 48 and 16, it is 3 / 1.5 - 1 = 1."""
    expected = [time * new / old for time, new, old in zip(seconds, sizes, before, strict=True)]
    return max(seconds) / max(expected) - 1 if all(seconds) else 0.0


def choose_sizes(
    sizes: Sequence[int], seconds: Sequence[float], *, smallest: int, most: Sequence[int]
) -> tuple[int, ...]:
    """The sizes with which the slowest rank takes the least time, if a rank's time is proportional
    to its samples. `seconds`: what each rank took for `sizes`; `most`: the limit of each rank,
    which is not below `sizes`. With 32 and 32 samples in 1 s and 3 s they are 48 and 16."""
    per_sample = [time / size for time, size in zip(seconds, sizes, strict=True)]
    chosen = [min(smallest, limit) for limit in most]

    # The rank that is done first with one more sample gets it.
    queue = [
        (per_sample[rank] * (size + 1), rank)
        for rank, size in enumerate(chosen)
        if size < most[rank]
    ]
    heapify(queue)

    for _ in range(sum(sizes) - sum(chosen)):
        _, rank = heappop(queue)
        chosen[rank] += 1
        if chosen[rank] < most[rank]:
            heappush(queue, (per_sample[rank] * (chosen[rank] + 1), rank))

    return tuple(chosen)
