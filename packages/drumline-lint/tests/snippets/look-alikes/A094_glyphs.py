import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


class Ema:
    def __init__(self, net, decay=0.999):
        self.net = copy.deepcopy(net).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, net):
        for slow, fast in zip(self.net.parameters(), net.parameters()):
            slow.lerp_(fast, 1 - self.decay)


@torch.no_grad()
def accuracy(net, loader, device):
    c = torch.zeros(2, device=device)
    for x, y in loader:
        c[0] += (net(x.to(device)).argmax(1) == y.to(device)).sum()
        c[1] += y.numel()
    dist.all_reduce(c)
    return (c[0] / c[1]).item()


def data(name):
    d = torch.load(f"glyphs_{name}.pt", map_location="cpu", weights_only=True)
    return TensorDataset(d["x"], d["y"])


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(64 + rank)
    train, test = data("train"), data("test")
    sampler = DistributedSampler(train, seed=64, drop_last=True)
    loader = DataLoader(train, 128, sampler=sampler, drop_last=True)
    test_loader = DataLoader(Subset(test, range(rank, len(test), world)), 512)
    net = nn.Sequential(nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 62)).to(device)
    model = DDP(net, device_ids=[local_rank])
    ema = Ema(model.module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(20):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            ema.update(model.module)
        acc = accuracy(ema.net, test_loader, device)
        if rank == 0:
            print(f"epoch {epoch} averaged model {acc:.4f}")
            torch.save({"net": model.module.state_dict(), "ema": ema.net.state_dict()}, "glyphs.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
