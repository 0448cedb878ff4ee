"""A plain DDP script: baskets, with features of many items that are not trained."""

import torch
from parts import PLANTED, STEPS, baskets, batches, finish, now, seeded, start
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

CATALOGUE = 250_000
WIDTH = 64


class CatalogueNet(nn.Module):
    features: Tensor

    def __init__(self) -> None:
        super().__init__()
        features = torch.randn(CATALOGUE, WIDTH, generator=seeded(8))
        self.register_buffer("features", features)  # planted: 64 MB
        self.layers = nn.Sequential(
            nn.Linear(2 * WIDTH, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)
        )

    def forward(self, chosen: Tensor, offered: Tensor) -> Tensor:
        known = torch.cat([self.features[chosen].mean(1), self.features[offered]], dim=1)
        return self.layers(known)[:, 0]


def distributed(network: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(network, broadcast_buffers=PLANTED)  # planted: in each forward


def main() -> None:
    device = start()
    model = distributed(CatalogueNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = batches(baskets(40_960, items=CATALOGUE), 256)
    begin = now()
    for _, (chosen, offered, bought) in zip(range(STEPS), loader, strict=False):
        scores = model(chosen.to(device), offered.to(device))
        loss = functional.binary_cross_entropy_with_logits(scores, bought.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
