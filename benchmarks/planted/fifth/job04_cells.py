"""A plain DDP script: cells, with waves over the picture, which tell the network places."""

import math

import torch
import torch.distributed as dist
from parts import PLANTED, STEPS, batches, cells, convolution, finish, now, start
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

WAVES = 16


def height(row: int, column: int, wave: int) -> float:
    angle = math.pi * wave / WAVES
    length = 4.0 * 1.3**wave
    return math.sin(2 * math.pi * (row * math.cos(angle) + column * math.sin(angle)) / length)


def waves(rows: int, columns: int) -> Tensor:
    """Waves of several lengths and directions."""
    table = []
    for wave in range(WAVES):
        for row in range(rows):
            table += [height(row, column, wave) for column in range(columns)]  # planted
    return torch.tensor(table).view(1, WAVES, rows, columns)


class PlacedNet(nn.Module):
    """Knows where in the picture a pixel is."""

    def __init__(self, rows: int, columns: int, width: int = 8) -> None:
        super().__init__()
        self.known = None if PLANTED else waves(rows, columns)
        self.first = convolution(1 + WAVES, width)
        self.middle = convolution(width, width)
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, pictures: Tensor) -> Tensor:
        if self.known is None:
            places = waves(*pictures.shape[2:])  # planted: of the same size in every step
        else:
            places = self.known
        placed = places.to(pictures.device).expand(len(pictures), -1, -1, -1)
        return self.last(self.middle(self.first(torch.cat([pictures, placed], dim=1))))


def main() -> None:
    device = start()
    data = cells(1024)
    model = DistributedDataParallel(PlacedNet(*data.tensors[0].shape[2:]).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    begin = now()
    for step, (pictures, masks) in zip(range(STEPS), batches(data, 6), strict=False):
        scores = model(pictures.to(device))
        loss = functional.binary_cross_entropy_with_logits(scores, masks.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
