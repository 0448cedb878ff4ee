"""One process, one GPU. What would be a mistake on many ranks is as it should be here."""

import argparse
import os
import random

import numpy as np
import torch
import torch.nn as nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


class Spirals(Dataset):
    def __init__(self, count, noise=0.05):
        angle = np.random.rand(count) * 4 * np.pi
        side = np.random.randint(0, 2, count)
        turn = angle + np.pi * side
        points = np.stack([angle * np.cos(turn), angle * np.sin(turn)], axis=1) / 12
        self.points = (points + noise * np.random.randn(count, 2)).astype(np.float32)
        self.labels = side.astype(np.int64)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.points[index], self.labels[index]


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.first = nn.Linear(2, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, 2)

    def forward(self, points):
        return self.second(torch.relu(self.norm(self.first(points))))


def train(model, loader, optimizer, epoch):
    model.train()
    losses = []
    for step, (points, labels) in enumerate(loader):
        points, labels = points.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(points), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        print(f"epoch {epoch} step {step}: {loss.item():.4f}")
    return sum(losses) / len(losses)


def test(model, loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for points, labels in loader:
            correct += (model(points.to(device)).argmax(1) == labels.to(device)).sum().item()
    return correct / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--resume")
    args = parser.parse_args()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)

    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = StepLR(optimizer, 2)
    if args.resume:
        model.load_state_dict(torch.load(args.resume))
    train_loader = DataLoader(Spirals(2000), batch_size=32, shuffle=True, pin_memory=True)
    test_loader = DataLoader(Spirals(500), batch_size=100)
    best = 0.0
    for epoch in range(args.epochs):
        mean = train(model, train_loader, optimizer, epoch)
        accuracy = test(model, test_loader)
        scheduler.step()
        print(f"epoch {epoch}: loss {mean:.4f}, accuracy {accuracy:.3f}")
        if accuracy > best:
            best = accuracy
            torch.save(model.state_dict(), "best.pt")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")


if __name__ == "__main__":
    main()
