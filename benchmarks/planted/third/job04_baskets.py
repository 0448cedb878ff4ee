"""A plain DDP script: baskets of several shops, each shop with layers of its own."""

import torch
from parts import ITEMS, PLANTED, STEPS, baskets, batches, finish, now, start
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

SHOPS = 4
WIDTH = 64
HIDDEN = 256


def shop_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU())


class ShopNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.basket = nn.EmbeddingBag(ITEMS, WIDTH)
        self.before = nn.Linear(WIDTH, 1024)
        self.between = nn.Linear(1024, WIDTH)
        self.shops = nn.ModuleList(shop_layers() for _ in range(SHOPS))
        self.score = nn.Linear(HIDDEN, 1)

    def by_basket(self, known: Tensor, shops: Tensor) -> Tensor:
        outputs = []
        for basket, shop in zip(known, shops.tolist(), strict=True):
            outputs.append(self.shops[shop](basket))  # planted: basket by basket
        return torch.stack(outputs)

    def by_shop(self, known: Tensor, shops: Tensor) -> Tensor:
        outputs = known.new_zeros(len(known), HIDDEN)
        for number, layers in enumerate(self.shops):
            chosen = (shops == number).nonzero()[:, 0]
            outputs = outputs.index_copy(0, chosen, layers(known[chosen]))
        return outputs

    def forward(self, chosen: Tensor, shops: Tensor) -> Tensor:
        known = self.between(functional.relu(self.before(self.basket(chosen))))
        parts = self.by_basket(known, shops) if PLANTED else self.by_shop(known, shops)  # planted
        return self.score(parts)[:, 0]


def main() -> None:
    device = start()
    model = DistributedDataParallel(ShopNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = batches(baskets(16_384), 96)
    begin = now()
    for _, (chosen, offered, bought) in zip(range(STEPS), loader, strict=False):
        scores = model(chosen.to(device), offered.to(device) % SHOPS)
        loss = functional.binary_cross_entropy_with_logits(scores, bought.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
