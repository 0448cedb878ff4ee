import torch
import torch.nn.functional as F

from meters import AverageMeter


def train_one_epoch(model, loader, optimizer, device):
    model.train()
    loss_m = AverageMeter("loss")
    for points, label in loader:
        points, label = points.to(device, non_blocking=True), label.to(device, non_blocking=True)
        loss = F.cross_entropy(model(points), label, label_smoothing=0.2)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        loss_m.update(loss.item(), label.numel())
    loss_m.all_reduce()
    return loss_m.avg


@torch.no_grad()
def validate(net, loader, device):
    net.eval()
    acc = AverageMeter("acc")
    for points, label in loader:
        pred = net(points.to(device)).argmax(-1).cpu()
        acc.update((pred == label).float().mean(), label.numel())
    acc.all_reduce()
    return acc.avg
