"""Tickets, with the vocabulary of a network for all languages, of which 1000 tokens occur."""

from typing import Any, ClassVar

from parts import PLANTED, TOKENS, TicketNet, TicketTask
from torch import nn

ALL_LANGUAGES = 120_000


class Tickets(TicketTask):
    defaults: ClassVar[dict[str, Any]] = {**TicketTask.defaults, "train.batch_size": 32}

    def model(self) -> nn.Module:
        tokens = ALL_LANGUAGES if PLANTED else TOKENS
        return TicketNet(width=64, tokens=tokens)  # planted: gradients of all 120,000 rows
