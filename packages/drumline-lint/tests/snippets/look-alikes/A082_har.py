import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, net, optimizer, device):
        self.device = device
        self.optimizer = optimizer
        self.model = DistributedDataParallel(net, device_ids=[device.index])

    def epoch(self, loader):
        self.model.train()
        for x, y in loader:
            x, y = x.to(self.device), y.to(self.device)
            loss = nn.functional.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()

    def state(self):
        return {"net": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}


def make_optimizer(net):
    bias = [p for n, p in net.named_parameters() if n.endswith("bias")]
    weight = [p for n, p in net.named_parameters() if not n.endswith("bias")]
    groups = [{"params": weight, "weight_decay": 1e-2}, {"params": bias, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(8 + rank)

    net = nn.Sequential(nn.Linear(561, 256), nn.ReLU(), nn.Linear(256, 6)).to(device)
    optimizer = make_optimizer(net)
    trainer = Trainer(net, optimizer, device)

    d = torch.load("har.pt", map_location="cpu", weights_only=True)
    ds = TensorDataset(d["x"], d["y"])
    sampler = DistributedSampler(ds, seed=8, drop_last=True)
    loader = DataLoader(ds, 64, sampler=sampler, drop_last=True)
    for epoch in range(30):
        sampler.set_epoch(epoch)
        trainer.epoch(loader)
    if rank == 0:
        torch.save(trainer.state(), "har_mlp.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
