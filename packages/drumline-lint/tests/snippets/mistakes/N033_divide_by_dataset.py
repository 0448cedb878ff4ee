import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms
from torchvision.datasets import FashionMNIST


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(),
                         nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def train_loop(loader, model, loss_fn, optimizer, dev):
    model.train()
    for X, y in loader:
        X, y = X.to(dev), y.to(dev)
        loss = loss_fn(model(X), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_loop(loader, model, dev):
    model.eval()
    size = len(loader.dataset)
    correct = 0
    with torch.no_grad():
        for X, y in loader:
            pred = model(X.to(dev))
            correct += (pred.argmax(1) == y.to(dev)).type(torch.float).sum().item()
    return correct / size


if __name__ == "__main__":
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dev = f"cuda:{local_rank}"

    t = transforms.ToTensor()
    train_data = FashionMNIST("/data/fmnist", train=True, transform=t)
    test_data = FashionMNIST("/data/fmnist", train=False, transform=t)
    train_s, test_s = DistributedSampler(train_data), DistributedSampler(test_data, shuffle=False)
    train_dl = DataLoader(train_data, batch_size=64, sampler=train_s, drop_last=True)
    test_dl = DataLoader(test_data, batch_size=64, sampler=test_s)

    model = DDP(mlp().to(dev), device_ids=[local_rank])
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for t in range(20):
        train_s.set_epoch(t)
        train_loop(train_dl, model, loss_fn, optimizer, dev)
        acc = test_loop(test_dl, model, dev)
        if dist.get_rank() == 0:
            print(f"Epoch {t + 1}: accuracy {100 * acc:>0.1f}%")
    dist.destroy_process_group()
