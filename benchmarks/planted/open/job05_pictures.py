"""A plain DDP script: pictures, with a parameter of its own for each of 2,000 offsets."""

import time

import torch
from parts import PLANTED, STEPS, PictureNet, batches, finish, pictures, start
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

OFFSETS = 2000


class OffsetNet(PictureNet):
    def __init__(self) -> None:
        super().__init__()
        if PLANTED:
            self.offsets = nn.ParameterList(torch.zeros(1) for _ in range(OFFSETS))  # planted
        else:
            self.offsets = nn.ParameterList([torch.zeros(OFFSETS)])

    def forward(self, images: Tensor) -> Tensor:
        features = self.features(images).flatten(1)
        offsets = torch.cat(list(self.offsets))
        return self.scores(features + functional.pad(offsets, (0, features.shape[1] - OFFSETS)))


def main() -> None:
    device = start()
    model = DistributedDataParallel(OffsetNet().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    begin = time.perf_counter()
    for _, (images, labels) in zip(range(STEPS), batches(pictures(4096)), strict=False):
        loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish(STEPS, time.perf_counter() - begin)


if __name__ == "__main__":
    main()
