import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

from birds import BirdCalls, build_model


def setup():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    return dist.get_rank(), dist.get_world_size(), local_rank


@torch.no_grad()
def validate(model, loader, device):
    model.eval()
    totals = torch.zeros(2, device=device)
    for x, y in loader:
        pred = model(x.to(device)).argmax(dim=1)
        totals[0] += (pred == y.to(device)).sum()
        totals[1] += y.numel()
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


def main():
    rank, world_size, local_rank = setup()
    device = torch.device("cuda", local_rank)

    train_set = BirdCalls("/data/birds", split="train")
    val_set = BirdCalls("/data/birds", split="val")
    val_part = Subset(val_set, range(rank, len(val_set), world_size))
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, 64, sampler=sampler, num_workers=6, pin_memory=True)
    val_loader = DataLoader(val_part, 128, num_workers=4)

    model = DDP(build_model(train_set.num_classes).to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    best = 0.0
    for epoch in range(50):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()

        if rank == 0:
            accuracy = validate(model.module, val_loader, device)
            print(f"epoch {epoch}: accuracy {accuracy:.3f}")
            if accuracy > best:
                best = accuracy
                torch.save(model.module.state_dict(), "best.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
