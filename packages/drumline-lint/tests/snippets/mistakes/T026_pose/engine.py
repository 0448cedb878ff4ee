import torch

from utils.dist import reduce_mean


def heatmap_loss(pred, target, weight):
    return ((pred - target).pow(2).mean(dim=(2, 3)) * weight).mean()


def train_one_epoch(model, loader, optimizer):
    model.train()
    total = torch.zeros((), device="cuda")
    for img, target, weight in loader:
        img, target, weight = img.cuda(non_blocking=True), target.cuda(non_blocking=True), weight.cuda()
        loss = heatmap_loss(model(img), target, weight)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    return reduce_mean(total / len(loader)).item()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    err = torch.zeros((), device="cuda")
    for img, target, weight in loader:
        err += heatmap_loss(model(img.cuda()), target.cuda(), weight.cuda())
    return reduce_mean(err / len(loader)).item()
