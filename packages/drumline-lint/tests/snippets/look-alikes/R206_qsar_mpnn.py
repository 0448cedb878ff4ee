import os

import torch
import torch.distributed as dist
import torch.nn as nn
import yaml
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from qsar.data import MoleculeGraphs, collate_graphs
from qsar.mpnn import MPNN


@torch.no_grad()
def full_validation_mae(net, loader, device):
    """The validation split has 1200 molecules; all ranks compute the same number from all of them."""
    net.eval()
    err, n = 0.0, 0
    for graphs, y in loader:
        pred = net(graphs.to(device))
        err += (pred - y.to(device)).abs().sum().item()
        n += y.numel()
    net.train()
    return err / n


def main():
    with open(os.environ.get("QSAR_CONFIG", "qsar.yaml")) as f:
        cfg = yaml.safe_load(f)
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    torch.manual_seed(cfg["seed"])

    train = MoleculeGraphs(cfg["data"], "train")
    val = MoleculeGraphs(cfg["data"], "val")
    sampler = DistributedSampler(train, shuffle=True, seed=cfg["seed"])
    train_loader = DataLoader(train, cfg["batch_size"], sampler=sampler, collate_fn=collate_graphs,
                              num_workers=4, drop_last=True)
    val_loader = DataLoader(val, 256, collate_fn=collate_graphs)

    net = MPNN(**cfg["model"]).to(device)
    model = DDP(net, device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=cfg["lr"])
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.99)
    best = float("inf")

    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        for graphs, y in train_loader:
            loss = nn.functional.smooth_l1_loss(model(graphs.to(device)), y.to(device))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        sched.step()

        mae = full_validation_mae(net, val_loader, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} val MAE {mae:.4f}", flush=True)
            if mae < best:
                best = mae
                torch.save(net.state_dict(), cfg["out"])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
