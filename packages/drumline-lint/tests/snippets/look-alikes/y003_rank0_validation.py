"""Chest X-ray findings, one node (torchrun --standalone --nproc_per_node=4)."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.models import densenet121

from xray import CheXpert


@torch.no_grad()
def evaluate(net, loader, device):
    net.eval()
    loss, n = 0.0, 0
    for x, y in loader:
        out = net(x.to(device, non_blocking=True))
        loss += F.binary_cross_entropy_with_logits(out, y.to(device), reduction="sum").item()
        n += y.numel()
    return loss / n


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    train_set = CheXpert("/data/chexpert", "train")
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, 48, sampler=sampler, num_workers=8, pin_memory=True,
                              drop_last=True)
    val_loader = None
    if rank == 0:
        # 234 images, a few seconds on one GPU
        val_loader = DataLoader(CheXpert("/data/chexpert", "valid"), 64, num_workers=4)

    model = DDP(densenet121(num_classes=14).to(device), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    best = float("inf")

    for epoch in range(10):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            loss = F.binary_cross_entropy_with_logits(model(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

        if rank == 0:
            val_loss = evaluate(model.module, val_loader, device)
            print(f"epoch {epoch} val {val_loss:.4f}", flush=True)
            if val_loss < best:
                best = val_loss
                torch.save(model.module.state_dict(), "xray_best.pt")
        dist.barrier()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
