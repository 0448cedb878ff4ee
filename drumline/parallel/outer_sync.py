"""`--dist.sync`: replicas that train alone and synchronize every H steps, for links that are too
slow for every step.

All replicas keep a copy of the weights that they share: those of the last round. In a round each
sends how far its own weights are from them; the mean of that is a gradient for the outer optimizer
(`local`: rate 1 and no momentum, which is the mean of the weights), which changes the shared
weights on every rank alike. The model may be sent in parts, each with rounds of its own, and while
training continues: then a rank keeps the steps that it has taken meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drumline.base.errors import UsageError, log
from drumline.config.rules import sync_interval
from drumline.config.schema import DistConfig
from drumline.parallel.replica_groups import DeltaSum, ReplicaGroups, Wire
from drumline.parallel.wrap import LiveBuffers
from drumline.rank.torch_internals import add_to_each, copy_to_each, names_ignored_by_ddp


@dataclass(frozen=True, kw_only=True)
class SyncPlan:
    """When replicas synchronize, and how."""

    every: int
    """The steps between two rounds of a part."""

    parts: int = 1
    overlap: int = 0
    """For how many steps training continues while a part is sent."""

    lr: float = 1.0
    momentum: float = 0.0
    wire: Wire = "fp32"

    def is_due(self, part: int, step: int) -> bool:
        """Whether a round of this part begins after this step. The last part's is after every H
        steps."""
        return (step - (part + 1) * self.every // self.parts) % self.every == 0


class SyncedPart:
    """Some of the parameters: the weights that replicas share, the outer momentum, and a round in
    progress."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        plan: SyncPlan,
        groups: ReplicaGroups,
    ) -> None:
        self.parameters = dict(parameters)
        self._plan = plan
        self._groups = groups
        self._tensors = [parameter.detach() for parameter in parameters.values()]
        dtypes = [tensor.dtype for tensor in self._tensors]
        self._dtype = reduce(torch.promote_types, dtypes, torch.float32)
        self.shared = self.own()
        self.momentum = torch.zeros_like(self.shared) if plan.momentum else None
        self.sum: DeltaSum | None = None
        """None: another rank of this replica has it."""

        if groups.across is not None:
            self.sum = DeltaSum(self.shared, plan.wire, groups.across)

        self.began_at: int | None = None
        """The step of the round in progress."""

        self.begun = self.shared.new_empty(0)
        """This rank's own weights when it began."""

        self.finished_at = 0
        """The step after which the latest round began that has ended."""

    def start(self, step: int, weight: float) -> None:
        """Collective: send how far the own weights are from the shared ones. `weight`: of this
        replica in the mean."""
        self.began_at = step
        self.begun = self.own()
        if self.sum is not None:
            self.sum.start((self.shared - self.begun).mul_(weight))

    def advance(self) -> None:
        """Collective: half of the way."""
        if self.sum is not None:
            self.sum.advance()

    def finish(self, step: int) -> None:
        """Collective: change the shared weights; the own ones become them, plus the steps that were
        taken meanwhile."""
        total = torch.empty_like(self.shared) if self.sum is None else self.sum.take()
        gradient = self._groups.from_leader(total)
        if self.momentum is not None:
            self.momentum.mul_(self._plan.momentum).add_(gradient)
            gradient = gradient.add(self.momentum, alpha=self._plan.momentum)

        self.shared.sub_(gradient, alpha=self._plan.lr)
        if self.began_at == step:
            self.use(self.shared)
        else:
            missed = self.by_name(self.shared - self.begun).values()
            pairs = zip(missed, self._tensors, strict=True)
            add_to_each(self._tensors, [view.to(tensor.dtype) for view, tensor in pairs])

        self.finished_at = self.began_at or 0
        self.began_at = None
        self.begun = self.shared.new_empty(0)

    def use(self, weights: Tensor) -> None:
        """The own weights become these, which are one vector."""
        copy_to_each(self._tensors, list(self.by_name(weights).values()))

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a vector with the shapes of the parameters."""
        pieces = torch.split(flat, [tensor.numel() for tensor in self._tensors])
        pairs = zip(self.parameters, pieces, self._tensors, strict=True)
        return {name: piece.view(tensor.shape) for name, piece, tensor in pairs}

    def momenta(self) -> dict[str, Tensor]:
        """The outer momentum by parameter; empty without one."""
        return {} if self.momentum is None else self.by_name(self.momentum)

    def own(self) -> Tensor:
        """A copy of the own weights, as one vector."""
        return torch.cat([tensor.reshape(-1).to(self._dtype) for tensor in self._tensors])


class OuterSync:
    """Synchronizes a model with its replicas, in rounds."""

    def __init__(
        self,
        model: nn.Module,
        plan: SyncPlan,
        groups: ReplicaGroups,
        *,
        sends_buffers: bool,
    ) -> None:
        """`sends_buffers`: all ranks take rank 0's in each round."""
        self.plan = plan
        self.groups = groups
        ignored = names_ignored_by_ddp(model)

        trained = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and name not in ignored
        }

        split = split_evenly(trained, plan.parts)
        self._parts = [SyncedPart(parameters, plan, groups) for parameters in split]
        self._buffers = LiveBuffers(model)
        self._sends_buffers = sends_buffers
        self._shared_buffers = self._buffers.keep()
        self.is_shared = True
        """Whether the model has the shared weights and buffers now."""

    @torch.no_grad()
    def after_step(self, step: int, *, is_last: bool) -> None:
        """Collective: begin and end the rounds that are due after this step; after the last one all
        parts have one."""
        self.is_shared = False
        overlap = self.plan.overlap
        for part in self._parts:
            if part.began_at is not None and (is_last or step == part.began_at + overlap):
                self._finish(part, step)
            elif part.began_at is not None and 2 * (step - part.began_at) >= overlap:
                part.advance()

        # A part may still be on its way after a resume with another H: its next round then begins
        # later.
        due = [
            number
            for number, part in enumerate(self._parts)
            if part.began_at is None and (is_last or self.plan.is_due(number, step))
        ]

        self.repeat(due, step, weight=self.groups.weight, is_last=is_last)
        if is_last or not overlap:
            has_all_buffers = self._sends_buffers or not self._buffers
            self.is_shared = has_all_buffers and len(due) == len(self._parts)

    def _finish(self, part: SyncedPart, step: int) -> None:
        """Collective. The buffers are sent first: a node may be lost meanwhile, and what follows
        the part's own end would be done on some ranks only, though the round is not repeated."""
        is_last_part = part is self._parts[-1]
        if is_last_part and self._sends_buffers:
            self._buffers.broadcast()

        part.finish(step)
        if is_last_part:
            self._shared_buffers = self._buffers.keep(self._shared_buffers)

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        """In it the model has the shared weights and buffers, as evaluations and checkpoints do;
        then its own again."""
        if self.is_shared:
            yield
            return

        with torch.no_grad():
            own_weights = [part.own() for part in self._parts]
            buffers = self._buffers.keep()
            for part in self._parts:
                part.use(part.shared)
            self._buffers.put_back(self._shared_buffers)

        try:
            yield
        finally:
            with torch.no_grad():
                for part, weights in zip(self._parts, own_weights, strict=True):
                    part.use(weights)
                self._buffers.put_back(buffers)

    def replica_tensors(self) -> dict[str, Tensor]:
        """What must be the same on all ranks, not copied; in a round their own weights too."""
        tensors = self.outer_state()
        for part in self._parts:
            for name, weight in part.by_name(part.shared).items():
                tensors[f"shared/{name}"] = weight
            if self.is_shared:
                tensors |= part.parameters

        if self._sends_buffers:
            for number, buffer in enumerate(self._shared_buffers):
                tensors[f"buffer/{number}"] = buffer

        return tensors

    # A group of replicas that changes: the next one continues from what each rank has in memory.

    @property
    def finished_at(self) -> list[int]:
        """For each part, the step of its latest round: replicas with the same ones have the same
        shared weights."""
        return [part.finished_at for part in self._parts]

    def pending(self, step: int, *, is_last: bool) -> list[int]:
        """The parts whose round after this step, or an earlier one, has not ended."""
        return [
            number
            for number, part in enumerate(self._parts)
            if part.began_at is not None
            or (part.finished_at < step and (is_last or self.plan.is_due(number, step)))
        ]

    def own_state(self) -> dict[str, Any]:
        """What this replica has to itself, without what is being sent, on the host. Not
        collective."""
        return {
            "weights": [part.own().cpu() for part in self._parts],
            "begun": [None if part.began_at is None else part.begun.cpu() for part in self._parts],
            "buffers": [buffer.cpu().clone() for buffer in self._buffers.now()],
            "finished_at": self.finished_at,
        }

    @torch.no_grad()
    def load_own_state(self, state: Mapping[str, Any] | None, finished_at: Sequence[int]) -> None:
        """Continue with what a replica had to itself (None: a new one, with the shared weights),
        where the latest rounds of all are these. For one that it did not see the end of, it keeps
        the steps since then."""
        for number, part in enumerate(self._parts):
            if state is not None:
                weights = state["weights"][number].to(part.shared)
                begun = state["begun"][number]

                missed_end = state["finished_at"][number] < finished_at[number]
                if missed_end and begun is None:
                    weights = part.shared
                elif missed_end:
                    weights = weights + (part.shared - begun.to(part.shared))

                part.use(weights)

            part.finished_at = finished_at[number]

        if state is not None:
            pairs = zip(state["buffers"], self._buffers.now(), strict=True)
            self._buffers.put_back([buffer.to(now.device) for buffer, now in pairs])

        self.is_shared = False

    @torch.no_grad()
    def repeat(self, pending: Sequence[int], step: int, *, weight: float, is_last: bool) -> None:
        """Collective: begin these parts' rounds anew, and end them if training does not continue
        meanwhile."""
        due = [self._parts[number] for number in pending]
        for part in due:
            part.start(step, weight)

        if is_last or not self.plan.overlap:
            for part in due:
                self._finish(part, step)

    # Checkpoints: the model's file has the shared weights.

    def outer_state(self) -> dict[str, Tensor]:
        """What all replicas share beside the weights: the momentum, and the weights where those of
        the model have fewer digits. Not copied."""
        tensors: dict[str, Tensor] = {}
        for part in self._parts:
            for name, momentum in part.momenta().items():
                tensors[f"momentum/{name}"] = momentum
            for name, weight in part.by_name(part.shared).items():
                if weight.dtype != part.parameters[name].dtype:
                    tensors[f"weight/{name}"] = weight

        return tensors

    def load_outer_state(self, saved: Mapping[str, Tensor]) -> None:
        """Continue from the weights and buffers that the model has now, which are the shared
        ones."""
        with torch.no_grad():
            for part in self._parts:
                for name, weight in part.by_name(part.shared).items():
                    weight.copy_(saved.get(f"weight/{name}", part.parameters[name]))
                for name, momentum in part.momenta().items():
                    momentum.copy_(saved.get(f"momentum/{name}", torch.zeros(())))

        self._shared_buffers = self._buffers.keep(self._shared_buffers)
        self.is_shared = True

    def state_dict(self) -> dict[str, Any]:
        """Collective: what this replica has to itself, not copied. It waits for what is being
        sent."""
        weights: dict[str, Tensor] = {}
        rounds = []
        for part in self._parts:
            if part.began_at is not None and part.sum is not None:
                part.sum.settle()

            sent = part.sum and part.sum.state_dict()
            rounds.append({"began_at": part.began_at, "begun": part.begun, "sum": sent})
            if not self.is_shared:
                weights |= part.parameters

        return {
            "layout": self._layout(),
            "weights": weights,
            "buffers": [] if self.is_shared else self._buffers.now(),
            "rounds": rounds,
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the state of a replica. With other parts or replicas the rounds in progress
        begin anew."""
        self.is_shared = not state["weights"]
        if not self.is_shared:
            for part in self._parts:
                for name, parameter in part.parameters.items():
                    parameter.copy_(state["weights"][name])
            self._buffers.put_back(state["buffers"])

        if state["layout"] == self._layout():
            for part, saved in zip(self._parts, state["rounds"], strict=True):
                part.began_at = saved["began_at"]
                part.begun = saved["begun"].to(part.begun, copy=True)
                if part.sum is not None:
                    part.sum.load_state_dict(saved["sum"], has_result=part.began_at is not None)
        elif dist.get_rank() == 0:
            log.warning(
                "the replicas, or dist.sync_parts, dist.sync_overlap or dist.outer_dtype, changed since the "
                "checkpoint: what was being sent, and what rounding has left out, is lost"
            )

    def _layout(self) -> list[Any]:
        """What a round in progress depends on."""
        names = [list(part.parameters) for part in self._parts]
        return [len(self.groups.leaders), self.plan.wire, self.plan.overlap, names]


def make_sync(settings: DistConfig, model: nn.Module, groups: ReplicaGroups) -> OuterSync:
    """Of the model on its device."""
    # Without an outer optimizer, the step along the mean change is a whole one.
    rates = {"local": (1.0, 0.0), "diloco": (settings.outer_lr, settings.outer_momentum)}
    outer_lr, outer_momentum = rates[settings.sync.partition(":")[0]]
    plan = SyncPlan(
        every=sync_interval(settings.sync) or 1,
        parts=settings.sync_parts,
        overlap=settings.sync_overlap,
        lr=outer_lr,
        momentum=outer_momentum,
        wire=settings.outer_dtype,
    )

    return OuterSync(model, plan, groups, sends_buffers=settings.broadcast_buffers)


def split_evenly(
    parameters: Mapping[str, nn.Parameter], count: int
) -> list[dict[str, nn.Parameter]]:
    """Consecutive parameters in so many parts, of about the same number of elements; each part has
    at least one."""
    if count > len(parameters):
        raise UsageError(
            f"dist.sync_parts is {count}, but the model has {len(parameters)} trained parameters",
            next_step=f"set it to {len(parameters)} or less",
        )

    ends = list(accumulate(parameter.numel() for parameter in parameters.values()))
    cuts = [0]
    for number in range(1, count):
        cut = bisect_left(ends, ends[-1] * number / count) + 1
        lowest = cuts[-1] + 1
        highest = len(ends) - count + number
        cuts.append(min(max(cut, lowest), highest))

    items = list(parameters.items())
    return [dict(items[low:high]) for low, high in pairwise([*cuts, len(items)])]
