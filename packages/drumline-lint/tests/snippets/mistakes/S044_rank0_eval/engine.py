import torch
import torch.distributed as dist
from torch import nn


def train_one_epoch(model, loader, opt, epoch):
    loader.sampler.set_epoch(epoch)
    model.train()
    total = torch.zeros((), device="cuda")
    for x, y in loader:
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / len(loader) / dist.get_world_size()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    good = seen = 0
    for x, y in loader:
        out = model(x.cuda(non_blocking=True))
        good += (out.argmax(1).cpu() == y).sum().item()
        seen += y.numel()
    return good / seen
