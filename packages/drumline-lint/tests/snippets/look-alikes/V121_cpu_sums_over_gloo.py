import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

from pointcloud.data import ModelNet40
from pointcloud.net import PointNetPP


class Evaluator:
    def __init__(self, loader, device):
        self.loader = loader
        self.device = device
        self.cpu_group = dist.new_group(backend="gloo")

    @torch.no_grad()
    def __call__(self, model):
        model.eval()
        correct, total, loss = 0, 0, 0.0
        for points, label in self.loader:
            points, label = points.to(self.device), label.to(self.device)
            logits = model(points)
            loss += F.cross_entropy(logits, label, reduction="sum").item()
            correct += (logits.argmax(1) == label).sum().item()
            total += label.size(0)
        sums = torch.tensor([correct, total, loss], dtype=torch.float64)
        dist.all_reduce(sums, group=self.cpu_group)
        correct, total, loss = sums.tolist()
        return {"acc": 100.0 * correct / total, "loss": loss / total}


def main():
    dist.init_process_group(backend="nccl")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)

    train_set, test_set = ModelNet40("train", augment=True), ModelNet40("test")
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, 32, sampler=sampler, num_workers=4, drop_last=True)
    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), dist.get_world_size())), 32)
    model = DDP(PointNetPP(40).to(device), device_ids=[device.index])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    evaluate = Evaluator(test_loader, device)

    for epoch in range(250):
        sampler.set_epoch(epoch)
        model.train()
        for points, label in train_loader:
            loss = F.cross_entropy(model(points.to(device)), label.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        result = evaluate(model.module)
        if rank == 0:
            print(f"epoch {epoch} test acc {result['acc']:.2f}% loss {result['loss']:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
