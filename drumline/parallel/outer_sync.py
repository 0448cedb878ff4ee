"""`--dist.sync`: replicas that train alone and synchronize every H steps, for links that are too
slow for every step.

All replicas keep a copy of the weights that they share: those of the last round. In a round each
sends how far its own weights are from them; the mean of that is a gradient for the outer optimizer
(`local`: rate 1 and no momentum, which is the mean of the weights), which changes the shared
weights on every rank alike. The model may be sent in parts, each with rounds of its own, and while
training continues: then a rank keeps the steps that it has taken meanwhile.

With H = 4, two parts and an overlap of one step:

    step 2   part 0 starts
    step 3   part 0 finishes: all ranks have its shared weights, and add their own third step
    step 4   part 1 starts
    step 5   part 1 finishes
    step 6   part 0 starts, and so on; after the last step of a run both start and finish
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
    """In how many parts the model is sent."""

    overlap: int = 0
    """For how many steps training continues while a part is sent."""

    lr: float = 1.0
    """Of the outer optimizer."""

    momentum: float = 0.0
    """Of the outer optimizer, Nesterov's; 0: none."""

    wire: Wire = "fp32"
    """In which type a part is sent."""

    def is_due(self, part: int, step: int) -> bool:
        """Whether a round of this part begins after this step. The last part's is after every H
        steps, those of the others are spread between: with H = 12 and 3 parts after the steps 4, 8
        and 12."""
        return (step - (part + 1) * self.every // self.parts) % self.every == 0


class SyncedPart:
    """Some of the parameters: the weights that replicas share, the outer momentum, and a round in
    progress.

    A round is `start`, `advance` while it is on its way, and `finish`, all three collective. All
    vectors have the elements of the parameters one after the other, in their order."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        plan: SyncPlan,
        groups: ReplicaGroups,
    ) -> None:
        """`groups`: this rank's replica, and the leaders of all. A leader sends for its replica."""
        self.parameters = dict(parameters)
        self._plan = plan
        self._groups = groups
        self._tensors = [parameter.detach() for parameter in parameters.values()]

        # fp32 at least: small steps would be lost in the sum of many.
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
        replica in the mean, 0.25 for one of four that train with as many ranks each."""
        self.began_at = step
        self.begun = self.own()
        if self.sum is not None:
            self.sum.start((self.shared - self.begun).mul_(weight))

    def advance(self) -> None:
        """Collective: half of the way. Called in the middle of the steps that training continues
        for, so that the second half overlaps, too."""
        if self.sum is not None:
            self.sum.advance()

    def finish(self, step: int) -> None:
        """Collective: change the shared weights; the own ones become them, plus the steps that were
        taken meanwhile. `step`: the one after which it ends."""
        total = torch.empty_like(self.shared) if self.sum is None else self.sum.take()
        self._update_shared(self._groups.from_leader(total))

        if self.began_at == step:
            self.use(self.shared)
        else:
            self._add(self.shared - self.begun)

        self.finished_at = self.began_at or 0
        self.began_at = None
        self.begun = self.shared.new_empty(0)

    def _update_shared(self, gradient: Tensor) -> None:
        """A step of the outer optimizer: SGD, with Nesterov's momentum if there is one."""
        if self.momentum is not None:
            self.momentum.mul_(self._plan.momentum).add_(gradient)
            gradient = gradient.add(self.momentum, alpha=self._plan.momentum)

        self.shared.sub_(gradient, alpha=self._plan.lr)

    def _add(self, difference: Tensor) -> None:
        """Add a vector to the own weights."""
        pairs = zip(self.by_name(difference).values(), self._tensors, strict=True)
        add_to_each(self._tensors, [view.to(tensor.dtype) for view, tensor in pairs])

    def use(self, weights: Tensor) -> None:
        """The own weights become these, which are one vector, in the types of the parameters."""
        copy_to_each(self._tensors, list(self.by_name(weights).values()))

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a vector with the shapes of the parameters: what is written to them is in the
        vector."""
        pieces = torch.split(flat, [tensor.numel() for tensor in self._tensors])
        pairs = zip(self.parameters, pieces, self._tensors, strict=True)
        return {name: piece.view(tensor.shape) for name, piece, tensor in pairs}

    def momenta(self) -> dict[str, Tensor]:
        """The outer momentum by parameter; empty without one."""
        return {} if self.momentum is None else self.by_name(self.momentum)

    def own(self) -> Tensor:
        """A copy of the own weights, as one vector, in a type that holds those of all
        parameters."""
        return torch.cat([tensor.reshape(-1).to(self._dtype) for tensor in self._tensors])

    def load_own(self, weights: Tensor, begun: Tensor | None, *, missed_end: bool) -> None:
        """Continue with the own weights that a replica has kept, and those from which it began the
        round in progress (None: there was no round). `missed_end`: the latest round has ended
        without this replica, which then keeps its steps since the round began."""
        weights = weights.to(self.shared)
        if not missed_end:
            self.use(weights)
        elif begun is None:
            self.use(self.shared)
        else:
            self.use(weights + (self.shared - begun.to(self.shared)))

    def round_state(self) -> dict[str, Any]:
        """Collective: the round in progress, not copied. It waits for what is being sent."""
        if self.began_at is not None and self.sum is not None:
            self.sum.settle()

        return {
            "began_at": self.began_at,
            "begun": self.begun,
            "sum": self.sum and self.sum.state_dict(),
        }

    def load_round_state(self, state: Mapping[str, Any]) -> None:
        """Continue with a round that was in progress."""
        self.began_at = state["began_at"]
        self.begun = state["begun"].to(self.begun, copy=True)
        if self.sum is not None:
            self.sum.load_state_dict(state["sum"], has_result=self.began_at is not None)


class OuterSync:
    """Synchronizes a model with its replicas, in rounds. `after_step` is called after each step, on
    every rank.

    The model has this replica's own weights, but in `shared_weights` those of all. `state_dict` has
    what the replica has to itself, `outer_state` what all share beside the weights."""

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
        parts have one, which ends at once."""
        self.is_shared = False
        overlap = self.plan.overlap
        for part in self._parts:
            if part.began_at is None:
                continue

            num_steps = step - part.began_at
            if is_last or num_steps == overlap:
                self._finish(part, step)
            elif 2 * num_steps >= overlap:
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
        """Collective: end the round of a part. The buffers are sent first: a node may be lost
        meanwhile, and what follows the part's own end would be done on some ranks only, though the
        round is not repeated."""
        is_last_part = part is self._parts[-1]
        if is_last_part and self._sends_buffers:
            self._buffers.broadcast()

        part.finish(step)
        if is_last_part:
            self._shared_buffers = self._buffers.keep(self._shared_buffers)

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        """In it the model has the shared weights and buffers, as evaluations and checkpoints do;
        then its own again. Between rounds both exist: the own weights are copied meanwhile."""
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
        """What must be the same on all ranks, not copied; in a round their own weights too:
        `momentum/fc.weight`, `shared/fc.weight`, `fc.weight`, `buffer/0`."""
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
        numbers = []
        for number, part in enumerate(self._parts):
            is_due = is_last or self.plan.is_due(number, step)
            has_not_begun = is_due and part.finished_at < step
            if part.began_at is not None or has_not_begun:
                numbers.append(number)

        return numbers

    def own_state(self) -> dict[str, Any]:
        """What this replica has to itself, without what is being sent, on the host. Not collective:
        other ranks may be lost. `load_own_state` of the next group takes it."""
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
        for part, step in zip(self._parts, finished_at, strict=True):
            part.finished_at = step

        self.is_shared = False
        if state is None:
            return

        for number, part in enumerate(self._parts):
            missed_end = state["finished_at"][number] < finished_at[number]
            part.load_own(state["weights"][number], state["begun"][number], missed_end=missed_end)

        pairs = zip(state["buffers"], self._buffers.now(), strict=True)
        self._buffers.put_back([buffer.to(now.device) for buffer, now in pairs])

    @torch.no_grad()
    def repeat(self, pending: Sequence[int], step: int, *, weight: float, is_last: bool) -> None:
        """Collective: begin these parts' rounds anew, and end them if training does not continue
        meanwhile. `weight`: of this replica in the mean, 0 if it has just joined."""
        due = [self._parts[number] for number in pending]
        for part in due:
            part.start(step, weight)

        if is_last or not self.plan.overlap:
            for part in due:
                self._finish(part, step)

    # Checkpoints: the model's file has the shared weights.

    def outer_state(self) -> dict[str, Tensor]:
        """What all replicas share beside the weights: the momentum, and the weights where those of
        the model have fewer digits. Not copied.

            {"momentum/fc.weight": ..., "weight/fc.weight": ...}
        """
        tensors: dict[str, Tensor] = {}
        for part in self._parts:
            for name, momentum in part.momenta().items():
                tensors[f"momentum/{name}"] = momentum

            for name, weight in part.by_name(part.shared).items():
                if weight.dtype != part.parameters[name].dtype:
                    tensors[f"weight/{name}"] = weight

        return tensors

    def load_outer_state(self, saved: Mapping[str, Tensor]) -> None:
        """Continue from the weights and buffers that the model has now, which are the shared ones.
        What was not saved begins anew: the momentum with zeros, the weights with those of the
        model."""
        with torch.no_grad():
            for part in self._parts:
                for name, weight in part.by_name(part.shared).items():
                    weight.copy_(saved.get(f"weight/{name}", part.parameters[name]))

                for name, momentum in part.momenta().items():
                    momentum.copy_(saved.get(f"momentum/{name}", torch.zeros(())))

        self._shared_buffers = self._buffers.keep(self._shared_buffers)
        self.is_shared = True

    def state_dict(self) -> dict[str, Any]:
        """Collective: what this replica has to itself, not copied. It waits for what is being sent.
        Weights and buffers are left out while they are the shared ones, which the model's file
        has."""
        rounds = [part.round_state() for part in self._parts]
        weights: dict[str, Tensor] = {}
        buffers: list[Tensor] = []

        if not self.is_shared:
            buffers = self._buffers.now()
            for part in self._parts:
                weights |= part.parameters

        return {
            "layout": self._layout(),
            "weights": weights,
            "buffers": buffers,
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
            for part, round_state in zip(self._parts, state["rounds"], strict=True):
                part.load_round_state(round_state)
        elif dist.get_rank() == 0:
            log.warning(
                "the replicas, or dist.sync_parts, dist.sync_overlap or dist.outer_dtype, changed since the "
                "checkpoint: what was being sent, and what rounding has left out, is lost"
            )

    def _layout(self) -> list[Any]:
        """What a round in progress depends on: a resumed run continues it only where all of this is
        the same."""
        names = [list(part.parameters) for part in self._parts]
        return [len(self.groups.leaders), self.plan.wire, self.plan.overlap, names]


def make_sync(settings: DistConfig, model: nn.Module, groups: ReplicaGroups) -> OuterSync:
    """The rounds that the settings ask for, of the model on its device: `local:H` takes the mean of
    the weights, `diloco:H` a step of the outer optimizer."""
    # With `local` there is no outer optimizer, and the step along the mean change is a whole one.
    rates = {"local": (1.0, 0.0), "diloco": (settings.outer_lr, settings.outer_momentum)}
    lr, momentum = rates[settings.sync.partition(":")[0]]
    plan = SyncPlan(
        every=sync_interval(settings.sync) or 1,
        parts=settings.sync_parts,
        overlap=settings.sync_overlap,
        lr=lr,
        momentum=momentum,
        wire=settings.outer_dtype,
    )

    return OuterSync(model, plan, groups, sends_buffers=settings.broadcast_buffers)


def split_evenly(
    parameters: Mapping[str, nn.Parameter], count: int
) -> list[dict[str, nn.Parameter]]:
    """Consecutive parameters in so many parts, of about the same number of elements; each part has
    at least one. Parameters of 4, 4, 1, 1 and 6 elements are the parts (4, 4) and (1, 1, 6) of
    two."""
    if count > len(parameters):
        raise UsageError(
            f"dist.sync_parts is {count}, but the model has {len(parameters)} trained parameters",
            next_step=f"set it to {len(parameters)} or less",
        )

    ends = list(accumulate(parameter.numel() for parameter in parameters.values()))
    cuts = [0]
    for number in range(1, count):
        ideal_end = ends[-1] * number / count
        cut = bisect_left(ends, ideal_end) + 1

        # Each part before the cut, and each one after it, needs a parameter.
        lowest = cuts[-1] + 1
        highest = len(ends) - count + number
        cuts.append(min(max(cut, lowest), highest))

    items = list(parameters.items())
    return [dict(items[low:high]) for low, high in pairwise([*cuts, len(items)])]
