"""How DDP sends gradients (`--dist.comm`): rounded to 16 bits, or as two thin factors (PowerSGD),
by torch's own hooks.

Rounding has no state. PowerSGD has: `error` is what this rank has not sent yet, and is added to its
next gradient; from the factors `q` the next step starts. All of it is in checkpoints. Its random
numbers are not: only new factors need them.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with the types.
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from drumline.base.errors import UsageError, log

EPSILON = 1e-12
"""Added to the norm of a factor's column: torch's default divides the zeros of a gradient of zeros
by zero."""


def rounding_hook(comm: str) -> Callable[[Any, dist.GradBucket], Future[Tensor]]:
    """DDP's hook to send gradients as `bf16` or `fp16`."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
        bf16_compress_hook,
        fp16_compress_hook,
    )

    hooks = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}
    if comm not in hooks:
        raise UsageError(
            f"ddp.wrap(comm={comm!r}) is not possible: it takes none, bf16 or fp16",
            next_step="for powersgd, whose state is saved with the run, use `drumline train --dist.comm powersgd`",
        )

    # DDP knows torch's bf16 hook by its name, and refuses it without NCCL. gloo sums bf16 as well.
    def reduce_rounded(group: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        return hooks[comm](group, bucket)

    return reduce_rounded


class PowerSGD:
    """PowerSGD for the gradients of a model, and its state. The buckets must be final before a step
    is compressed, since the state belongs to them: in a run that begins after `start` steps, in a
    resumed one after a paused pass."""

    def __init__(self, model: DistributedDataParallel, *, columns: int, start: int) -> None:
        """`columns`: of a factor. The first `start` steps are not compressed."""
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        self._names = {
            id(parameter): name.removeprefix("module.model.")
            for name, parameter in model.named_parameters()
        }

        for parameter in model.parameters():
            has_rows = parameter.dim() > 0 and parameter.numel() > 0
            if parameter.requires_grad and not has_rows:
                raise UsageError(
                    f"--dist.comm powersgd cannot send the gradient of {self._names[id(parameter)]}: it has no rows",
                    next_step="give the parameter the shape [1], or use --dist.comm bf16",
                )

        self._torch_state = PowerSGDState(
            None,
            matrix_approximation_rank=columns,
            start_powerSGD_iter=start,
            orthogonalization_epsilon=EPSILON,
        )

        self._buckets: dict[int, list[str]] = {}
        """The names of the parameters in each bucket that was compressed."""

        self._saved: dict[int, dict[str, Any]] = {}
        """What was loaded, until the first step takes it."""

        self._is_paused = False
        model.register_comm_hook(self, PowerSGD.reduce)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backward passes inside are not steps: they change no state."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Collective: the mean of a bucket of gradients."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        if self._is_paused:
            return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]

        compresses = self._torch_state.iter >= self._torch_state.start_powerSGD_iter
        if compresses and bucket.index() not in self._buckets:
            self._begin(bucket)

        reduced = powerSGD_hook.powerSGD_hook(self._torch_state, bucket)
        if compresses:
            # NCCL: torch's hook frees its copy of the gradients, which this stream owns, while
            # another stream still subtracts from it: the next gradient would overwrite it, and
            # `error` be wrong. The hook waits for the device anyway.
            # gloo: the second and third all-reduce are started in its two threads, which wait for
            # them there. With two buckets at once both threads would wait, and nobody send; and
            # ranks might start them in a different order.
            reduced.wait()

        return reduced

    def _begin(self, bucket: dist.GradBucket) -> None:
        """Before the first compressed step of a bucket: take its state from the checkpoint, if it
        fits. Buckets come in the order of their indices: from the first one that does not fit on,
        all start anew, with one warning."""
        index = bucket.index()
        buffer = bucket.buffer()
        names = [self._names[id(parameter)] for parameter in bucket.parameters()]
        self._buckets[index] = names
        saved = self._saved.pop(index, None)
        if saved is None:
            return

        error = saved["error"]
        columns = self._torch_state.matrix_approximation_rank

        is_same = error.shape == buffer.shape and error.dtype == buffer.dtype
        if is_same and (saved["parameters"], saved["columns"]) == (names, columns):
            for part, memory in self._memories():
                memory[index] = saved[part].to(buffer.device, copy=True)
            return

        self._saved.clear()
        if dist.get_rank() == 0:
            log.warning(
                "bucket %d of the gradients, or dist.powersgd_rank, changed since the checkpoint: PowerSGD starts anew "
                "from this bucket on, and what was not sent yet of these buckets is lost",
                index,
            )

    def _memories(self) -> Iterator[tuple[str, dict[int, Tensor]]]:
        """The tensors of torch's hook, by what they are and by bucket."""
        yield "error", self._torch_state.error_dict
        yield "p", self._torch_state.p_memory_dict
        yield "q", self._torch_state.q_memory_dict

    def state_dict(self) -> dict[int, Any]:
        """The state of this rank, sharing memory with it. Empty before the first compressed step.

        {0: {"parameters": ["fc.weight", "fc.bias"], "columns": 1, "error": ..., "p": ..., "q": ...}, ...}
        """
        columns = self._torch_state.matrix_approximation_rank
        return {
            index: {
                "parameters": names,
                "columns": columns,
                **{part: memory[index] for part, memory in self._memories()},
            }
            for index, names in self._buckets.items()
        }

    def load_state_dict(self, state: Mapping[int, Any], *, step: int) -> None:
        """Continue after this step, with the state of this rank, or an empty one. Where `start` is
        later now, it is not used."""
        names = ("parameters", "columns", "error", "p", "q")
        saved = {index: {name: bucket[name] for name in names} for index, bucket in state.items()}
        self._torch_state.iter = step
        self._saved = saved if step >= self._torch_state.start_powerSGD_iter else {}
