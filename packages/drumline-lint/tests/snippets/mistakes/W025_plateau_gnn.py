import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler

from molecules import Molecules, MessagePassing, batch_graphs


def validation_loss(net, loader, device):
    total = torch.zeros(2, device=device)
    net.eval()
    with torch.no_grad():
        for graph, target in loader:
            pred = net(graph.to(device))
            total[0] += F.l1_loss(pred, target.to(device), reduction="sum")
            total[1] += target.numel()
    dist.reduce(total, dst=0, op=dist.ReduceOp.SUM)
    return (total[0] / total[1]).item()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()

    train, val = Molecules("/data/qm9", "train"), Molecules("/data/qm9", "val")
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, batch_size=64, sampler=sampler, collate_fn=batch_graphs, num_workers=3)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), batch_size=128, collate_fn=batch_graphs)

    net = DDP(MessagePassing(hidden=256, layers=6).to(device), device_ids=[local_rank])
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    plateau = ReduceLROnPlateau(opt, factor=0.5, patience=5)

    for epoch in range(300):
        sampler.set_epoch(epoch)
        net.train()
        for graph, target in train_loader:
            loss = F.l1_loss(net(graph.to(device)), target.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
        val_mae = validation_loss(net.module, val_loader, device)
        plateau.step(val_mae)
        if rank == 0:
            print(f"epoch {epoch} mae {val_mae:.5f} lr {opt.param_groups[0]['lr']:.2e}")
            torch.save(net.module.state_dict(), "qm9.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
