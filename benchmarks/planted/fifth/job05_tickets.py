"""A plain DDP script: tickets, with a search for NaN that was left on."""

import torch
import torch.distributed as dist
from parts import PLANTED, STEPS, TicketNet, batches, finish, now, start, tickets
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


def prepare() -> None:
    torch.autograd.set_detect_anomaly(PLANTED)  # planted: loss was NaN in March


def main() -> None:
    device = start()
    prepare()
    network = TicketNet(width=32, depth=6)
    model = DistributedDataParallel(network.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    begin = now()
    for step, (tokens, departments) in zip(range(STEPS), batches(tickets(4096), 6), strict=False):
        loss = functional.cross_entropy(model(tokens.to(device)), departments.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
