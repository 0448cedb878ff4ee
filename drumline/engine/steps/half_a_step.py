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
        applied.reducer._reset_state()
    if scaler is not None:
        scaler._per_optimizer_states.clear()
