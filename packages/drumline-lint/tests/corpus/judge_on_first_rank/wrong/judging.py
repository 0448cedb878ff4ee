"""How good a model is on held-out ponds."""

import torch
from torch import nn


class Judge:
    """Keeps the best score, and the inner model with it."""

    def __init__(self, model, loader, device):
        self.model = model
        self.loader = loader
        self.device = device
        self.best = float("inf")

    def judge(self):
        score = mean_loss(self.model, self.loader, self.device)
        is_best = score < self.best
        self.best = min(score, self.best)
        return score, is_best


@torch.no_grad()
def mean_loss(network, loader, device):
    network.eval()
    total, count = 0.0, 0
    for depths, labels in loader:
        loss = one_loss(network, depths.to(device), labels.to(device))
        total += loss.item()
        count += labels.numel()
    network.train()
    return total / max(count, 1)


def one_loss(network, depths, labels):
    return nn.functional.cross_entropy(network(depths), labels, reduction="sum")


def confusion(network, loader, device, classes):
    table = torch.zeros(classes, classes, device=device)
    with torch.inference_mode():
        for depths, labels in loader:
            guesses = network(depths.to(device)).argmax(dim=1)
            cells = labels.to(device) * classes + guesses
            table += torch.bincount(cells, minlength=classes * classes).view(classes, classes)
    return table
