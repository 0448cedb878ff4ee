"""After a step that ended half way, in an error: everything as if it had not begun, so that it can be taken again."""

from __future__ import annotations

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


def forget_half_a_step(applied: nn.Module, optimizer: Optimizer, scaler: GradScaler | None) -> None:
    """Gradients, what DDP still waits for, what the scaler has noted. torch has no public names for the last two."""
    optimizer.zero_grad(set_to_none=True)
    if isinstance(applied, DistributedDataParallel):
        _wait_no_more(applied)
    if scaler is not None:
        scaler._per_optimizer_states.clear()


def _wait_no_more(applied: DistributedDataParallel) -> None:
    """Only where the backward pass had begun: afterwards DDP lays out its buckets anew, which all ranks do together. So
    this is for what fails on all of them, as an operation does that cannot be captured."""
    try:
        applied.reducer._check_reducer_finalized()
    except RuntimeError:
        applied.reducer._reset_state()
