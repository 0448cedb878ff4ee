"""A plain DDP script: ratings, without a bottleneck."""

import torch
from parts import STEPS, VisitNet, batches, finish, now, start, visits
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    device = start()
    model = DistributedDataParallel(VisitNet(hidden=768).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    begin = now()
    loader = batches(visits(2 * 512 * STEPS), 512)
    for step, (seen, following, ratings) in enumerate(loader, start=1):
        predicted = model(seen.to(device), following.to(device))
        loss = functional.mse_loss(predicted, ratings.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
