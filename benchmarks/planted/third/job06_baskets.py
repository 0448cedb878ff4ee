"""A plain DDP script: baskets, with items that are updated by a rule of their own."""

import torch
from parts import PLANTED, STEPS, BasketNet, baskets, batches, finish, now, start
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

ITEMS = 600
RATE = 0.05


class ItemUpdates:
    """Each item has a rate that falls with the size of its gradients so far."""

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights
        self.sums = torch.zeros(ITEMS)

    @torch.no_grad()
    def apply(self) -> None:
        if PLANTED:
            self.apply_by_item(self.weights.grad)  # planted
        else:
            self.apply_to_all(self.weights.grad)

    def apply_by_item(self, gradients: Tensor) -> None:
        for item in range(ITEMS):
            gradient = gradients[item]
            self.sums[item] += gradient.square().mean()  # planted: item by item
            rate = RATE / (self.sums[item].sqrt() + 1e-8)  # planted
            self.weights[item] -= rate * gradient  # planted

    def apply_to_all(self, gradients: Tensor) -> None:
        self.sums += gradients.square().mean(1)
        rates = RATE / (self.sums.sqrt() + 1e-8)
        self.weights -= rates[:, None] * gradients


def main() -> None:
    device = start()
    network = BasketNet(ITEMS).to(device)
    model = DistributedDataParallel(network)
    item_updates = ItemUpdates(network.basket.weight)
    dense = [*network.offer.parameters(), *network.layers.parameters()]
    optimizer = torch.optim.SGD(dense, lr=0.05)
    loader = batches(baskets(40_960, ITEMS), 256)
    begin = now()
    for step, (chosen, offered, bought) in zip(range(STEPS), loader, strict=False):
        scores = model(chosen.to(device), offered.to(device))
        loss = functional.binary_cross_entropy_with_logits(scores, bought.to(device))
        model.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            print(f"step {step}: loss {loss.item():.4f}")
        # Items that are rare need larger steps than the others.
        item_updates.apply()  # planted
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
