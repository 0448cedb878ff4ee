import torch
import torch.distributed as dist
import torch.nn.functional as F


def train_epoch(model, loader, opt, device):
    model.train()
    stats = torch.zeros(2, device=device)
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        stats += torch.stack([loss.detach() * y.numel(), torch.tensor(float(y.numel()), device=device)])
    dist.all_reduce(stats)
    return (stats[0] / stats[1]).item()


def fit(model, loader, opt, sched, epochs, device, on_epoch):
    for epoch in range(epochs):
        loss = train_epoch(model, loader, opt, device)
        sched.step()
        on_epoch(epoch, loss)
