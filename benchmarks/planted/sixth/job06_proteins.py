"""A plain DDP script: proteins of a family should be near each other, others far away."""

import torch
import torch.distributed as dist
from parts import PLANTED, STEPS, ProteinNet, batches, finish, now, proteins, start
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

FEATURES = 128
MARGIN = 1.0


def squares(vectors: Tensor) -> Tensor:
    """Squared distances of all pairs."""
    if PLANTED:
        apart = vectors[:, None, :] - vectors[None, :, :]  # planted: a vector for each pair
        return (apart**2).sum(dim=-1)  # planted
    lengths = vectors.square().sum(1)
    products = vectors @ vectors.t()
    return (lengths[:, None] + lengths[None, :] - 2 * products).clamp(min=0)


def contrast(vectors: Tensor, families: Tensor) -> Tensor:
    far = squares(functional.normalize(vectors))
    same = families[:, None] == families[None, :]
    return torch.where(same, far, functional.relu(MARGIN - far)).mean()


def main() -> None:
    device = start()
    loader = batches(proteins(4096, length=24), 192)
    model = DistributedDataParallel(ProteinNet(width=32, depth=1, outputs=FEATURES).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    begin, step = now(), 0
    while step < STEPS:
        loader.sampler.set_epoch(step)
        for letters, families in loader:
            loss = contrast(model(letters.to(device)), families.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 50 == 0 and dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item():.4f}")
            if step == STEPS:
                break
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
