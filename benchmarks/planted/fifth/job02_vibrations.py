"""A plain DDP script: windows of recordings, each recording in a compressed file."""

import tempfile
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from parts import PLANTED, STEPS, SensorNet, batches, finish, now, start, vibrations
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

RECORDINGS = 8
WINDOWS = 160  # of one recording


class Recordings(Dataset[Any]):
    """Reads windows from the files of a folder."""

    def __init__(self, folder: Path) -> None:
        windows, self.faults = vibrations(RECORDINGS * WINDOWS).tensors
        self.paths = []
        for number, recording in enumerate(windows.chunk(RECORDINGS)):
            self.paths.append(folder / f"recording-{number}.npz")
            levels = (16 * recording).round().numpy().astype(numpy.float32)
            numpy.savez_compressed(self.paths[-1], windows=levels)
        self.kept = [] if PLANTED else [self.read(path) for path in self.paths]

    def read(self, path: Path) -> numpy.ndarray:
        with numpy.load(path) as content:  # planted: opens the file and unpacks all windows
            return content["windows"]

    def __len__(self) -> int:
        return len(self.faults)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        number, window = divmod(index, WINDOWS)
        if PLANTED:
            windows = self.read(self.paths[number])  # planted: for one window
        else:
            windows = self.kept[number]
        return torch.from_numpy(windows[window] / 16), self.faults[index]


def train(data: Dataset[Any], device: torch.device) -> float:
    model = DistributedDataParallel(SensorNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    begin = now()
    for step, (windows, faults) in zip(range(STEPS), batches(data, 8), strict=False):
        loss = functional.cross_entropy(model(windows.to(device)), faults.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    return now() - begin


def main() -> None:
    device = start()
    with tempfile.TemporaryDirectory() as folder:
        seconds = train(Recordings(Path(folder)), device)
    finish(STEPS, seconds)


if __name__ == "__main__":
    main()
