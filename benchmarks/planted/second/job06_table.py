"""A torchrun script without DDP: a table, and a deep network whose gradients it averages itself."""

import torch
import torch.distributed as dist
from parts import PLANTED, STEPS, TableNet, batches, finish, now, rows, start
from torch import nn
from torch.nn import functional


def average_each(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # planted: one after the other
        parameter.grad /= dist.get_world_size()


def average_together(model: nn.Module) -> None:
    gradients = [parameter.grad for parameter in model.parameters()]
    joined = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(joined)
    joined /= dist.get_world_size()
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, part in zip(gradients, joined.split(sizes), strict=True):
        gradient.copy_(part.view_as(gradient))


def main() -> None:
    device = start()
    model = TableNet(width=64, depth=80).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    average = average_each if PLANTED else average_together
    begin = now()
    for _, (cells, targets) in zip(range(STEPS), batches(rows(16_384), 64), strict=False):
        loss = functional.smooth_l1_loss(model(cells.to(device)), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        average(model)  # planted
        optimizer.step()
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
