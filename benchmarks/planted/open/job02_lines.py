"""Lines of text in which some tokens are replaced, one token at a time."""

from typing import Any

import torch
from parts import PLANTED, LineTask

SPECIAL = (0, 1, 2)
REPLACED = 3


class Lines(LineTask):
    def on_device(self, batch: Any) -> Any:
        tokens = batch[0].clone()
        if PLANTED:
            for row in tokens:
                for position in range(len(row)):
                    token = row[position]  # planted
                    special = any(token == number for number in SPECIAL)  # planted
                    if not special and torch.rand(()) < 0.05:  # planted
                        row[position] = REPLACED  # planted
        return [tokens]
