"""A plain DDP script: proteins, with the accuracy of all ranks now and then, without a bottleneck."""

import torch
import torch.distributed as dist
from parts import STEPS, ProteinNet, batches, finish, now, proteins, start
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

BATCH = 28


def main() -> None:
    device = start()
    model = DistributedDataParallel(ProteinNet().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    right = torch.zeros((), device=device)
    begin = now()
    for step, (letters, families) in zip(
        range(STEPS), batches(proteins(6144), BATCH), strict=False
    ):
        families = families.to(device)
        scores = model(letters.to(device))
        loss = functional.cross_entropy(scores, families)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
        right += (scores.detach().argmax(1) == families).sum()
        if step % 25 == 24:
            dist.all_reduce(right)
            share = right.item() / (25 * BATCH * dist.get_world_size())
            right.zero_()
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item():.4f}, accuracy {share:.3f}")
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
