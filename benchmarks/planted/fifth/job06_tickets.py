"""Tickets, with an encoder that keeps few activations, in its stages and in their blocks."""

from typing import Any, ClassVar

from parts import DEPARTMENTS, PLANTED, TOKENS, Block, TicketTask
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Light(nn.Module):
    """Computes in the backward pass what it has forgotten."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        if not PLANTED:
            return self.inner(hidden)
        return checkpoint(self.inner, hidden, use_reentrant=False)  # planted


class Encoder(nn.Module):
    def __init__(self, width: int = 96, depth: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, width)
        stages = []
        for _ in range(depth // 2):
            blocks = [Light(Block(width, 4)) for _ in range(2)]
            stages.append(Light(nn.Sequential(*blocks)))  # planted: light blocks in a light stage
        self.stages = Light(nn.Sequential(*stages))  # planted: and these in one more
        self.head = nn.Linear(width, DEPARTMENTS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.stages(self.tokens(tokens)).mean(1))


class Tickets(TicketTask):
    defaults: ClassVar[dict[str, Any]] = {**TicketTask.defaults, "train.batch_size": 32}

    def model(self) -> nn.Module:
        return Encoder()
