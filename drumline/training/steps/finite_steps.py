"""Which updates are skipped because a loss or a gradient is not finite (`--train.on_nan`), without
waiting for the device. What the loop does about them is in `non_finite.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from drumline.checkpoint.finite import largest
from drumline.metrics.meters import Meter
from drumline.parallel.shards import own_parts
from drumline.parallel.wrap import LiveBuffers
from drumline.training.job.optimizer import leaves_out_itself
from drumline.training.tasks.ready_hooks import begin_momentum


class FiniteSteps:
    """Counts non-finite steps on the device, so that no step waits, and a captured step counts too.
    A job has one, for all kinds of steps. `--train.on_nan` decides what is counted, and what
    happens to the update:

    - `stop`, `warn`: a step whose loss is NaN or infinite. `stop` also freezes the weights of this
      rank from that step on: the loop reads the count some steps later, and can still run the batch
      again with these weights. On a GPU this needs a fused optimizer; with any other it would wait
      for the device.
    - `skip`: a step with a non-finite loss or gradient on any rank. Gradients are reduced before
      they are checked, so all ranks skip the same updates, and undo what the step did to buffers
      and to the logged sums.

    With fp16 the loss scaler itself skips updates with an infinite gradient. Then only the loss is
    checked, only the rank that computed it undoes its logged sums, and `stop` freezes nothing."""

    def __init__(
        self,
        on_nan: Literal["stop", "skip", "warn"],
        meter: Meter,
        buffers: LiveBuffers,
        optimizer: Optimizer,
        scaler: GradScaler | None,
        *,
        waits_for_device: bool,
        is_sharded: bool = False,
    ) -> None:
        """`waits_for_device`: whether reading a number waits for the device. `is_sharded`: ranks
        hold different shards, so all of them must skip the same updates."""
        self.skips = on_nan == "skip"
        self.counts = torch.zeros(2, dtype=meter.dtype, device=meter.loss.device)
        """Since the last reset: the number of non-finite steps, and of steps since the first of
        them."""
        self._num_bad, self._num_since = self.counts.unbind()
        self._bad = torch.zeros((), device=meter.loss.device)
        self._meter = meter
        self._buffers = buffers
        self._optimizer = optimizer
        self._scaler = scaler
        self._kept_buffers: list[Tensor] | None = None
        self._kept_sums: Tensor | None = None
        decides = {"stop": True, "skip": True, "warn": False}[on_nan] and scaler is None
        self._is_sharded = is_sharded
        self._agrees = decides and is_sharded
        # An optimizer on the host would have to wait for the number, which is on the device.
        is_here = all(
            parameter.device == self._bad.device
            for group in optimizer.param_groups
            for parameter in group["params"]
        )
        is_fused = waits_for_device and is_here and leaves_out_itself(optimizer)
        # `skip` waits if there is no other way: it must not apply the update.
        self._decides_here = decides and not is_fused and (self.skips or not waits_for_device)
        if decides and is_fused:
            optimizer.found_inf = self._bad  # type: ignore[attr-defined]  # read by torch's fused optimizers
        self.keeps_weights = scaler is not None or self._decides_here or (decides and is_fused)
        """Whether the weights stay finite after a non-finite loss."""
        if self.skips or scaler is not None:
            begin_momentum(
                optimizer,
                (parameter for group in optimizer.param_groups for parameter in group["params"]),
            )

    grad_norm: Tensor | None = None
    """Of the latest step, before clipping; on the device. None: gradients are not clipped."""
    agree: Callable[[], object] | None = None
    """Collective, before an update: whether all ranks have their gradients, where others may
    continue without one."""

    def begin(self) -> None:
        """A step begins."""
        if self.skips:
            self._kept_buffers = self._buffers.keep(self._kept_buffers)
            self._kept_sums = None

    def measure(self, total: Tensor, weight: Tensor | float, metrics: Mapping[str, Tensor]) -> None:
        """Add a micro-batch to the logged sums. With `skip` everything is on the device, where it
        can be undone."""
        if self.skips:
            if self._kept_sums is None:
                self._meter.prepare(metrics)
                self._kept_sums = self._meter.keep()
            if not isinstance(weight, Tensor):
                weight = torch.full((), weight, dtype=self.counts.dtype, device=self.counts.device)
        self._meter.add(total, weight, metrics)

    def spread(self, scaled: Tensor, total: Tensor) -> Tensor:
        """The loss to differentiate. With `skip` a non-finite loss makes all gradients NaN, which
        every rank sees."""
        return scaled * (1.0 + total.detach() * 0.0) if self.skips else scaled

    def check(self, parameters: Iterable[Tensor]) -> None:
        """Count the step if its loss or gradients are not finite, without waiting for the
        device."""
        if not self.skips or self._scaler is not None:
            number = self._meter.loss
        elif self.grad_norm is not None:
            number = self.grad_norm
        else:
            gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
            number = largest(own_parts(gradients) if self._is_sharded else gradients).to(
                self._bad.device
            )
        # 1 if the number is not finite, otherwise 0: two operations; torch.isfinite needs four.
        torch.ne(number - number, 0, out=self._bad)
        bad_here = self._bad
        if self._agrees:
            bad_here = self._bad.clone()
            dist.all_reduce(self._bad, op=dist.ReduceOp.MAX)
        if self.skips:
            self._num_bad.add_(self._bad)
            self._num_since.add_(self._num_bad.sign())
        else:  # the sum since the last log line stays non-finite
            self.counts.add_(bad_here)

    def take_optimizer_step(self) -> None:
        """The optimizer's step, unless it is skipped. On a GPU fused optimizers skip it
        themselves."""
        if self.agree is not None:
            self.agree()
        if self._scaler is not None:
            skipped = self._left_out_by(self._scaler) if self.skips else None
            self._scaler.step(self._optimizer)
            self._scaler.update()
        else:
            skipped = self._bad if self.skips else None
            if not (self._decides_here and self._bad):
                self._optimizer.step()
        if skipped is not None:
            self._take_back_if(skipped > 0)
            if self._kept_sums is not None:
                self._meter.put_back_if(self._bad > 0, self._kept_sums)

    def _left_out_by(self, scaler: GradScaler) -> Tensor:
        """Whether the scaler will skip this update. torch has no public name for it."""
        if not scaler._per_optimizer_states[id(self._optimizer)]["found_inf_per_device"]:
            scaler.unscale_(self._optimizer)
        infs_by_device = scaler._found_inf_per_device(self._optimizer).values()
        return torch.stack([inf.to(self._bad.device) for inf in infs_by_device]).sum()

    @torch.no_grad()
    def _take_back_if(self, is_skipped: Tensor) -> None:
        pairs = zip(self._kept_buffers or [], self._buffers.now(), strict=True)
        self._buffers.put_back(
            [
                torch.where(is_skipped, before, now) if before.shape == now.shape else before
                for before, now in pairs
            ]
        )
