"""One captured step: a CUDA graph of all that a step gives the device to do, and the memory that it reads from."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from drumline.data.loader import MicroBatch, Step

CAPTURING = ("graph", "compiled_graph", "auto")
"""The values of `train.step` that capture a graph, or may do so."""


def leave_default_stream(device: torch.device) -> None:
    """Make a new stream current: CUDA cannot capture the default stream, and a step is captured on the stream that it
    was warmed up on. Call it before the model is built: autograd remembers each parameter's first stream."""
    if torch.cuda.current_stream(device) == torch.cuda.default_stream(device):
        own = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        own.wait_stream(torch.cuda.default_stream(device))
        torch.cuda.set_stream(own)


class Shape:
    """What a step is like, as far as a graph depends on it; and its tensors, in order."""

    def __init__(self, step: Step, micro_batches: Sequence[MicroBatch]) -> None:
        flat = [pytree.tree_flatten(micro.data) for micro in micro_batches]
        self.leaves = [leaf for leaves, _ in flat for leaf in leaves]
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.nesting = [nesting for _, nesting in flat]
        self.key: Hashable = (
            step.plan.global_size,
            tuple((micro.size, micro.is_last) for micro in micro_batches),
            tuple(map(repr, self.nesting)),
            tuple(
                (leaf.dtype, leaf.shape, leaf.stride(), leaf.requires_grad) if isinstance(leaf, Tensor) else repr(leaf)
                for leaf in self.leaves
            ),
        )

    def __str__(self) -> str:
        return ", ".join(str(list(tensor.shape)) for tensor in self.tensors[:4])


class CapturedStep:
    """A graph that can be replayed on other batches of the same shape."""

    def __init__(
        self, run: Callable[[Step], None], step: Step, micro_batches: Sequence[MicroBatch], shape: Shape, pool: Any
    ) -> None:
        """Capture what `run` does with such a step; nothing is computed yet. Raises what CUDA refuses."""
        self.host_weight = 0.0
        """What a step of it adds to the meter on the host."""
        self.grad_norm: Tensor | None = None
        self._inputs = [tensor.clone() for tensor in shape.tensors]
        inputs = iter(self._inputs)
        leaves = iter([next(inputs) if isinstance(leaf, Tensor) else leaf for leaf in shape.leaves])
        batches = [
            pytree.tree_unflatten([next(leaves) for _ in range(nesting.num_leaves)], nesting)
            for nesting in shape.nesting
        ]
        fixed = [micro._replace(data=data) for micro, data in zip(micro_batches, batches, strict=True)]
        # The graph gets a workspace for cuBLAS in memory of its own. Others (Lightning, torch's compiler) may free that
        # of the steps before, and a graph would keep writing to it. There is no public name for it.
        torch._C._cuda_clearCublasWorkspaces()
        self._graph = torch.cuda.CUDAGraph()
        # Other threads (the writer of checkpoints, NCCL's watchdog) may use CUDA during the capture.
        with torch.cuda.graph(
            self._graph, pool=pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
        ):
            run(step._replace(micro_batches=iter(fixed)))

    def replay(self, shape: Shape) -> None:
        """The same work on this step's batches. Waits for nothing."""
        torch._foreach_copy_(self._inputs, shape.tensors)
        self._graph.replay()

    def release(self) -> None:
        """Wait for the last replay, then destroy the graph, whoever else refers to it. The process group cannot be
        destroyed before: NCCL waits forever for every graph with a collective in it."""
        torch.cuda.synchronize()
        self._graph.reset()


def end_failed_capture(device: torch.device, pool: Any, rng: Tensor) -> None:
    """After a capture that failed, torch believes that it still captures: random numbers would be refused, and memory
    that other streams have used would never be freed. `rng`: the generator's state before. torch has no public name for
    the latter."""
    fresh = torch.Generator(device)
    fresh.set_state(rng)
    torch.cuda.default_generators[device.index].graphsafe_set_state(fresh.graphsafe_get_state())
    try:
        torch._C._cuda_endAllocateToPool(device.index, pool)
    except RuntimeError:
        return  # the capture had ended by itself


def undo_partial_step(applied: nn.Module, optimizer: Optimizer, scaler: GradScaler | None) -> None:
    """After a step that failed half way: reset gradients, DDP's reducer and the scaler, so that it can be taken again.
    torch has no public names for the last two."""
    optimizer.zero_grad(set_to_none=True)
    if isinstance(applied, DistributedDataParallel):
        # Only where the backward pass had begun: after a reset DDP lays out its buckets anew, which all ranks must do
        # together. So this is for what fails on every rank, as an operation does that cannot be captured.
        try:
            applied.reducer._check_reducer_finalized()
        except RuntimeError:
            applied.reducer._reset_state()
    if scaler is not None:
        scaler._per_optimizer_states.clear()
