"""Which blocks of a sharded model a pass calls, and whose gradients it reduces: ranks gather a
block together when they call it, and reduce its gradients together, so a rank that leaves one out
makes the others wait, or mixes up their data.

Before the first step the ranks compare what they call. After that each rank compares its passes
with the first, and raises before it would enter a collective of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drumline.base.errors import UnusedParametersError, UsageError
from drumline.base.text import by_rank, join_names
from drumline.parallel.wrap import FIND_UNUSED, FIND_UNUSED_WITH_DDP, NAMED
from drumline.rank.collectives import gather_json
from drumline.rank.torch_internals import parameters_in_reduction

# torch 2.13 renamed this function, and warns about the old name, which earlier versions need.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
NO_MORE = "no other block"
THE_MODEL = "the model"
"""The text for the block with an empty name."""


class BlockUse:
    """What the passes of a sharded model use. `sharded`: the modules that hold shards, by name; the
    model itself has an empty name. `mode`: `--dist.mode`."""

    def __init__(self, sharded: Mapping[str, nn.Module], *, mode: str, finds_unused: bool) -> None:
        self._mode = mode
        self._parameters = _parameters_by_module(sharded)
        self._is_learned = False
        self._host = ""
        """While ranks compare what they call: this rank's."""

        self._called = FirstCalls()
        self._reduced = FirstCalls()
        self._sizes: dict[str, set[int]] = {name: set() for name in sharded}

        for name, module in sharded.items():
            # Before the hook with which torch gathers the block.
            module.register_forward_pre_hook(partial(self._before_block, name), prepend=True)
            if not finds_unused:
                module.set_custom_reduce_scatter(CheckedReduceScatter(self, name))  # type: ignore[operator]

    @contextmanager
    def compared(self, host: str) -> Iterator[None]:
        """Collective: in it the ranks compare each block that they call. `host`: this rank's."""
        self._host = host
        try:
            yield
            self._compare(NO_MORE)
        finally:
            self._host = ""

    def learn(self) -> None:
        """From now on every pass must use what the latest one has used."""
        self._is_learned = True

    def begin_pass(self) -> None:
        """A forward pass begins."""
        self._called.position = 0
        self._reduced.position = 0

    def end_forward(self) -> None:
        """Raise if the forward pass has left out the last blocks."""
        missing = self._called.next_name()
        if torch.is_grad_enabled() and self._is_learned and missing is not None:
            raise self._left_out(missing)

    def end_step(self) -> None:
        """Raise if the backward pass has left out the gradients that are reduced last."""
        if self._is_learned and (missing := self._reduced.next_name()) is not None:
            raise _unused(self._parameters[missing])

    def before_reduction(self, name: str, size: int) -> None:
        """The gradients of this module, so many numbers, are about to be reduced."""
        if not self._is_learned:
            self._reduced.add(name)
            self._sizes[name].add(size)
            return

        if not self._reduced.visit(name):
            missing = self._reduced.next_name()
            raise _unused(self._parameters[name if missing is None else missing])

        if size not in self._sizes[name]:
            reduced = parameters_in_reduction()
            raise _unused([param for param in self._parameters[name] if param not in reduced])

    def _before_block(self, name: str, *_: Any) -> None:
        """A forward pass is about to call this block."""
        if self._host:
            self._compare(name)

        if not torch.is_grad_enabled():
            return

        if not self._is_learned:
            self._called.add(name)
        elif not self._called.visit(name):
            missing = self._called.next_name()
            if name not in self._called or missing is None:
                raise self._changed(f"calls {_block_text(name)}, which it did not call")
            raise self._left_out(missing)

    def _compare(self, name: str) -> None:
        """Collective: raise if another rank calls another block now."""
        calls = gather_json([self._host, name])
        if any(called != name for _, called in calls):
            hosts = [host for host, _ in calls]
            blocks = [called or THE_MODEL for _, called in calls]
            raise UsageError(
                f"ranks call different blocks in the same batch, and with --dist.mode {self._mode} they gather each "
                f"block together: {by_rank(blocks, hosts)}",
                next_step=_call_advice("the same blocks on every rank"),
            )

    def _changed(self, what: str) -> UnusedParametersError:
        """The error about a pass that differs from the first."""
        return UnusedParametersError(
            f"the loss {what} in the first step; with --dist.mode {self._mode} ranks gather a block "
            "together when they call it",
            next_step=_call_advice("it in every batch"),
        )

    def _left_out(self, name: str) -> UnusedParametersError:
        """The error about a pass that does not call this block."""
        return self._changed(f"does not call {_block_text(name)}, which it called")


class FirstCalls:
    """The order in which blocks are first called in a pass; they may be called again at any time.

    With blocks a, b and c, first called in this order, a later pass may call a, b, a, c; but not a,
    c, where b is left out."""

    def __init__(self) -> None:
        self.position = 0
        """The number of blocks that were called in this pass."""

        self._places: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def add(self, name: str) -> None:
        """A block is called in the first pass."""
        self._places.setdefault(name, len(self._places))

    def visit(self, name: str) -> bool:
        """Whether this block may be called now: not before one that was called earlier in the first
        pass."""
        place = self._places.get(name, len(self._places))
        if place == self.position < len(self._places):
            self.position += 1
        return place < self.position

    def next_name(self) -> str | None:
        """The block that is to be called next for the first time in this pass; None: all were."""
        return next((name for name in self._places if self._places[name] == self.position), None)


@dataclass(frozen=True)
class CheckedReduceScatter:
    """torch's own, for one module, and the check before it."""

    use: BlockUse
    name: str
    """Of the module."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self.use.before_reduction(self.name, input_tensor.numel())
        return _reduce_scatter(
            output=output_tensor,
            input=input_tensor,
            op=op,
            group=group,
            async_op=async_op,
        )


def can_find_unused() -> bool:
    """Whether this torch reduces zeros for the unused parameters of a sharded model."""
    from torch.distributed.fsdp import FSDPModule

    return hasattr(FSDPModule, "set_reduce_scatter_unused_params")


def unused_advice() -> str:
    """What to do about parameters of a sharded model that not every batch uses."""
    return FIND_UNUSED if can_find_unused() else FIND_UNUSED_WITH_DDP


def _unused(names: list[str]) -> UnusedParametersError:
    """The error about parameters without a gradient."""
    return UnusedParametersError(
        f"the loss does not use these parameters: {join_names(names, most=NAMED)}",
        next_step=unused_advice(),
    )


def _block_text(name: str) -> str:
    """For a message: `the block layers.0`, or `the model`."""
    return f"the block {name}" if name else THE_MODEL


def _call_advice(blocks: str) -> str:
    """What to do where ranks, or passes, call different blocks."""
    return (
        f"call {blocks} (multiply the output by 0 where it is not needed), or use --dist.mode ddp with "
        "--dist.find_unused_parameters"
    )


def _parameters_by_module(sharded: Mapping[str, nn.Module]) -> dict[str, list[str]]:
    """The trained parameters that each of these modules shards itself, by their names in the
    model."""
    names: dict[str, list[str]] = {}
    taken: set[str] = set()

    # An inner module before the one that holds it.
    for name, module in sorted(sharded.items(), key=lambda item: -len(item[0])):
        trained = [
            parameter for parameter, value in module.named_parameters(name) if value.requires_grad
        ]
        names[name] = [parameter for parameter in trained if parameter not in taken]
        taken.update(trained)

    return names
