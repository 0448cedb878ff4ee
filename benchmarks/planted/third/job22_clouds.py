"""A plain DDP script: point clouds, without a bottleneck."""

import torch
import torch.distributed as dist
from parts import STEPS, CloudNet, batches, clouds, finish, now, start
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    device = start()
    model = DistributedDataParallel(CloudNet().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    loader = batches(clouds(6144), 32)
    begin = now()
    for step, (places, shapes) in zip(range(STEPS), loader, strict=False):
        loss = functional.cross_entropy(model(places.to(device)), shapes.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
