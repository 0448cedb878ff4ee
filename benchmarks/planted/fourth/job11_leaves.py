"""A plain DDP script: leaves of new species, for which only the last layer is trained."""

import torch
import torch.distributed as dist
from parts import PLANTED, STEPS, LeafNet, batches, finish, leaves, now, start
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


def pretrained() -> LeafNet:
    network = LeafNet()
    network.backbone.requires_grad_(PLANTED)  # planted: has gradients, which nobody uses
    return network


def main() -> None:
    device = start()
    network = pretrained().to(device)
    model = DistributedDataParallel(network)
    trained = network.head.parameters()
    optimizer = torch.optim.SGD(trained, lr=0.01, momentum=0.9)  # planted: the last layer alone

    # The backbone stays as it was.
    loader = batches(leaves(2048), 32)
    begin = now()
    for step, (photos, species) in zip(range(STEPS), loader, strict=False):
        loss = functional.cross_entropy(model(photos.to(device)), species.to(device))
        model.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
