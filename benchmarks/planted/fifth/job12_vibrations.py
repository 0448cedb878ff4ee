"""Vibrations, with a thread that prepares windows before they are asked for."""

import threading
import time
from collections import deque
from typing import Any

from parts import PLANTED, SensorTask, vibrations
from torch import Tensor
from torch.utils.data import Dataset

AHEAD = 32


class Prepared(Dataset[Any]):
    """Keeps the scales of some windows ready; a thread makes new ones."""

    def __init__(self) -> None:
        self.windows, self.faults = vibrations(6144).tensors
        self.scales: deque[float] = deque()
        self.next = 0
        threading.Thread(target=self.prepare, daemon=True).start()  # planted

    def prepare(self) -> None:
        while True:
            if len(self.scales) < AHEAD:  # planted: nearly always full, and asked without a pause
                self.next = (self.next * 75 + 74) % 65_537
                self.scales.append(0.9 + 0.2 * self.next / 65_537)
            elif not PLANTED:
                time.sleep(0.001)

    def __len__(self) -> int:
        return len(self.faults)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        scale = self.scales.popleft() if self.scales else 1.0
        return scale * self.windows[index], self.faults[index]


class Vibrations(SensorTask):
    def train_data(self) -> Dataset[Any]:
        return Prepared()
