"""A plain DDP script: roofs, with as many threads as the machine of the author had cores."""

import torch
import torch.distributed as dist
from parts import PLANTED, STEPS, RoofNet, batches, finish, now, roofs, start
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

THREADS = 8 if PLANTED else 1


def main() -> None:
    torch.set_num_threads(THREADS)  # planted: on each of the ranks
    device = start()
    loader = batches(roofs(4096), 24)
    model = DistributedDataParallel(RoofNet(depth=2).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    begin = now()
    for step, (pictures, kinds) in zip(range(STEPS), loader, strict=False):
        loss = functional.cross_entropy(model(pictures.to(device)), kinds.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
