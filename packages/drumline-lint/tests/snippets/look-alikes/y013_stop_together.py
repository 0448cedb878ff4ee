import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from demand import DemandSeries, NBeats

PATIENCE = 8


@torch.no_grad()
def smape(net, loader, device):
    net.eval()
    total, n = 0.0, 0
    for x, y in loader:
        y, p = y.to(device), net(x.to(device))
        total += (2 * (p - y).abs() / (p.abs() + y.abs() + 1e-6)).sum().item()
        n += y.numel()
    return total / n


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    train_set = DemandSeries("/data/m5", "train")
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, 512, sampler=sampler, num_workers=4, drop_last=True)
    val_loader = DataLoader(DemandSeries("/data/m5", "val"), 2048)

    model = DDP(NBeats().to(device), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    best, waited = float("inf"), 0
    stop = torch.zeros(1, dtype=torch.int32, device=device)
    for epoch in range(200):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = F.l1_loss(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        if rank == 0:
            score = smape(model.module, val_loader, device)
            print(f"epoch {epoch} smape {score:.4f}", flush=True)
            if score < best:
                best, waited = score, 0
                torch.save(model.module.state_dict(), "demand_best.pt")
            else:
                waited += 1
            stop.fill_(int(waited >= PATIENCE))
        dist.broadcast(stop, src=0)
        if stop.item():
            break

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
