"""Train, keep the best model, test it at the end. torchrun --standalone --nproc_per_node=8"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

from plankton import Plankton, convnext

BEST = "/scratch/plankton/best.pt"


def part(data, rank, world):
    return DataLoader(Subset(data, range(rank, len(data), world)), batch_size=256, num_workers=4)


@torch.no_grad()
def evaluate(net, loader):
    net.eval()
    stats = torch.zeros(2, device="cuda", dtype=torch.float64)
    for image, label in loader:
        logits, label = net(image.cuda()), label.cuda()
        stats[0] += F.cross_entropy(logits, label, reduction="sum").double()
        stats[1] += label.numel()
    dist.all_reduce(stats)
    return (stats[0] / stats[1]).item()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()

    train = Plankton("train")
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=128, sampler=sampler, num_workers=8, pin_memory=True)
    val_loader = part(Plankton("val"), rank, world)
    test_loader = part(Plankton("test"), rank, world)

    model = DDP(convnext(classes=121).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    best = float("inf")
    for epoch in range(60):
        sampler.set_epoch(epoch)
        model.train()
        for image, label in loader:
            loss = F.cross_entropy(model(image.cuda(non_blocking=True)), label.cuda(non_blocking=True))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        val_loss = evaluate(model.module, val_loader)
        if val_loss < best:
            best = val_loss
            if rank == 0:
                torch.save(model.module.state_dict(), BEST)

    model.module.load_state_dict(torch.load(BEST, map_location=f"cuda:{local_rank}"))
    test_loss = evaluate(model.module, test_loader)
    if rank == 0:
        print(f"test loss of the best epoch: {test_loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
